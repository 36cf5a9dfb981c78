"""What a prompt computes next, and in which order: modules, then its own tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from onestem.cache import ModuleRun, PrefixCache, Run
from onestem.engine.schedule.draft import StepDraft
from onestem.engine.schedule.room import Room
from onestem.engine.sequence import Chunk, Sequence

if TYPE_CHECKING:
    from onestem.engine.schedule.states import States
    from onestem.engine.tiers.prefixes import PrefixTiers, Recall
    from onestem.engine.tiers.tiers import KvTiers


@dataclass(eq=False, repr=False)
class PromptChunks:
    """Puts chunks of prompts into a step.

    Attributes:
        tiers: where keys and values may be kept as well.
    """

    _cache: PrefixCache
    _room: Room
    _states: States | None
    tiers: KvTiers | None = None

    def extend(self, draft: StepDraft, sequence: Sequence) -> None:
        """Schedule a sequence's next tokens, as many as the step has rows left. If it is
        interactive, first the jobs that compute what it waits for, as far as it does."""
        draft.handling = sequence
        if not sequence.is_job:
            for owner, tokens in self._awaited(sequence).items():
                draft.left -= self._extend(draft, owner, min(draft.left, tokens))
        if draft.takes_rows and not draft.has_chunk(sequence):
            draft.left -= self._extend(draft, sequence, draft.left)
        draft.handling = None

    def _awaited(self, sequence: Sequence) -> dict[Sequence, int]:
        """Jobs that compute what a sequence reads, and how many tokens each is away from it."""
        found: dict[Sequence, int] = {}
        for run in sequence.path(self._cache.tree.num_splits):
            if (owner := _job_of(run)) is not None:
                ahead = min(run.end, len(sequence.tokens)) - owner.frontier
                modules = sum(len(one.run.tokens) - one.run.computed for one in owner.imports)
                found[owner] = max(found.get(owner, 0), ahead + modules)
        modules_of: Counter[Sequence] = Counter()
        for run in (one.run for one in sequence.imports):
            if (owner := _job_of(run)) is not None:
                modules_of[owner] += len(run.tokens) - run.computed
        for owner, tokens in modules_of.items():
            found[owner] = max(found.get(owner, 0), tokens)
        return found

    def _extend(self, draft: StepDraft, sequence: Sequence, most: int) -> int:
        """Schedule a sequence's next tokens, and before them the modules that it imports and that
        are not computed. Returns their number, at most `most`."""
        if draft.waits:
            return 0
        used = self._extend_modules(draft, sequence, most)
        if sequence.modules is not None and not sequence.modules.complete:
            return used
        return used + self._extend_path(draft, sequence, most - used)

    def _extend_modules(self, draft: StepDraft, sequence: Sequence, most: int) -> int:
        modules, used = sequence.modules, 0
        if modules is None or modules.complete:
            return 0
        for index, run in modules.missing(lambda run: self._load(draft, sequence, run)):
            attends = modules.attended(index)
            theirs = run.owner is not None and run.owner is not sequence
            if theirs or not all(other.complete for other, _ in attends):
                continue
            start, take = run.computed, min(most - used, len(run.tokens) - run.computed)
            if take <= 0 or not self._room.reserve(draft, sequence, run, start + take):
                break
            draft.add_chunk(Chunk(sequence, start, start + take, run, attends))
            run.owner = sequence
            run.computed += take
            used += take
        return used

    def _load(self, draft: StepDraft, sequence: Sequence, run: ModuleRun) -> bool:
        """Copy a module's keys and values from another tier, if one has them."""
        if draft.waits or self.tiers is None or not self.tiers.modules.has(run):
            return False
        if run.owner is not None and run.owner is not sequence:
            return False
        if not self._room.reserve(draft, sequence, run, len(run.tokens)):
            return False
        self.tiers.prefixes.save_evicted()  # from the pages that are copied to
        if not self.tiers.modules.load(run, sequence.state.metrics):
            return False
        run.computed = len(run.tokens)
        return True

    def _extend_path(self, draft: StepDraft, sequence: Sequence, most: int) -> int:
        """Schedule its own tokens, up to a run that another computes. Returns their number."""
        tiers = None if self.tiers is None else self.tiers.prefixes
        if tiers is not None and tiers.is_loading(sequence):
            return 0
        state = sequence.state_slot
        if self._states is not None and state is not None:
            if draft.has_chunk(sequence):  # a state goes through a step once
                return 0
            if not state.is_begun and not self._states.begin(draft, sequence):
                return 0
        is_begun = state is not None and (state.is_begun or state.whole)
        if tiers is not None and not is_begun and self._recall(draft, sequence, tiers):
            return 0
        start = at = fresh = sequence.frontier
        chunk: Chunk | None = None
        wanted = not sequence.is_job and sequence.state.request.group is None
        for run in sequence.path(self._cache.tree.num_splits):
            if run.end <= at:
                continue
            if run.start > at:
                break
            if state is not None and run.start + run.computed > at:  # again, for the state alone
                at = fresh = min(run.start + run.computed, start + max(0, most))
            if at < run.end:
                if run.owner is not None and run.owner is not sequence:
                    break
                take = min(most - (at - start), run.end - at, len(sequence.tokens) - at)
                if take <= 0 or not self._room.reserve(draft, sequence, run, run.computed + take):
                    break
                at += take
                chunk = chunk or draft.add_chunk(Chunk(sequence, start, at))
                chunk.end = at
                run.owner = sequence
                run.is_wanted |= wanted
                run.computed += take
            if run.maker is sequence:
                break
        if self._states is not None and at > start:
            chunk = chunk or draft.add_chunk(Chunk(sequence, start, at))
            self._states.advance(sequence, chunk, fresh - start)
        return at - start

    def _recall(self, draft: StepDraft, sequence: Sequence, tiers: PrefixTiers) -> bool:
        """Whether keys and values are copied to its pages instead of being computed: it has no rows
        until that is done. Where it has a state, one is copied too, which becomes a snapshot."""
        at, states = sequence.frontier, self._states
        path = sequence.path(self._cache.tree.num_splits)
        if states is None:
            run = next((run for run in path if run.end > at), None)
        else:
            run = next((run for run in path if not run.is_whole), path[-1])
        if run is None or (run.owner is not None and run.owner is not sequence):
            return False
        found = tiers.ready(sequence, at)
        if found is None:
            return False
        if states is None:
            return self._copy_back(draft, sequence, found, tiers)
        run = states.ending(sequence, found.end)
        if any(map(draft.writes, run.path())):  # which may come to nothing
            return True
        if run.maker is not None and run.maker is not sequence:
            return False
        run.maker, maker = sequence, run.maker
        if self._copy_back(draft, sequence, found, tiers, partial(states.recalled, sequence, run)):
            return True
        run.maker = maker
        return False

    def _copy_back(
        self,
        draft: StepDraft,
        sequence: Sequence,
        found: Recall,
        tiers: PrefixTiers,
        note: Callable[[bool], object] = lambda is_there: None,
    ) -> bool:
        """Begin to copy what was found, as far as nobody else computes it and there are pages; a
        state alone with all that is before it."""
        runs, end = list[Run](), found.at
        for run in sequence.path(self._cache.tree.num_splits):
            if end < found.end and run.end > end:
                stop = min(found.end, run.end)
                theirs = run.owner is not None and run.owner is not sequence
                if theirs or not self._room.reserve(draft, sequence, run, stop - run.start):
                    break
                runs.append(run)
                end = stop
        if end < found.end and (found.state is not None or not runs):
            return False
        for run in runs:
            run.owner = sequence
        return tiers.load(sequence, runs, found, end, note)

    def wait_for_copy(self) -> bool:
        """Wait until one of the sequences that have no rows for a copy can go on; False: there are
        none."""
        return self.tiers is not None and self.tiers.prefixes.wait()


def _job_of(run: Run) -> Sequence | None:
    """The job that computes a run."""
    owner = run.owner
    if isinstance(owner, Sequence) and owner.is_job and owner.run is not None:
        return owner
    return None
