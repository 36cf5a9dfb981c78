"""Recurrent states of sequences: where each begins, and where snapshots are taken.

A prompt begins at the deepest snapshot on its path. Rows below it whose keys and values are there
are computed again for the state alone. Snapshots of planned requests are taken where these part;
after the last of them they are kept as others are. These are taken at the end of what a template
writes for system and tools, where a second prompt leaves what it shares, and at the ends of prompt
and answer. One sequence takes a snapshot (`Run.maker`): its chunk ends there, and others of that
path wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from onestem.cache import PrefixCache, Run, StatePool, StateSlot
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.sequence import Chunk, Sequence, StateRun
from onestem.request import Request
from onestem.tree import num_common

LEAST_TOKENS = 16  # from one snapshot to the next: fewer are computed again
FAR_TOKENS = 1024  # from one to the next, at most, where chunks of a prompt end


@dataclass(eq=False, repr=False)
class States:
    """Gives sequences their slots, and decides where snapshots are taken.

    Attributes:
        runs_ahead: a step may be launched before the tokens of the one before are known: a sequence
            that a token ends has one row too many in its state.
        upcoming: the interactive request that comes next, or None.
        promised: sequences that will fork from running prompts, a slot each.
    """

    _cache: PrefixCache
    pool: StatePool
    runs_ahead: bool = False
    upcoming: Callable[[], Request | None] = lambda: None
    promised: int = 0

    def admit(self, sequence: Sequence, *, alone: bool, whole: bool) -> bool:
        """Give a sequence a slot; False: too few are left beside snapshots that planned requests
        wait for. `alone`: nothing runs, and it takes even these; `whole`: see `StateSlot`."""
        left = self.pool.num_available if alone else self.pool.num_idle
        if left <= self.promised + sequence.num_forks:
            return False
        slot = self.pool.take()
        if slot is None:
            return False
        sequence.state_slot = StateSlot(slot, promised=sequence.num_forks, whole=whole)
        self.promised += sequence.num_forks
        return True

    def fork(self, parent: Sequence, child: Sequence, chunk: Chunk) -> None:
        """Give a sequence that goes on beside its parent a copy of the state after a chunk."""
        mine, slot = parent.state_slot, self.pool.take(after_rows=True)
        assert mine is not None
        assert slot is not None  # it was promised
        assert chunk.state is not None
        self.promised -= 1
        mine.promised -= 1
        child.state_slot = StateSlot(slot, slot, mine.at, is_begun=True)
        chunk.state.copies.append(slot)

    def leave(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that gives up its pages. It becomes a snapshot where others
        may go on from the last token that is in it."""
        mine, sequence.state_slot = sequence.state_slot, None
        if mine is None:
            return
        self.promised -= mine.promised
        run = self._last(sequence, mine)
        if run is None:
            self.pool.give(mine.slot)
        else:
            self.pool.keep(run, mine.slot, _above(run))

    def _last(self, sequence: Sequence, mine: StateSlot) -> Run | None:
        """The run whose last token is the last one in a state; None: nobody may go on from it. (The
        rest of the run is cut off when its last holder leaves.)"""
        reason, run = sequence.finish_reason, sequence.run
        is_known = reason == "length" or (reason == "stop" and not self.runs_ahead)
        is_done = is_known and not _is_planned(sequence)
        if not (self._cache.enabled and mine.is_begun and (is_done or reason is None)):
            return None
        at = len(sequence.tokens) - 1 if mine.decodes else mine.at
        while run is not None and run.parent is not None and run.start >= at:
            run = run.parent
        if at <= 0 or run is None or run.snapshot >= 0 or run.start + run.computed != at:
            return None
        return run if run.end == at or self._cache.may_grow(run) else None

    def end_plans(self) -> None:
        """Note that planned requests will not come which would have continued snapshots."""
        for run in list(self.pool.runs):
            run.is_awaited = False
            run.is_branch &= run.is_held

    def distrust(self, sequence: Sequence) -> None:
        """Note that a step failed, which may have changed a sequence's state."""
        if sequence.state_slot is not None:
            sequence.state_slot.at, sequence.state_slot.decodes = -1, False

    def begin(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Choose where a sequence's state begins, before its first rows. False: it waits for a
        snapshot that another sequence will take."""
        mine, limit = sequence.state_slot, sequence.match_limit
        assert mine is not None
        begin = self._deepest(sequence)
        if self._cache.enabled and not mine.whole:
            self._mark(draft, sequence, begin)
        found: Run | None = None
        path = sequence.path(self._cache.tree.num_splits)
        for run in path:
            if run.maker is sequence and run.end < begin:  # asked of it while that was copied
                run.maker = None
            if run.end > limit or run.maker is sequence:
                break
            if run.snapshot >= 0 and self.pool.is_there(run):
                found = run
            elif run.snapshot >= 0 or run.maker is not None:
                return False
        mine.source, mine.at = -1, 0
        if found is not None:
            mine.source, mine.at = self.pool.read(found, _above(found)), found.end
        return True

    def _deepest(self, sequence: Sequence) -> int:
        """Where the deepest snapshot is that a sequence may go on from; 0: nowhere."""
        path, limit = sequence.path(self._cache.tree.num_splits), sequence.match_limit
        there = (run.end for run in path if run.snapshot >= 0 and self.pool.is_there(run))
        return max((end for end in there if end <= limit), default=0)

    def advance(self, sequence: Sequence, chunk: Chunk, again: int) -> None:
        """Note that a chunk's rows, of which the first are computed `again`, are in a sequence's
        state, and take the snapshot at its end."""
        mine = sequence.state_slot
        assert mine is not None
        if sequence.state.reuse is not None and not mine.is_begun:
            sequence.state.reuse = replace(sequence.state.reuse, state_at=mine.at)
        chunk.state = StateRun(mine.source, mine.slot, again)
        mine.source, mine.at, mine.is_begun = mine.slot, chunk.end, True
        path = sequence.path(self._cache.tree.num_splits)
        run = next(run for run in path if run.end >= chunk.end)
        if run.end > chunk.end and not mine.whole and self._is_far(sequence, run, chunk.end):
            run = self._cache.split(run, chunk.end - run.start)
            run.maker = sequence
        if run.end > chunk.end or run.maker is not sequence:
            return
        run.maker = None
        if run.snapshot >= 0:  # of a sequence that left meanwhile
            return
        slot = self.pool.snapshot(run, _above(run), promised=self.promised)
        if slot is not None:
            chunk.state.copies.append(slot)
            chunk.state.runs.append(run)

    def _is_far(self, sequence: Sequence, run: Run, at: int) -> bool:
        """Whether a prompt that nobody has planned has gone so far into a run, up to token `at`,
        that a snapshot is taken where its chunk ends anyway, while slots are free."""
        if not self._cache.enabled or _is_planned(sequence) or sequence.score_only:
            return False
        return at - _above(run) >= FAR_TOKENS and self.pool.num_free > self.promised

    def take_back(self, chunk: Chunk) -> None:
        """Undo `advance` for a chunk that was not launched."""
        mine, state = chunk.sequence.state_slot, chunk.state
        assert state is not None
        for run in state.runs:
            self.pool.drop(run)
            run.maker = chunk.sequence
        if mine is not None:
            mine.source, mine.at = state.source, chunk.start
            mine.is_begun = state.source == mine.slot

    def _mark(self, draft: StepDraft, sequence: Sequence, begin: int) -> None:
        """Say who takes the snapshots that are wanted on a sequence's path after token `begin`,
        from which it goes on."""
        last, above, state = 0, 0, sequence.state
        planned = state.request.branches is not None and not state.metrics.num_preempted
        for end, is_awaited in sorted(self._wanted(sequence).items()):
            if planned and not is_awaited:  # those before it may have taken it earlier
                for run in sequence.path(self._cache.tree.num_splits):
                    if above < run.end < end:
                        run.is_awaited = False
            above = end
            if end - last < LEAST_TOKENS:
                continue
            run, last = self.ending(sequence, end), end
            if planned:
                run.is_branch, run.is_awaited = True, is_awaited
            if run.snapshot < 0 and run.maker is None and end > begin:
                maker = self._maker(draft, run, sequence)
                run.maker = None if run.snapshot >= 0 else maker

    def _wanted(self, sequence: Sequence) -> dict[int, bool]:
        """Tokens after which snapshots are wanted, and whether planned requests are to come."""
        state, limit = sequence.state, sequence.match_limit
        request, wanted = state.request, dict[int, bool]()
        if len(state.sequences) > 1 and not state.forked:  # its sequences part there
            wanted[limit] = False
        elif request.branches is None:
            path = sequence.path(self._cache.tree.num_splits)
            shared = [run for run in path if run.owner is not sequence or run.computed > 0]
            wanted |= {run.end: False for run in shared[-1:]}
            wanted[min(self._common(sequence), limit)] = False
            wanted[min(request.system_tokens, limit)] = False
            prompt = sequence.num_prompt - request.prefilled_tokens
            if not sequence.score_only and not sequence.num_output:
                wanted[min(prompt, limit)] = False  # an equal prompt computes its last token
        for place, end in enumerate(request.branches or ()):
            wanted[min(end, limit)] = place < request.awaited_branches
        return wanted

    def _common(self, sequence: Sequence) -> int:
        """First tokens that a sequence has in common with the next request: it would pass the end
        of these before that comes."""
        mine = sequence.state_slot
        assert mine is not None
        if mine.common is None:
            coming, mine.common = self.upcoming(), 0
            if coming is not None and coming.cache_salt == sequence.state.request.cache_salt:
                mine.common = num_common(np.asarray(coming.prompt_token_ids), sequence.ids())
        return mine.common

    def recalled(self, sequence: Sequence, run: Run, is_there: bool) -> None:
        """Note that a run's snapshot was copied to a sequence's slot, and the keys and values up to
        it are there; or not."""
        mine, reuse, above = sequence.state_slot, sequence.state.reuse, _above(run)
        assert mine is not None
        for one in run.path() if is_there else [run]:  # it does not come to these
            one.maker = None if one.maker is sequence else one.maker
        if not is_there or run.snapshot >= 0:
            return
        slot = self.pool.snapshot(run, above, promised=self.promised, filled=mine.slot)
        if slot is not None:
            mine.slot = slot
            return
        mine.source, mine.at, mine.is_begun = mine.slot, run.end, True
        if reuse is not None:
            sequence.state.reuse = replace(reuse, state_at=run.end)

    def ending(self, sequence: Sequence, end: int) -> Run:
        """The run of a sequence's path that ends before token `end`, split there if need be."""
        path = sequence.path(self._cache.tree.num_splits)
        run = next(run for run in path if run.end >= end)
        return run if run.end == end else self._cache.split(run, end - run.start)

    def _maker(self, draft: StepDraft, run: Run, sequence: Sequence) -> Sequence:
        """The sequence that takes a snapshot: the run's owner, unless it has passed its end. If it
        passes it in this step alone, its chunk is cut there."""
        owner = run.owner
        theirs = owner.state_slot if isinstance(owner, Sequence) else None
        if theirs is None or theirs.decodes or not isinstance(owner, Sequence):
            return sequence
        if theirs.at <= run.end:
            return owner if theirs.at < run.end else sequence
        chunk = draft.chunk_over(owner, run.end)
        if chunk is None or not self._cut(draft, chunk, run):
            return sequence
        return owner

    def _cut(self, draft: StepDraft, chunk: Chunk, run: Run) -> bool:
        """End a chunk of this step where a run ends, with its snapshot. False: others may read what
        it computes after that."""
        owner, state, at = chunk.sequence, chunk.state, run.end
        assert state is not None
        path = owner.path(self._cache.tree.num_splits)
        below = [one for one in path if one.end > at]
        if any(one.pins > 1 or one.owner is not owner for one in below):
            return False
        self.take_back(chunk)
        for one in below:
            one.computed = min(one.computed, max(0, at - one.start))
        chunk.end, run.maker = at, owner
        self.advance(owner, chunk, min(state.again, at - chunk.start))
        return True


def _above(run: Run) -> int:
    """Tokens up to the snapshot above a run."""
    above = run.parent
    while above is not None and above.snapshot < 0:
        above = above.parent
    return 0 if above is None else above.end


def _is_planned(sequence: Sequence) -> bool:
    """Whether its prompt is one of a plan, which says where prompts part."""
    return sequence.is_job or sequence.state.request.branches is not None


def most_sequences(asked: int | None, pool: StatePool | None) -> int | None:
    """Maximum sequences that are admitted: each has a state. `asked`: by the options."""
    if pool is None:
        return asked
    return pool.most_sequences if asked is None else min(asked, pool.most_sequences)
