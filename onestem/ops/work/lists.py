"""`WorkList`: the items of a persistent kernel's programs, in one int32 buffer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

import onestem.ops.plan as plan_columns
from onestem.arrays import argsort, before, is_first, ragged
from onestem.errors import ConfigError
from onestem.ops.plan import RUN_OFFSET, RUN_PAGES, RUN_POSITION, AttentionPlan
from onestem.ops.work.cuts import Segments, cuts_of, segments_of, tile_columns
from onestem.ops.work.deal import Deal
from onestem.ops.work.groups import Groups, Pairs, shared_groups
from onestem.ops.work.model import CostModel
from onestem.ops.work.units import Blocks, blocks_of, pairs_of, units_of

HEADER = 16  # words before the records
QUEUED = 16  # words of a queue
RECORD = 16  # words of an item's record: 8 of its own, 8 of its first walk entry
ENTRY = 8  # words of a walk entry
# Words of the header in which kernels count items taken after each program's first: by two kinds of
# tiles, on the grid by three.
QUEUE, GRID_QUEUE = 14, 13

# Words of the header: numbers of items of narrower tiles and of the widest, and of merges; starts
# of sections; the window, `split`, start of records.
NUM_NARROW, NUM_WIDE, NUM_MERGES = range(3)
AT_WALK, AT_ROWS, AT_DEST, AT_MERGES, AT_PAGES, AT_POSITIONS, WINDOW = range(3, 10)
SPLIT, AT_RECORDS = 10, 12
LEFT = 11  # where kernels on the grid count the halves of works that have left states
# Words of a record, of a walk entry and of a merge.
KIND, NUM_ROWS, ROW_START, NUM_WALK, WALK_START, SHARED, HANDED, AWAITED = range(8)
FIRST_ENTRY = 8
# Words of a queue, where a record has none that programs with queues read; the others are those of
# its first item's record, so that a program reads both at once.
QUEUE_HEAD, QUEUE_START, QUEUE_STOP, QUEUE_FEW = 0, 6, 7, 15
LO, CLEAR_LO, CLEAR_HI, HI, END, STEP, POSITION = range(7)
MERGED_ROW, FIRST_STATE, NUM_PARTS = range(3)
LEAVES, GOES_ON = 1, 2  # `Hand` in csrc/attention.h

SIMILAR = 8  # steps whose rows and tokens differ by at most this part keep a `Choice`
KEPT_LISTS = 16  # work lists made with a choice before it is compared again
# Of what atoms see, where rows are moved: with more, a list takes longer to make than it may save.
# So does any list of prompts with moved rows, since it serves one step.
MOST_COMPARED = 4096


class ListTooLong(ConfigError):
    """A work list does not fit in the buffer given."""


@dataclass(frozen=True, eq=False)
class WorkList:
    """Work items of a plan (int32 arrays), in the order in which programs take them.

    Attributes:
        plan: the plan it was made from.
        num_wide: items of the widest tiles; they come last.
        split: programs that take those, and programs that take the others.
        queues: `[2 * programs, 16]` if items are dealt out beforehand (`CostModel.together`), else
            `[0, 16]`. One for each half of a program. Word 0: its KV head. Words 6 and 7: its first
            item and the end of its items. Word 15: the start of its items of the narrowest of three
            tiles, or -1: the program multiplies, and both halves have the same items. Other words:
            a copy of its first item's record.
        records: `[num_items, 16]`. Words 0 to 5: index of its tile, number of rows, their start in
            `rows`, number of walk entries, start of the second in `walk`, and whether its rows have
            other items: none (0), all (1) or some (2). On the grid words 6 and 7: one more than
            the state that its row goes on from, or -1 where it leaves such; how many halves of
            works leave some, all of which come first. Words 8 to 15: its first entry.
        walk: `[num_more_entries, 8]`: lo, clear_lo, clear_hi, hi, end, step, position, 0. They
            count in slots of the list of pages: token t of a run is at x = base + t, in page
            `pages[x // page_size]`. Row j of the item sees lo <= x < min(hi, end + j * step),
            less what its window hides; all rows see all of clear_lo .. clear_hi - 1. The position
            id of x is x + position.
        pages: the plan's `run_pages`, then those of short runs that an entry walks as one.
        rows: `[num_parts]`: queries of all items.
        dest: `[num_parts]`: the state that the part of a row becomes; -1: it is the only part of a
            row that has no moved ones.
        merges: `[num_merges, 4]`: row, its first state, number of states (0: empty row), 0.
        num_states: number of partial states.
        choice: whether items of the widest tiles pay, if it was asked.
        room: decode steps that `growing_words` may advance it by; None: any number.
    """

    plan: AttentionPlan
    num_wide: int
    split: tuple[int, int]
    queues: np.ndarray
    records: np.ndarray
    walk: np.ndarray
    pages: np.ndarray
    rows: np.ndarray
    dest: np.ndarray
    merges: np.ndarray
    num_states: int
    choice: Choice | None
    room: int | None
    entries: Entries = field(repr=False)

    @property
    def num_items(self) -> int:
        """Items of all programs."""
        return len(self.records)

    def _starts(self) -> list[int]:
        """Starts of the sections in a packed buffer, and its length: queues, records, walk, rows,
        dest, merges, pages, positions."""
        sizes = [part.size for part in self._sections()]
        return np.cumsum([HEADER] + [-(-size // 4) * 4 for size in sizes]).tolist()

    def _sections(self) -> tuple[np.ndarray, ...]:
        return (
            self.queues,
            self.records,
            self.walk,
            self.rows,
            self.dest,
            self.merges,
            self.pages,
            self.plan.row_position,
        )

    @property
    def num_words(self) -> int:
        """Length of the packed buffer."""
        return self._starts()[-1]

    def pack(self, out: np.ndarray) -> int:
        """Write everything into `out` (int32 `[max_words]`); return the words used. If it does not
        fit, raise `ListTooLong` and write nothing.

        The header's words are named above. Queues begin at word 16, sections at multiples of 4.
        """
        *starts, words = self._starts()
        if words > len(out):
            raise ListTooLong(
                f"the work list takes {words} words, the buffer holds {len(out)}: raise max_words"
            )
        out[:HEADER] = 0
        out[NUM_NARROW], out[NUM_WIDE] = self.num_items - self.num_wide, self.num_wide
        out[NUM_MERGES], out[AT_WALK : AT_POSITIONS + 1] = len(self.merges), starts[2:]
        out[WINDOW] = 2**30 if self.plan.window is None else self.plan.window
        out[SPLIT : SPLIT + 2] = self.split
        out[AT_RECORDS] = starts[1]
        for start, part in zip(starts, self._sections(), strict=True):
            out[start : start + part.size] = part.reshape(-1)
        return words

    def growing_words(self, spans: np.ndarray) -> np.ndarray:
        """int64: the words of a packed buffer that a decode step adds 1 to.

        `spans`: int `[n]`, the one-row spans whose `end` grows by one. All rows advance by one
        position. Valid until the plan changes in any other way; writing a page id into the slack of
        a run's list is no such change (see `page_word`).
        """
        starts, entries = self._starts(), self.entries
        grows = np.zeros(self.plan.num_spans, bool)
        grows[spans] = True
        words = np.where(
            entries.more,
            starts[2] + ENTRY * entries.place,
            starts[1] + RECORD * entries.place + FIRST_ENTRY,
        )
        last = entries.last & grows[entries.span]
        # A record that is copied to queues grows there too.
        place = np.full(self.num_items, -1)
        place[entries.place[~entries.more]] = np.flatnonzero(~entries.more)
        used = np.flatnonzero(self.queues[:, QUEUE_START] < self.queues[:, QUEUE_STOP])
        copied = place[self.queues[used, QUEUE_START]]
        words = np.append(words, starts[0] + QUEUED * used + FIRST_ENTRY)
        last = words[np.append(last, last[copied])]
        position = starts[7] + np.arange(self.plan.num_queries)
        # With a window, what all rows see begins one token later.
        hidden = words + CLEAR_LO if self.plan.window is not None else words[:0]
        return np.concatenate((last + CLEAR_HI, last + HI, last + END, position, hidden))

    def page_word(self, runs: np.ndarray, index: np.ndarray) -> np.ndarray:
        """int64: the word of the buffer that holds page `index[i]` of run `runs[i]`."""
        return self._starts()[6] + self.plan.runs[runs, RUN_PAGES].astype(np.int64) + index


@dataclass(frozen=True, eq=False)
class Entries:
    """The place of each walk entry, `[num_entries]`: its span, whether it is the span's last piece
    for its rows, whether it is in `walk` (else in a record), and its index there."""

    span: np.ndarray
    last: np.ndarray
    more: np.ndarray
    place: np.ndarray


@dataclass(frozen=True)
class Choice:
    """Whether a list of a step of `num_rows` rows, which see `tokens` in all, has items of the
    widest tiles. To compare takes as long as a second list."""

    num_rows: int
    tokens: int
    multiply: bool

    def holds(self, num_rows: int, tokens: int) -> bool:
        """Whether it is likely to be the same for such a step."""
        pairs = ((num_rows, self.num_rows), (tokens, self.tokens))
        return all(abs(new - old) * SIMILAR <= old for new, old in pairs)


class KeptChoice:
    """The last `Choice` of an engine's steps, for those after it; now and then it is made again."""

    def __init__(self) -> None:
        self._choice: Choice | None = None
        self._lists = 0  # since it was made

    def next(self) -> Choice | None:
        """What the next list is made with."""
        self._lists += 1
        return self._choice if self._lists <= KEPT_LISTS else None

    def keep(self, work: WorkList) -> None:
        """Take over the choice of that list, if it has made one."""
        if work.choice is not None:
            self._choice, self._lists = work.choice, 0


