"""Runs below KV memory: copied out when they are evicted, copied back instead of computed.

A request whose prompt goes on in files waits, and others pass it, until these are read. Where it is
admitted, what is in host memory is copied to its pages while steps go on; it has no rows meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor

from onestem.cache import PrefixCache, Run
from onestem.cache.pieces import (
    NO_TOKENS,
    PIECE_TOKENS,
    Chain,
    Found,
    Piece,
    PieceIndex,
    piece_ends,
    piece_start,
    storable,
)
from onestem.engine.sequence import Sequence, stretches_of
from onestem.engine.tiers.copies import Copied, Part, at_state, num_bytes
from onestem.engine.tiers.stores import MOST_READ_AHEAD, MOST_UNWRITTEN, TierStores
from onestem.request import Request
from onestem.tree import Stretch

log = logging.getLogger(__name__)

LEAST_TOKENS = 64  # fewer are computed about as fast
READ_SHARE = 2  # of host memory, for what is read for one request
MOST_LOOKED_AT = 128  # requests whose files are read before their turn
MANY_PIECES = 1 << 13  # of which the index forgets those that no tier has any more
MOST_CHAINS = 64  # whose digests are kept: a run is looked up, and leaves in several evictions


class _Save(NamedTuple):
    piece: Piece
    tokens: np.ndarray
    slots: np.ndarray
    kind: int


class Recall(NamedTuple):
    """What a sequence need not compute.

    Attributes:
        at: the first token whose keys and values it lacks.
        end: after the last that it need not compute.
        found: pieces in host memory that hold tokens at..end-1.
        state: the recurrent state after `end` tokens, where layers keep one.
    """

    at: int
    end: int
    found: list[Found]
    state: Piece | None = None


class _Load(NamedTuple):
    """Tokens first..end-1 that are copied to a sequence's pages; maybe a state too. `note` is
    called at the end: whether all is there."""

    first: int
    end: int
    copied: Copied
    note: Callable[[bool], object]


class PrefixTiers:
    """What host memory and disk hold of the runs of one engine.

    Args:
        root: what keys and values depend on besides the tokens before them.
    """

    def __init__(self, stores: TierStores, cache: PrefixCache, root: str) -> None:
        self._stores = stores
        self._cache = cache
        self._root = root
        self._index = PieceIndex(self._tokens_of)
        self._chains: dict[int, Chain] = {}  # by the `uid` of the run that they were made for
        self._evicted: list[_Save] = []
        self._loading: dict[Sequence, _Load] = {}
        self._asked: set[Sequence] = set()  # nothing more is there for these
        self._saved_at = -1  # the cache's clock
        self._given: set[str] = set()  # to be written since then
        self._most_pieces: float = MANY_PIECES
        cache.on_evict = self._note_evicted
        if cache.states is not None:
            cache.states.on_evict = lambda run: self._note_evicted(run, run.computed)
        stores.on_files = self._note_files
        listed = stores.list_files()
        if listed is not None:
            listed.result()

    @property
    def num_pieces(self) -> int:
        """Pieces that it knows of."""
        return len(self._index)

    def _note_files(self, names: list[str]) -> None:
        pieces = [piece for piece in map(Piece.from_name, names) if piece is not None]
        # First, so that the rate is known to whom finds one; those of late are wanted soonest.
        self._stores.measure((piece.name, piece.num_stored) for piece in reversed(pieces))
        for piece in pieces:
            self._index.add(piece)

    def _tokens_of(self, piece: Piece) -> np.ndarray | None:
        disk = self._stores.disk
        tokens = None if disk is None else disk.tokens(piece.name, piece.num_tokens)
        return None if tokens is None else tokens.numpy()

    def _chain(self, tokens: np.ndarray, stretches: tuple[Stretch, ...], path: Seq[Run]) -> Chain:
        """The chain of tokens (int32 `[n]`, kept) that go down a path."""
        chains, uids = self._chains, [run.uid for run in path]
        like = next((chains[uid] for uid in reversed(uids) if uid in chains), None)
        chain = chains[uids[-1]] = Chain(self._root, tokens, stretches, like)
        if len(chains) > MOST_CHAINS:
            del chains[next(iter(chains))]
        return chain

    # What is saved.

    def _note_evicted(self, run: Run, first: int) -> None:
        """Save a run's tokens from an index on, and its snapshot, if a request may want them,
        before the next step writes to their pages."""
        if not run.is_wanted and not run.is_shared:
            return
        stores, kept = self._stores, list[str]()

        def keeps(name: str) -> bool:
            is_kept = stores.keeps(name)
            kept.extend([name] * is_kept)
            return is_kept

        # Of what leaves together, the last goes first: it is of no use without what is before it.
        self._evicted += reversed(self._unsaved(run, keeps, first))
        for name in reversed(kept):
            if stores.host is not None:
                stores.host.touch(name, run.kind)

    def _unsaved(self, run: Run, keeps: Callable[[str], bool], first: int = 0) -> list[_Save]:
        """Pieces of a run, from an index of its tokens on, and its snapshot, that are not kept.
        They begin where others of the same tokens would."""
        path = run.path()
        labelled = groupby(path, key=lambda node: node.label)
        stretches = tuple(Stretch(next(nodes).start, label) for label, nodes in labelled)
        start, end = run.start + first, run.start + run.computed
        if storable(stretches, end) < end:
            return []
        tokens = np.concatenate([np.frombuffer(node.tokens, np.int32) for node in path])[:end]
        chain = self._chain(tokens, stretches, path)
        start = max(run.start, piece_start(start)) if start < end else end
        saved = self._kept(keeps, chain, [0, *(node.start for node in path), start], start, end)
        saves = [
            _Save(
                chain.piece(a, b),
                tokens[a:b].copy(),
                run.slots(a - run.start, b - run.start),
                run.kind,
            )
            for a, b in piece_ends(start, end)
            if b > saved and self._kept(keeps, chain, [a], a, b) < b
        ]
        if run.snapshot >= 0 and not keeps((state := chain.state(end)).name):
            saves.append(_Save(state, NO_TOKENS, at_state(run.snapshot), run.kind))
        return saves

    def _kept(
        self, keeps: Callable[[str], bool], chain: Chain, starts: Seq[int], first: int, end: int
    ) -> int:
        """Up to which token, from the first on, all is kept."""
        for one in self._index.find(chain, starts, end):
            if one.end > first:
                if not keeps(one.piece.name):
                    break
                first = one.end
        return first

    def save_evicted(self) -> None:
        """Copy out what was evicted. Call it before anything is written to KV memory."""
        saves, self._evicted = self._evicted, []
        self._stores.save((save.piece.name, *save[1:]) for save in saves)
        for piece, tokens, _, _ in saves:
            for shorter in self._index.beginnings(piece, tokens):
                self._index.discard(shorter)
                self._stores.discard(shorter.name)
            self._index.add(piece, tokens)
        if self.num_pieces > self._most_pieces:
            self._most_pieces = float("inf")  # until that is done
            self._stores.aside(self._prune)

    def _prune(self) -> None:
        stores = self._stores
        self._index.prune(lambda name: stores.on_host(name) or stores.is_written(name))
        self._most_pieces = max(MANY_PIECES, 2 * self.num_pieces)

    def save_idle(self) -> bool:
        """Begin to write what a restart would lose: the last first, as much as the disk has room
        for, and at a time as much as may wait to be written. False: there is no more."""
        stores = self._stores
        if stores.disk is None or self._saved_at == self._cache.idle.clock:
            return False
        if stores.is_writing:
            return True
        most = MOST_UNWRITTEN // stores.bytes_per_token
        room = stores.disk.share // stores.bytes_per_token
        state = num_bytes(stores.copies, 0) // stores.bytes_per_token  # what it takes, in tokens
        # What was released before the last whole pass was looked at then; what is pinned never is.
        new = (run for run in self._cache.tree if run.pins or run.last_used > self._saved_at)
        runs = [run for run in new if run.is_wanted or run.is_shared]
        for run in sorted(runs, key=lambda run: run.last_used, reverse=True):
            room -= run.computed + (run.snapshot >= 0) * state
            if most < 0 or room < 0:
                break
            for save in self._unsaved(run, self._was_given) if run.computed else ():
                most -= len(save.tokens) or state
                if most >= 0 or not self._evicted:
                    self._evicted.append(save)
        self._given.update(save.piece.name for save in self._evicted)
        if most >= 0:
            self._saved_at = self._cache.idle.clock
            self._given.clear()
        self.save_evicted()
        return True

    def _was_given(self, name: str) -> bool:
        """Whether it is written, or this pass has tried to."""
        return name in self._given or self._stores.is_written(name)

    # What is read.

    def read(self, request: Request) -> list[Future[Tensor | None]]:
        """Begin to read what a request's prompt finds on the disk alone."""
        stores = self._stores
        if stores.disk is None or request.pml is not None:
            return []
        stores.list_files()
        known = request.prompt_array
        ids = request.prompt_token_ids if known is None else known
        tokens, stretches = np.asarray(ids, np.int32), stretches_of(request)
        node, at = self._cache.tree.find(tokens, stretches)
        starts = [0, *(run.start for run in node.path()), at]
        end = storable(stretches, len(tokens) - 1)
        room = 2**62 if stores.host is None else stores.host.budget // READ_SHARE
        room -= num_bytes(stores.copies, 0)
        chain, wanted, reach, spared = Chain(self._root, tokens, stretches), list[Found](), at, 0
        state: Piece | None = None
        for one in self._index.find(chain, starts, end):
            size = one.piece.num_tokens
            room -= size * stores.bytes_per_token
            if one.end > at and room >= 0:
                wanted.append(one)
                spared, reach = spared + size, one.end
        if self._cache.states is not None:
            snapshots = (run.end for run in node.path() if run.snapshot >= 0)
            begins = max((one for one in snapshots if one <= min(at, end)), default=0)
            state, reach = next(self._index.states(chain, begins, min(reach, end)), (None, begins))
            spared = reach - begins
        if spared < LEAST_TOKENS:
            return []
        parts = [(one.piece.name, one.piece.num_tokens) for one in wanted if at < reach > one.start]
        parts += [] if state is None else [(state.name, 0)]
        # What the other groups of a job go on in is read beside.
        return stores.read(
            parts,
            least=1 if request.group is None else stores.rates.num_readers,
            token_bytes=sum(num_bytes(stores.copies, size) for _, size in parts) / spared,
        )

    def read_ahead(
        self, requests: Iterable[Request], read: Callable[[Request], list[Future[Tensor | None]]]
    ) -> Iterator[Request]:
        """Requests in their order, each after `read` was called for those that come after it. It
        looks on as long as they or their group have files that fit in a share of host memory."""
        host, copies = self._stores.host, self._stores.copies
        size = max(num_bytes(copies, PIECE_TOKENS), num_bytes(copies, 0))
        most = MOST_READ_AHEAD if host is None else host.budget // READ_SHARE // size
        ahead: deque[tuple[Request, list[Future[Tensor | None]]]] = deque()
        group = None  # the last that has files
        for request in requests:
            files = read(request)
            ahead.append((request, files))
            group = request.group if files else group
            goes_on = bool(files) or (request.group is not None and request.group == group)
            while ahead and not (
                goes_on and len(set().union(*(each for _, each in ahead))) < most
                and len(ahead) < MOST_LOOKED_AT
            ):  # fmt: skip
                yield ahead.popleft()[0]
        while ahead:
            yield ahead.popleft()[0]

    # What is copied back.

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a copy."""
        load = self._loading.get(sequence)
        if load is not None and load.copied.done():
            self._end(sequence)
        return sequence in self._loading

    def ready(self, sequence: Sequence, at: int) -> Recall | None:
        """What host memory has of what a sequence would compute from its token `at` on. Where that
        is too little it is not asked again before it is admitted again."""
        if sequence in self._asked or sequence.state.pml is not None:
            return None
        end = storable(sequence.stretches, sequence.match_limit)
        if end - at < LEAST_TOKENS:
            return None
        self.save_evicted()
        first, states = at, self._cache.states
        path = sequence.path(self._cache.tree.num_splits)
        if states is not None:  # it may lack its state alone
            lacking = (run.start + run.computed for run in path if not run.is_whole)
            first = next(lacking, path[-1].end)
        starts = [0, *(run.start for run in path if run.start <= first), first]
        chain = self._chain(sequence.ids().copy(), sequence.stretches, path)
        ready, reach = list[Found](), first
        for one in self._index.find(chain, starts, end):
            if one.end > first:
                if not self._stores.is_ready(one.piece.name):
                    break
                ready.append(one)
                reach = one.end
        state: Piece | None = None
        if states is not None:
            there = self._index.states(chain, at, min(reach, end))
            kept = (one for one in there if self._stores.is_ready(one[0].name))
            state, reach = next(kept, (None, at))
        if reach - at < LEAST_TOKENS:
            self._asked.add(sequence)
            return None
        found = [one for one in ready if first < reach > one.start]
        return Recall(first, reach, found, state)

    def load(
        self,
        sequence: Sequence,
        runs: Seq[Run],
        recall: Recall,
        end: int,
        note: Callable[[bool], object],
    ) -> bool:
        """Begin to copy what there is of the tokens of runs before `end` to their pages, which are
        reserved, and a state to the sequence's slot; for `note` see `_Load`. False: it is not in
        host memory any more."""
        parts, used, at = list[Part](), list[tuple[str, int]](), recall.at
        if recall.state is not None:
            row, slot = self._stores.take(recall.state.name, 0), sequence.state_slot
            if row is None or slot is None:
                self._index.discard(recall.state)
                return False
            parts.append(Part(row, 0, at_state(slot.slot)))
        for one in reversed([one for one in recall.found if one.start < end]):  # the last first
            kv = self._stores.take(one.piece.name, one.piece.num_tokens)
            if kv is None:
                self._index.discard(one.piece)
                return False
            a, b = max(at, one.start), min(end, one.end)
            used.append((one.piece.name, b - a))
            for run in runs:
                first, stop = max(a, run.start), min(b, run.end)
                if first < stop:
                    slots = run.slots(first - run.start, stop - run.start)
                    parts.append(Part(kv, first - one.start, slots))
        for name, count in used:
            self._stores.note_use(name, count, sequence.state.metrics)
        self.save_evicted()
        self._loading[sequence] = _Load(at, end, self._stores.copies.into(parts), note)
        return True

    def go_on(self) -> None:
        """Let copies go on, whether their sequences are looked at in a step or not."""
        for load in self._loading.values():
            load.copied.go_on()

    def wait(self) -> bool:
        """Wait for the oldest copy; False: there is none."""
        sequence = next(iter(self._loading), None)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def _end(self, sequence: Sequence) -> None:
        """Note that what was copied is there."""
        load = self._loading.pop(sequence)
        try:
            load.copied.wait()
        except Exception:
            log.exception("keys and values could not be copied: they are computed")
            self._asked.add(sequence)
            load.note(False)
            return
        for run in sequence.path(self._cache.tree.num_splits):
            if run.start < load.end and run.end > load.first:
                run.computed = max(run.computed, min(load.end, run.end) - run.start)
        load.note(True)

    def leave(self, sequence: Sequence) -> None:
        """Wait for a sequence's copy before it gives up its pages."""
        if sequence in self._loading:
            self._end(sequence)
        self._asked.discard(sequence)

    def forget(self) -> None:
        """The model has other weights."""
        self._evicted.clear()
        self._index = PieceIndex(self._tokens_of)
