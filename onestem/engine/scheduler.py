"""What each step computes: which rows of which sequences, within tokens and KV memory."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from onestem.cache import PrefixCache, Run
from onestem.engine.queue import RequestQueue
from onestem.engine.sequence import RequestState, Sequence
from onestem.errors import CacheError
from onestem.request import Request

__all__ = ["Chunk", "Scheduler"]


@dataclass(slots=True)
class Chunk:
    """Tokens start..end-1 of a sequence are rows of this step."""

    sequence: Sequence
    start: int
    end: int


def _order(sequence: Sequence) -> int:
    return sequence.order


class Scheduler:
    """Decodes first, then unfinished prompts, then new requests.

    A step is bounded by a token budget (for what is not a decode) and by KV memory, never by a
    number of requests (BatchLLM's memory-centric batching).

    Args:
        cache: the runs.
        queue: where new requests wait.
        open_request: makes a request's sequences when it is admitted.
        max_step_tokens: most rows of a step beside the decodes.
        lookahead_tokens: decodes that admission leaves room for, per sequence.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queue: RequestQueue,
        open_request: Callable[[Request], list[Sequence]],
        *,
        max_step_tokens: int,
        lookahead_tokens: int = 32,
    ) -> None:
        self.cache = cache
        self.queue = queue
        self.max_step_tokens = max_step_tokens
        self.lookahead_tokens = lookahead_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()  # opened, but not (or no longer) admitted
        self.step = 0
        self.num_set_backs = 0
        self._open_request = open_request
        self._orders = itertools.count()
        self._group_pins: dict[int, Run] = {}
        self._group_members: dict[int, set[RequestState]] = {}
        self._alone: Sequence | None = None
        self._chunks: list[Chunk] = []

    @property
    def version(self) -> int:
        """Changes whenever a sequence's path may have."""
        return self.cache.tree.num_splits

    # ----------------------------------------------------------------------------- a step

    def schedule(self) -> list[Chunk]:
        """Choose the rows of the next step. Their runs count as computed from here on; `undo` takes
        that back if the step is not computed."""
        self.step += 1
        self._chunks = []
        self._fill()
        while not self._chunks and self._make_progress_possible():
            self._fill()
        return self._chunks

    def undo(self) -> None:
        """The scheduled step was not computed: its tokens have no KV."""
        for chunk in self._chunks:
            if chunk.sequence.run is None:
                continue
            for run in chunk.sequence.path(self.version):
                if run.start < chunk.end and run.end > chunk.start:
                    run.computed = min(run.computed, max(0, chunk.start - run.start))
        self._chunks = []

    def _fill(self) -> None:
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (decodes if sequence.decoding else prompts).append(sequence)
        for sequence in decodes:
            if sequence.run is not None:
                self._extend_decode(sequence, sequence.run)
        budget = self.max_step_tokens
        for sequence in prompts:
            if sequence.run is not None and budget > 0:
                budget -= self._extend(sequence, budget)
        if budget > 0 and (self.waiting or self.queue.peek() is not None):
            self._fill_with_new(budget)

    def _fill_with_new(self, budget: int) -> None:
        promised = sum(map(self._promise, self.running))
        while budget > 0:
            admitted = self._admit(promised)
            if admitted is None:
                return
            budget -= self._extend(admitted, budget)
            promised += self._promise(admitted)

    def _extend_decode(self, sequence: Sequence, run: Run) -> None:
        """`_extend` by one token, in the run that the sequence alone writes: most of a step."""
        computed = run.computed + 1
        if run.owner is not sequence or computed != len(run.tokens):
            self._extend(sequence, 1)
            return
        room = len(run.pages) * self.cache.pool.page_size - run.offset
        if computed > room and not self._reserve(sequence, run, computed):
            return
        run.computed = computed
        sequence.scheduled_step = self.step
        end = run.start + computed
        self._chunks.append(Chunk(sequence, end - 1, end))

    def _extend(self, sequence: Sequence, budget: int) -> int:
        """Schedule a sequence's next tokens: up to `budget`, up to a run that another computes."""
        start = at = sequence.frontier
        for run in sequence.path(self.version):
            if run.end <= at:
                continue
            if run.owner is not None and run.owner is not sequence:
                break
            take = min(budget - (at - start), run.end - at, sequence.num_to_compute - at)
            if take <= 0 or not self._reserve(sequence, run, run.computed + take):
                break
            run.owner = sequence
            run.computed += take
            at += take
        if at > start:
            sequence.scheduled_step = self.step
            self._chunks.append(Chunk(sequence, start, at))
        return at - start

    def _reserve(self, sequence: Sequence, run: Run, tokens: int) -> bool:
        """Pages for a run's first tokens; newer sequences that have no rows yet make room."""
        while not self.cache.reserve(run, tokens):
            newest = self.running[-1]
            if newest is sequence or newest.scheduled_step == self.step:
                return False
            self.set_back(newest)
        return True

    def _make_progress_possible(self) -> bool:
        """Nothing could be scheduled though something runs: give memory up, newest first."""
        if not self.running:
            return False
        if self._group_pins:
            self.release_groups()
            return True
        last = self.running[-1]
        if len(self.running) > 1 or last is not self._alone or len(last.path(self.version)) > 1:
            self.set_back(last)
            if not self.running:
                # The oldest alone, in an empty cache and undisturbed, fits: its path is one run.
                self._alone = self.waiting[0]
                self.cache.clear()
            return True
        raise CacheError(
            f"a sequence of {len(self.running[0].tokens)} tokens does not fit in KV memory of "
            f"{self.cache.pool.num_pages} pages of {self.cache.pool.page_size}"
        )

    # ----------------------------------------------------------------------------- admission

    def _admit(self, promised: int) -> Sequence | None:
        """Admit the next sequence if memory allows; waiting ones come before new requests.
        `promised`: pages that those who run will still ask for."""
        if self._alone is not None and self._alone.run is not None:
            return None
        if not self.waiting:
            if self.queue.peek() is None:
                return None
            self.waiting.extend(self._open_request(self.queue.pop()))
            self._release_closed_groups()
        sequence = self.waiting[0]
        if not self._attach(sequence, promised):
            return None
        self.waiting.popleft()
        return sequence

    def _attach(self, sequence: Sequence, promised: int) -> bool:
        tokens = sequence.ids()[: sequence.num_to_compute].copy()
        run = self.cache.attach(tokens, sequence.match_limit, sequence)
        sequence.run = run
        sequence.forget_path()
        needed = self._uncomputed_pages(sequence) + self._lookahead_pages(sequence)
        if self.running and needed + promised > self.cache.pool.num_available:
            self._detach(sequence)
            return False
        if sequence.order < 0:
            sequence.order = next(self._orders)
        # One that was set back keeps its age, so that it is not the first to go again.
        insort(self.running, sequence, key=_order)
        self._pin_group(sequence)
        return True

    def _promise(self, sequence: Sequence) -> int:
        """Pages that an admitted sequence will still ask for soon."""
        if sequence.decoding:
            return self._lookahead_pages(sequence)
        return self._uncomputed_pages(sequence) + self._lookahead_pages(sequence)

    def _uncomputed_pages(self, sequence: Sequence) -> int:
        """Pages still to be allocated on its path, for runs that it is to compute itself."""
        size = self.cache.pool.page_size
        return sum(
            max(0, -(-(run.offset + len(run.tokens)) // size) - len(run.pages))
            for run in sequence.path(self.version)
            if run.owner is sequence or run.owner is None
        )

    def _lookahead_pages(self, sequence: Sequence) -> int:
        if sequence.score_only:
            return 0
        most = sequence.state.request.params.max_tokens
        ahead = self.lookahead_tokens
        if most is not None:
            ahead = min(ahead, most - sequence.num_output)
        return self.cache.pool.pages_for(ahead)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence go on from what its parent has computed, beside it (n > 1)."""
        assert parent.run is not None
        self.cache.pin(parent.run)
        child.run = parent.run
        child.forget_path()
        child.order = next(self._orders)
        insort(self.running, child, key=_order)

    def append(self, sequence: Sequence, token: int) -> None:
        """Add a sampled token to a sequence and to the run it writes."""
        sequence.tokens.append(token)
        run = sequence.run
        assert run is not None
        if self.cache.may_grow(run) and run.end == len(sequence.tokens) - 1:
            run.tokens.append(token)
            return
        branch = self.cache.branch(run, [token], sequence)
        # The branch pinned the path for itself; the sequence's old pin on it goes.
        self.cache.unpin(run)
        sequence.run = branch
        sequence.forget_path()

    # ----------------------------------------------------------------------------- leaving

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended: let go of its runs (those that others may find stay)."""
        if sequence is self._alone:
            self._alone = None
        if sequence.run is not None:
            self._detach(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._member_finished(sequence)

    def set_back(self, sequence: Sequence) -> None:
        """Take a sequence's memory; its sampled tokens stay, and it is computed again."""
        self._detach(sequence)
        self.running.remove(sequence)
        self.num_set_backs += 1
        sequence.state.metrics.num_set_backs += 1
        older = sum(0 <= other.order < sequence.order for other in self.waiting)
        self.waiting.insert(older, sequence)

    def _detach(self, sequence: Sequence) -> None:
        assert sequence.run is not None
        self.cache.disown(sequence.run, sequence)
        self.cache.unpin(sequence.run)
        sequence.run = None
        sequence.forget_path()

    # ----------------------------------------------------------------------------- planned groups

    def _pin_group(self, sequence: Sequence) -> None:
        """A planned group's prefix stays until its last member has finished."""
        request = sequence.state.request
        group = request.group
        if group is None or not self.cache.enabled or sequence is self._alone:
            return
        self._group_members.setdefault(group, set()).add(sequence.state)
        if group in self._group_pins or request.group_prefix_tokens <= 0:
            return
        limit = min(request.group_prefix_tokens, len(request.prompt_token_ids) - 1)
        node, matched = self.cache.tree.match(sequence.ids()[:limit].copy(), limit)
        if matched == limit > 0:
            self.cache.pin(node)
            self._group_pins[group] = node

    def _member_finished(self, sequence: Sequence) -> None:
        state = sequence.state
        group = state.request.group
        if group is None or not state.finished:
            return
        self._group_members.get(group, set()).discard(state)
        self._release_closed_groups()

    def _release_closed_groups(self) -> None:
        members = self._group_members.items()
        self._release_groups([g for g, left in members if not left and not self._group_open(g)])

    def _group_open(self, group: int) -> bool:
        waiting = any(sequence.state.request.group == group for sequence in self.waiting)
        return waiting or self.queue.group_open(group)

    def release_groups(self) -> None:
        """Let go of all planned prefixes."""
        self._release_groups(list(self._group_pins))

    def _release_groups(self, groups: list[int]) -> None:
        for group in groups:
            self._group_members.pop(group, None)
            node = self._group_pins.pop(group, None)
            if node is not None:
                self.cache.unpin(node)

    def idle(self) -> bool:
        """Nothing runs and nothing waits; planned groups are complete then."""
        if self.running or self.waiting or self.queue.peek() is not None:
            return False
        self.release_groups()
        return True