def make_work(
    plan: AttentionPlan,
    cost: CostModel,
    *,
    num_kv_heads: int,
    group: int,
    share: bool = True,
    num_rows: int | None = None,
    max_states: int | None = None,
    choice: Choice | None = None,
) -> WorkList:
    """The work list of a plan.

    Args:
        group: query heads per KV head.
        share: False: each atom reads a shared run by itself.
        num_rows: rows of the output, empty from the plan's on; default: the plan's.
        max_states: states that the workspace holds. To fit, groups that save least lose their
            items, then nothing is cut.
        choice: of an earlier step, to keep if this step is similar.

    Raises:
        ListTooLong: moved rows alone take more states.
    """
    if cost.tile_rows(group)[0] < 1:
        raise ConfigError(
            f"{group} query heads share a KV head, tiles hold {cost.tiles[0].block_m}: "
            "use another implementation"
        )
    drafts = _Drafts(plan, pairs_of(plan), cost, num_kv_heads, group, max_states)
    draft, made = drafts.best(choice) if share else (drafts.alone(), None)
    if max_states is not None and draft.num_states > max_states:
        raise ListTooLong(
            f"the plan's {len(plan.moved)} moved rows take {draft.num_states} states, the buffer "
            f"holds {max_states}: raise max_states"
        )
    return listed(plan, draft, plan.num_rows if num_rows is None else num_rows, made)


@dataclass(frozen=True, eq=False)
class _Drafts:
    """Drafts of a plan's list; see `make_work`."""

    plan: AttentionPlan
    pairs: Pairs
    cost: CostModel
    num_kv_heads: int
    group: int
    max_states: int | None

    def grouped(self, cost: CostModel, share: bool = True) -> Groups:
        """Groups that share by a cost model, in the room that their states have."""
        room = None if self.max_states is None else self.max_states - self.plan.num_queries
        rows = int(cost.tile_rows(self.group)[-1])
        return shared_groups(self.plan, self.pairs, cost, rows, room if share else -1)

    def alone(self, cached: float = 1.0) -> Draft:
        """The draft in which nothing is shared."""
        return self.drafted(self.grouped(self.cost, share=False), self.cost, cached)

    def drafted(self, groups: Groups, cost: CostModel, cached: float = 1.0) -> Draft:
        """The items of a list whose tokens take `cached` of the memory's time."""
        units = units_of(self.pairs, groups, self.plan.num_queries)
        blocks = blocks_of(self.plan, self.pairs, units, cost.tile_rows(self.group))
        if (blocks.kind[blocks.block] < len(cost.tiles) - 1).all():
            cost = cost.reading
        model = cost if cached == 1 else replace(cost, crowd=cached * cost.crowd)
        cuts, split = cuts_of(blocks, model, self.num_kv_heads, self.group, cached)
        crowded = cost.crowded(2 * split[1]) if cost.together else cost
        deal = Deal(split, self.num_kv_heads, crowded)
        draft = draft_of(self.plan, model, blocks, cuts, deal)
        if self.max_states is not None and draft.num_states > self.max_states:
            draft = draft_of(self.plan, model, blocks, cuts[:0], deal)
        return draft

    def best(self, choice: Choice | None) -> tuple[Draft, Choice | None]:
        """The draft that ends soonest, and the choice that was made for it."""
        cost, pairs, heads = self.cost, self.pairs, self.num_kv_heads
        seen = int((pairs.spans[4] - pairs.spans[3])[pairs.span].sum())
        step = self.plan.num_rows, _tokens_of_rows(pairs)
        kept = choice if choice is not None and choice.holds(*step) else None
        small = cost.reading
        model = cost if kept is None or kept.multiply else small
        groups = self.grouped(model)
        draft = self.drafted(groups, model)
        prompts = bool(pairs.spans[5].any())  # a step of 1
        pays = not len(self.plan.moved) or not (prompts or len(pairs.span) > MOST_COMPARED)
        if not cost.together or not pays or draft.num_states == 0 or seen == draft.walked:
            return draft, None
        different = _different_tokens(pairs)

        def read_ns(draft: Draft) -> float:
            share = cost.read_share(different / draft.walked)
            return share * draft.walked * heads * cost.memory_ns

        def end_ns(draft: Draft) -> float:
            num_states = draft.num_states * heads * self.group
            memory_ns = cost.beside_factor * read_ns(draft) if draft.num_wide else read_ns(draft)
            return cost.end_ns(draft.last_ns, memory_ns, num_states, draft.most_parts)

        if model is cost and read_ns(draft) >= draft.last_ns:
            # The memory is the limit: states take its time, and tokens that are in the cache do
            # not.
            fewer = self.grouped(replace(cost, merge_tokens=2 * cost.merge_tokens))
            if not np.array_equal(fewer.walker, groups.walker):
                draft = min(draft, self.drafted(fewer, cost), key=end_ns)
        made = None
        if draft.num_wide and len(cost.tiles) > 1 and kept is None:
            # Programs that multiply begin late, and one side may have to wait for the other.
            # Two halves of a program walk as much as it, where a tile's rows are half as many.
            token_ns = max(small.tiles[-2].token_ns, small.row_ns(2 * small.programs[1]))
            multiplied = draft.wide_tokens * heads * token_ns
            if multiplied < end_ns(draft) * small.programs[1]:
                draft = min(draft, self.drafted(self.grouped(small), small), key=end_ns)
            made = Choice(*step, draft.num_wide > 0)
        # In a small step, merging may take longer than sharing saves.
        if cost.cached_share * seen * heads * cost.memory_ns >= end_ns(draft):
            return draft, made
        return min(draft, self.alone(cost.read_share(different / seen)), key=end_ns), made


def _tokens_of_rows(pairs: Pairs) -> int:
    """Tokens that each row sees, for all rows together."""
    row, _, _, first, end, step = pairs.spans[:, pairs.span]
    begin = pairs.bounds[pairs.atom]
    count = pairs.bounds[pairs.atom + 1] - begin
    tokens = end + (begin - row) * step - first  # of an atom's first row
    return int((count * tokens + step * (count * (count - 1) // 2)).sum())


def _different_tokens(pairs: Pairs) -> int:
    """Tokens of all runs that some row sees."""
    _, _, run, first, end, _ = pairs.spans
    order = argsort(run)
    start = is_first(run[order]).nonzero()[0]
    first, end = np.minimum.reduceat(first[order], start), np.maximum.reduceat(end[order], start)
    return int((end - first).sum())


@dataclass(frozen=True, eq=False)
class Draft:
    """Items of a list, dealt out: what its end is estimated from, and `listed` makes arrays of.

    Attributes:
        kind, count: of each item, its tile and its number of rows.
        walks: the items' entries.
        order, queues: as `Deal.in_order` has them; `split` as in `WorkList`.
        rows: the queries of all items, as in `WorkList`; parts: `[num_rows]`, the items of each
            row; alone: `[num_rows]`, whether its only part is its result.
        walked: tokens that items walk.
        num_wide: as in `WorkList`; wide_tokens: tokens that those items walk.
        last_ns: end of the last program, by the cost model; 0 if nothing is dealt out.
        hands: of each item, whether it `LEAVES` or `GOES_ON`; None: no item does.
        leaving: how many halves of works leave states: warpgroups may walk one each.
    """

    kind: np.ndarray
    count: np.ndarray
    walks: Walks
    order: np.ndarray
    queues: np.ndarray
    split: tuple[int, int]
    rows: np.ndarray
    parts: np.ndarray
    alone: np.ndarray
    walked: int
    num_wide: int
    wide_tokens: int
    last_ns: float
    hands: np.ndarray | None = None
    leaving: int = 0

    @property
    def num_states(self) -> int:
        """Partial states: parts that are no row's result."""
        return int(self.parts[~self.alone].sum()) + int(np.count_nonzero(self.leaves))

    @property
    def leaves(self) -> np.ndarray:
        """bool: which of `rows` leave their state to another item."""
        if self.hands is None:
            return np.zeros(len(self.rows), bool)
        return np.repeat(self.hands == LEAVES, self.count)

    @property
    def most_parts(self) -> int:
        """States of the row that has the most."""
        return int(self.parts.max(initial=0))


def draft_of(
    plan: AttentionPlan, cost: CostModel, blocks: Blocks, cuts: np.ndarray, deal: Deal
) -> Draft:
    """Items of blocks cut at `cuts` (`cuts_of`), dealt out."""
    segments = segments_of(blocks, cuts)
    head = is_first(segments.item).nonzero()[0]  # the first segment of each item
    block = blocks.block[segments.entry[head]]
    kind, count, widest = blocks.kind[block], blocks.num_rows[block], len(cost.tiles) - 1
    length = blocks.hi - blocks.lo
    walks = _walks(plan, blocks, segments, tile_columns(cost, kind)[0])
    order, queues = deal.in_order(_item_ns(deal.cost, kind, walks), kind)
    rows = blocks.rows[ragged(blocks.row_start[block], count)]
    parts, alone = parts_of(plan, rows)
    return Draft(
        kind=kind,
        count=count,
        walks=walks,
        order=order,
        queues=queues,
        split=deal.split,
        rows=rows,
        parts=parts,
        alone=alone,
        walked=int(length.sum()),
        num_wide=int(np.count_nonzero(kind == widest)),
        wide_tokens=int(length[blocks.kind[blocks.block] == widest].sum()),
        last_ns=_last_ns(queues, order, kind, walks, cost),
    )


def parts_of(plan: AttentionPlan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Draft.parts` and `Draft.alone`."""
    into = plan.rows_of(rows)
    parts = np.bincount(into, minlength=plan.num_rows)
    alone = parts == 1
    alone[into[rows >= plan.num_rows]] = False
    return parts, alone


def listed(
    plan: AttentionPlan,
    draft: Draft,
    num_rows: int,
    choice: Choice | None,
    room: int | None = None,
) -> WorkList:
    """The arrays of a work list, its items in order; see its attributes."""
    walks, count, order = draft.walks, draft.count, draft.order
    is_head = is_first(walks.item)  # the first entry of each item
    head, more, entries = is_head.nonzero()[0], ~is_head, walks.words

    records = np.zeros((len(head), RECORD), np.int32)
    num_walk = np.diff(np.append(head, len(entries)))
    columns = (draft.kind, count, before(count), num_walk, before(num_walk - 1))
    for column, values in enumerate(columns):
        records[:, column] = values
    records[:, FIRST_ENTRY:] = entries[head]
    place_of_item = np.empty(len(head), np.int64)
    place_of_item[order] = np.arange(len(head))
    place = np.where(more, np.cumsum(more) - 1, place_of_item[walks.item])
    leaves = draft.leaves
    dest = np.full(len(leaves), -1, np.int32)
    dest[~leaves], merges = _merges(plan.rows_of(draft.rows[~leaves]), draft, num_rows)
    if draft.hands is not None:
        dest[leaves] = draft.num_states - np.arange(np.count_nonzero(leaves)) - 1
        handed = np.full(plan.num_rows, -1)
        handed[draft.rows[leaves]] = dest[leaves]
        first = handed[draft.rows[before(count)]] + 1
        hands = draft.hands[:, None] == [LEAVES, GOES_ON]
        records[:, HANDED] = np.select(list(hands.T), [-1, first])
        records[:, AWAITED] = draft.leaving
    if len(head):
        partial = np.add.reduceat(dest >= 0, before(count), dtype=np.int64)
        records[:, SHARED] = np.where(partial == count, 1, np.where(partial > 0, 2, 0))
    return WorkList(
        plan=plan,
        num_wide=draft.num_wide,
        split=draft.split,
        queues=_with_records(draft.queues, records[order]),
        records=records[order],
        walk=entries[more],
        pages=walks.pages,
        rows=draft.rows.astype(np.int32),
        dest=dest,
        merges=merges,
        num_states=draft.num_states,
        choice=choice,
        room=room,
        entries=Entries(walks.span, walks.last, more, place),
    )


@dataclass(frozen=True, eq=False)
class Walks:
    """Walk entries, item after item, `[num_entries]`: their words, item, span (the first, of an
    entry for several runs), and whether an entry is its span's last piece; and `WorkList.pages`."""

    words: np.ndarray
    item: np.ndarray
    span: np.ndarray
    last: np.ndarray
    pages: np.ndarray


def _walks(plan: AttentionPlan, blocks: Blocks, parts: Segments, block_n: np.ndarray) -> Walks:
    """The entries of segments. block_n: tokens of each item's tiles.

    Tiles are walked whole, so each entry costs at least one. Short runs that an item walks, and
    whose pages and positions follow each other without a gap, become one entry with a list of pages
    of its own. Such lists take no more words than the entries that they save. A run that one row
    sees may grow, and keeps its entry.
    """
    words, item = _entry_words(plan, blocks, parts), parts.item
    span, last = blocks.span[parts.entry], parts.hi == blocks.hi[parts.entry]
    alone = Walks(words, item, span, last, plan.run_pages)
    if len(block_n) == len(item):  # an entry each, as in most steps
        return alone
    fits = (words[:, HI] - words[:, LO] < block_n[item]) & (words[:, CLEAR_LO] <= words[:, LO])
    fits &= (words[:, CLEAR_HI] == words[:, HI]) & (plan.spans[span, plan_columns.ROWS] > 1)
    if np.bincount(item[fits], minlength=1).max() < 2:
        return alone
    # A plan's spans may come in any order.
    order = np.lexsort((words[:, LO] + words[:, POSITION], item))
    words, item, span, last, fits = (x[order] for x in (words, item, span, last, fits))
    size = plan.page_size
    lo, hi = words[:, LO].astype(np.int64), words[:, HI].astype(np.int64)
    i = np.flatnonzero(fits[1:] & fits[:-1] & (item[1:] == item[:-1])) + 1
    i = i[lo[i] + words[i, POSITION] == hi[i - 1] + words[i - 1, POSITION]]
    inside = lo[i] % size
    same_page = plan.run_pages[lo[i] // size] == plan.run_pages[(hi[i - 1] - 1) // size]
    i = i[(hi[i - 1] % size == inside) & ((inside == 0) | same_page)]
    joined = np.zeros(len(item), bool)
    joined[i] = True
    first, stop = lo // size + (joined & (lo % size > 0)), -(-hi // size)
    number = np.cumsum(~joined) - 1
    saved = np.bincount(number, joined) * ENTRY
    joined &= (np.bincount(number, stop - first) <= saved)[number]
    if not joined.any():
        return alone
    kept = ~joined
    listed = joined | np.append(joined[1:], False)  # pieces of entries for several runs
    heads = np.flatnonzero(listed & kept)
    num_pages = (stop - first) * listed
    more = plan.run_pages[ragged(first[listed], num_pages[listed])]
    at = (len(plan.run_pages) + before(num_pages)[heads]) * size + lo[heads] % size
    tokens = np.add.reduceat(hi - lo, np.flatnonzero(kept))[listed[kept]]
    words[heads, POSITION] = words[heads, POSITION] + lo[heads] - at
    words[heads, LO] = words[heads, CLEAR_LO] = at
    words[heads, CLEAR_HI] = words[heads, HI] = words[heads, END] = at + tokens
    words[heads, STEP] = 0
    pages = np.concatenate((plan.run_pages, more))
    return Walks(words[kept], item[kept], span[kept], last[kept], pages)


def _entry_words(plan: AttentionPlan, blocks: Blocks, parts: Segments) -> np.ndarray:
    """int32 `[num_entries, 8]`, as in `WorkList.walk`."""
    e = parts.entry
    span = plan.spans[blocks.span[e]].astype(np.int64)
    run = plan.runs[span[:, plan_columns.RUN]].astype(np.int64)
    base = run[:, RUN_PAGES] * plan.page_size + run[:, RUN_OFFSET]
    clear_lo = np.maximum(parts.lo, blocks.clear_lo[e])
    clear_hi = np.minimum(parts.hi, blocks.end[e])
    entries = np.zeros((len(e), ENTRY), np.int32)
    for column, values in enumerate((parts.lo, clear_lo, clear_hi, parts.hi, blocks.end[e])):
        entries[:, column] = base + values
    entries[:, STEP] = span[:, plan_columns.STEP]
    entries[:, POSITION] = run[:, RUN_POSITION] - base
    return entries


def _with_records(queues: np.ndarray, records: np.ndarray) -> np.ndarray:
    """`WorkList.queues`, from `Deal`'s."""
    words = np.zeros((len(queues), QUEUED), np.int32)
    used = queues[:, 0] < queues[:, 1]
    words[used] = records[queues[used, 0]]
    words[:, [QUEUE_START, QUEUE_STOP, QUEUE_HEAD, QUEUE_FEW]] = queues
    return words


def _item_ns(cost: CostModel, kind: np.ndarray, walks: Walks) -> np.ndarray:
    """float64 `[num_items]`: the time of each item, in ns."""
    block_n, item_ns, token_ns = tile_columns(cost, kind)
    tiles = -(-(walks.words[:, HI] - walks.words[:, LO]) // block_n[walks.item])
    walked = np.bincount(walks.item, tiles, len(kind)) * block_n * token_ns
    more = np.bincount(walks.item, minlength=len(kind)) - 1
    return item_ns + walked + more * cost.entry_ns


def _last_ns(
    queues: np.ndarray, order: np.ndarray, kind: np.ndarray, walks: Walks, cost: CostModel
) -> float:
    """Time at which the last program ends that has items of `queues` (`Deal.in_order`)."""
    start, stop, _, few = queues.T
    used = start < stop
    readers, in_rows = (int(np.count_nonzero(used & side)) for side in (few >= 0, few > start))
    crowded = cost.crowded(readers, cost.crowd, in_rows)
    ends = np.append(0.0, np.cumsum(_item_ns(crowded, kind, walks)[order]))
    first = np.arange(len(queues)) % 2 == 0
    late = np.where(few < 0, cost.late_ns[1], cost.late_ns[0] * first) * used
    return float((ends[stop] - ends[start] + late).max(initial=0.0))


def _merges(rows: np.ndarray, draft: Draft, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`dest` and `merges`; a row's states are adjacent. rows: of each part."""
    spare = max(0, num_rows - len(draft.parts))
    parts = np.append(draft.parts, np.zeros(spare, np.int64))
    alone = np.append(draft.alone, np.zeros(spare, bool))
    start = before(np.where(alone, 0, parts))
    order = argsort(rows)
    nth = np.empty(len(rows), np.int64)
    nth[order] = np.arange(len(rows)) - np.repeat(before(parts), parts)
    dest = np.where(alone[rows], -1, start[rows] + nth)
    merged = np.flatnonzero(~alone)
    merges = np.zeros((len(merged), 4), np.int32)
    merges[:, MERGED_ROW], merges[:, FIRST_STATE] = merged, start[merged]
    merges[:, NUM_PARTS] = parts[merged]
    return dest.astype(np.int32), merges
