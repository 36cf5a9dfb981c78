"""Simulation of a planned job's steps: its seconds, the tokens it computes, its KV memory.

The rules are the scheduler's (`engine.schedule`). Running sequences decode in each step, and
prompts get the tokens that are left. Requests enter in planned order as memory allows. When memory
runs out, the newest is preempted and computed again. Steps that differ only in lengths are merged.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from onestem.cost.step import FIRST_MERGED, UNMERGED, StepCost
from onestem.planner import JobPlan

__all__ = ["Forecast", "Limits", "Work", "forecast"]

LOOKAHEAD_TOKENS = 32  # decodes that admission leaves room for, per sequence
MOST_ROUNDS = 20_000  # of steps with prompts; in longer jobs a round is several steps

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Attributes:
    step_tokens: rows of a step (`EngineOptions.max_step_tokens`).
    kv_tokens: tokens that KV memory holds.
    page_size: tokens in a page; each run of a sequence leaves half of its last page empty.
    num_seqs: maximum running sequences (`EngineOptions.max_num_seqs`); None: any number.
    """

    step_tokens: int
    kv_tokens: int
    page_size: int = 16
    num_seqs: int | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """A job in planned order. Nodes are prefixes that requests share; node 0 is the empty one.

    Attributes:
        tokens: `[num_requests]` prompt tokens.
        outputs: `[num_requests]` tokens of each answer.
        answers: `[num_requests]` sequences of each request (n).
        home: `[num_requests]` the deepest node on each prompt's path.
        parent, edge: `[num_nodes]` the node above, and the tokens that a node adds to it.
    """

    tokens: IntArray
    outputs: IntArray
    answers: IntArray
    home: IntArray
    parent: IntArray
    edge: IntArray

    @staticmethod
    def of(plan: JobPlan, outputs: IntArray | None, answers: IntArray | None = None) -> Work:
        """The work of a plan.

        Args:
            outputs: `[num_requests]` sampled tokens of all answers to each request, in input order;
                None: one.
            answers: `[num_requests]` answers to each; None: one.
        """
        ones, order, tree = np.ones(len(plan.order), np.int64), plan.order, plan.tree
        n = ones if answers is None else answers[order]
        total = ones if outputs is None else outputs[order]
        return Work(
            tree.lengths[order], np.maximum(total // n, 1), n, tree.home[order],
            tree.parent, tree.edge,
        )  # fmt: skip

    def part(self, positions: IntArray) -> Work:
        """Some of the requests, with the prefixes that they have.

        Args:
            positions: of the requests, in the order in which they run.
        """
        home = self.home[positions]
        used = np.zeros(len(self.parent), np.bool_)
        used[0] = True
        nodes = np.unique(home)
        while len(nodes := nodes[~used[nodes]]):
            used[nodes] = True
            nodes = np.unique(self.parent[nodes])
        kept = np.flatnonzero(used)
        return Work(
            tokens=self.tokens[positions],
            outputs=self.outputs[positions],
            answers=self.answers[positions],
            home=np.searchsorted(kept, home),
            parent=np.searchsorted(kept, self.parent[kept]),
            edge=self.edge[kept],
        )

    def unshared(self) -> Work:
        """The same work with nothing shared: each sequence has a prompt alone (`share="off"`)."""
        each = np.repeat(np.arange(len(self.tokens)), self.answers)
        root = np.zeros(1, np.int64)
        return Work(
            self.tokens[each], self.outputs[each], np.ones_like(each), np.zeros_like(each),
            root, root,
        )  # fmt: skip

    def opened(self) -> IntArray:
        """`[num_requests]` tokens of shared prefixes that each request is the first to need."""
        first = np.full(len(self.parent), len(self.tokens), np.int64)
        np.minimum.at(first, self.home, np.arange(len(self.tokens)))
        smallest, parent = first.tolist(), self.parent.tolist()
        for node in range(len(parent) - 1, 0, -1):
            smallest[parent[node]] = min(smallest[parent[node]], smallest[node])
        first, count = np.array(smallest[1:], np.int64), len(self.tokens)
        return np.bincount(first, self.edge[1:], count)[:count].astype(np.int64)

    def own(self) -> IntArray:
        """`[num_requests]` prompt tokens that no other request has."""
        depth = [0] * len(self.parent)
        for node, (parent, edge) in enumerate(
            zip(self.parent.tolist(), self.edge.tolist(), strict=True)
        ):
            depth[node] = depth[parent] + edge if node else 0
        return self.tokens - np.array(depth, np.int64)[self.home]


@dataclass
class Forecast:
    """The totals of a job.

    Attributes:
        seconds: of all steps.
        linear_seconds, attention_seconds, sampling_seconds, host_seconds: their parts; they add up
            to more if the host works while the device does.
        steps: launches of the model. rows: prompt tokens and decodes that they compute.
        computed_prompt_tokens: prompt tokens among the rows; those computed again after a
            preemption are counted again.
        peak_kv_tokens: maximum tokens in KV memory. num_preempted: requests.
    """

    seconds: float = 0.0
    linear_seconds: float = 0.0
    attention_seconds: float = 0.0
    sampling_seconds: float = 0.0
    host_seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    computed_prompt_tokens: int = 0
    peak_kv_tokens: int = 0
    num_preempted: int = 0

    def to_dict(self) -> dict[str, float]:
        """A JSON-able dict with the attributes' names."""
        return dataclasses.asdict(self)


def forecast(cost: StepCost, work: Work, limits: Limits) -> Forecast:
    """Simulate a job by its costs. 100,000 requests take seconds."""
    return _Run(cost, work, limits).result()


@dataclass
class _Prompt:
    """A request whose prompt is being computed.

    Attributes:
        left: tokens still to be computed.
        context: tokens that are already computed.
        outputs: tokens still to be sampled.
    """

    request: int
    left: int
    context: int
    outputs: int


@dataclass
class _Chunks:
    """The chunks of prompts that a step computes."""

    tokens: int = 0
    ended: list[_Prompt] = field(default_factory=list)
    attention_seconds: float = 0.0


def _numbers(values: IntArray) -> array[int]:
    """Values as an array: read one by one as fast as a list, in a fifth of its memory."""
    return array("q", values.astype(np.int64, copy=False).tobytes())


class _Run:
    """The state of a simulated job."""

    def __init__(self, cost: StepCost, work: Work, limits: Limits) -> None:
        self.cost, self.work, self.limits = cost, work, limits
        self.done = Forecast()
        self.own, self.opened = _numbers(work.own()), _numbers(work.opened())
        self.tokens, self.outputs = _numbers(work.tokens), _numbers(work.outputs)
        self.answers, self.home = _numbers(work.answers), _numbers(work.home)
        self.parent, self.edge = _numbers(work.parent), _numbers(work.edge)
        self.members = self._members()
        self.seeing = array("q", bytes(8 * len(self.parent)))  # rows that see each node
        self.walking = array("d", bytes(8 * len(self.parent)))  # seconds of these, in each step
        total = sum(self.own) + sum(self.opened)
        self.stride = 1 + total // (limits.step_tokens * MOST_ROUNDS)
        self.next = 0  # the first request that is not yet admitted
        self.prompts: deque[_Prompt] = deque()
        self.again: deque[_Prompt] = deque()  # preempted
        self.ends: list[tuple[int, int]] = []  # (step, request), a heap
        self.running: dict[int, int] = {}  # request -> step at whose end it ends
        self.held = self.reserved = 0  # tokens in memory, and tokens reserved
        self.rows = 0  # that decode
        self.sequences = 0  # admitted and not ended
        self.shapes: set[float] = set()  # numbers of rows that steps had
        self.own_tokens = 0  # that belong to one row alone
        self.hidden = 0.0  # of these, outside of windows in the middle of each answer
        self.fixed = 0.0  # seconds of shared runs, and of rows' states, in each step

    def _members(self) -> array[int]:
        """Requests below each node that have not ended."""
        members = _numbers(np.bincount(self.work.home, minlength=len(self.parent)))
        for node in range(len(self.parent) - 1, 0, -1):
            members[self.parent[node]] += members[node]
        return members

    def result(self) -> Forecast:
        """The forecast after all steps."""
        while self.next < len(self.tokens) or self.prompts or self.again or self.running:
            self._round()
        return self.done

    # ------------------------------------------------------------------------- a step, or several

    def _round(self) -> None:
        chunks = self._chunks()
        steps = self.stride if chunks.tokens else self._quiet_steps()
        if not self.rows:  # memory may have held fewer prompts than the stride's steps take
            steps = min(steps, max(1, -(-chunks.tokens // self.limits.step_tokens)))
        self._spend(chunks, steps)
        self.held += steps * self.rows
        self.own_tokens += steps * self.rows
        self.done.steps += steps
        self.done.peak_kv_tokens = max(self.done.peak_kv_tokens, self.held)
        while (first := self._first_end()) and first[0] <= self.done.steps + self.stride // 2:
            heappop(self.ends)
            self._end(first[1])
        for prompt in chunks.ended:
            self._join(prompt)
        while self.held > self.limits.kv_tokens and len(self.running) > 1:
            self._preempt(next(reversed(self.running)))

    def _first_end(self) -> tuple[int, int] | None:
        """The next step after which a request ends, and the request; preempted ones are dropped."""
        while self.ends and self.running.get(self.ends[0][1]) != self.ends[0][0]:
            heappop(self.ends)
        return self.ends[0] if self.ends else None

    def _quiet_steps(self) -> int:
        """Steps of decodes alone until a request ends or memory is full."""
        first = self._first_end()
        assert first is not None  # some request decodes, since no prompt is computed
        until = first[0] - self.done.steps
        room = (self.limits.kv_tokens - self.held) // max(1, self.rows)
        return max(1, min(until, room))

    def _chunks(self) -> _Chunks:
        """Prompt tokens of the next step (or of all steps of a stride)."""
        most = self.limits.step_tokens
        budget = self.stride * max(most - self.rows, (most + 1) // 2)
        taken: list[tuple[_Prompt, int, int]] = []
        while budget > 0 and (self.prompts or self._admit()):
            prompt = self.prompts[0]
            take = min(budget, prompt.left)
            taken.append((prompt, take, prompt.context))
            budget -= take
            prompt.left -= take
            prompt.context += take
            if prompt.left == 0:
                self.prompts.popleft()
        return self._attended(taken)

    def _attended(self, taken: list[tuple[_Prompt, int, int]]) -> _Chunks:
        """Tokens and attention of chunks: all chunks below one node share the walk over what is
        already computed."""
        cost = self.cost
        chunks = _Chunks(ended=[prompt for prompt, _, _ in taken if prompt.left == 0])
        together: dict[int, int] = {}
        for prompt, take, _ in taken:
            home = self.home[prompt.request]
            together[home] = together.get(home, 0) + take
        for prompt, take, context in taken:
            chunks.tokens += take
            home, own = self.home[prompt.request], max(1.0, take / self.stride)
            # A chunk's row has half of the chunk below what is computed already, on average.
            seen = cost.shape.seen(context, take / 2)
            before = seen * take / own * cost.walk(own)
            if home > 0 and cost.shared:
                rows = max(1.0, together[home] / self.stride)
                merged = cost.passes(FIRST_MERGED * take)
                before = min(before, seen * take / rows * cost.walk(rows) + merged)
            seconds = before + take / own * cost.shape.seen(take / 2) * cost.walk(own)
            seconds += cost.passes(UNMERGED * take)
            chunks.attention_seconds += seconds
        return chunks

    def _spend(self, chunks: _Chunks, steps: int) -> None:
        """Add the seconds and rows of these steps."""
        cost, done, tokens = self.cost, self.done, chunks.tokens / steps
        sampled = self.rows + sum(self.answers[one.request] for one in chunks.ended) / steps
        # Own runs grow by a token in each step.
        alone = max(0.0, self.own_tokens - self.hidden + self.rows * (steps + 1) / 2)
        linear = cost.linear(self.rows + cost.shape.prompt_share * tokens)
        if self.rows + tokens not in self.shapes:
            self.shapes.add(self.rows + tokens)
            linear += cost.rates.shape_seconds / steps
        attention = cost.shape.num_layers * cost.rates.call_seconds + self.fixed
        attention += alone * cost.walk(1) + chunks.attention_seconds / steps
        sampling = cost.sampling(sampled)
        host = cost.host(self.rows, tokens, len(chunks.ended) / steps)
        done.seconds += steps * cost.step(linear + attention + sampling, host)
        done.linear_seconds += steps * linear
        done.attention_seconds += steps * attention
        done.sampling_seconds += steps * sampling
        done.host_seconds += steps * host
        done.rows += steps * self.rows + chunks.tokens
        done.computed_prompt_tokens += chunks.tokens

    # ------------------------------------------------------------------------- requests

    def _ahead(self, request: int) -> int:
        """Tokens that are kept free for a request's decodes."""
        return self.answers[request] * min(LOOKAHEAD_TOKENS, self.outputs[request])

    def _slack(self, request: int) -> int:
        """Tokens that a request's runs leave empty in their last pages."""
        n = self.answers[request]
        return (n + (n > 1)) * self.limits.page_size // 2

    def _admit(self) -> bool:
        """Admit the next request, if memory allows or no other runs; whether one was."""
        if self.again:
            prompt = self.again[0]
            new = prompt.left
        elif self.next < len(self.tokens):
            request = self.next
            new = self.opened[request] + self.own[request]
            context = self.tokens[request] - new
            prompt = _Prompt(request, new, context, self.outputs[request])
        else:
            return False
        ahead, kept = self._ahead(prompt.request), new + self._slack(prompt.request)
        free = self.limits.kv_tokens - self.held - self.reserved
        after, most = self.sequences + self.answers[prompt.request], self.limits.num_seqs
        if most is not None and after > most and self.sequences:
            return False
        if kept + ahead > free and self.sequences:
            return False
        self.sequences = after
        if self.again:
            self.again.popleft()
        else:
            self.next += 1
        self.held += kept
        self.reserved += ahead
        self.prompts.append(prompt)
        return True

    def _join(self, prompt: _Prompt) -> None:
        """Let a computed prompt decode: its last row samples the first token."""
        request = prompt.request
        last = self.done.steps + prompt.outputs - 1
        self.running[request] = last
        self._count(request, 1)
        self.own_tokens += self.answers[request] * self._sampled(request)
        if prompt.outputs <= 1:
            self._end(request)
        else:
            heappush(self.ends, (last, request))

    def _count(self, request: int, sign: int) -> None:
        """Add (1) or remove (-1) the rows of a request, with what they see."""
        n, node, own = self.answers[request], self.home[request], self.own[request]
        self.rows += sign * n
        self.fixed += sign * n * self.cost.own_walk_seconds
        below = self.outputs[request] / 2
        alone = below if n > 1 else below + own
        self.hidden += sign * n * (alone - self.cost.shape.seen(alone))
        if n > 1:
            self.fixed += sign * self.cost.run(own, n, first=node == 0, below=below)
        else:
            self.own_tokens += sign * own
        below += own
        while node:
            above, edge = self.parent[node], self.edge[node]
            self.seeing[node] += sign * n
            seconds = self.cost.run(edge, self.seeing[node], first=above == 0, below=below)
            self.fixed += seconds - self.walking[node]
            self.walking[node] = seconds
            node, below = above, below + edge

    def _sampled(self, request: int) -> int:
        """Tokens of each of a request's answers in memory; the last one sampled is not."""
        return self.done.steps - (self.running[request] - self.outputs[request] + 1)

    def _leave(self, request: int) -> int:
        """Remove a request that decodes; returns the tokens in memory of each answer."""
        sampled = self._sampled(request)
        del self.running[request]
        self.sequences -= self.answers[request]
        self._count(request, -1)
        self.own_tokens -= self.answers[request] * sampled
        self.held -= self.own[request] + self._slack(request) + self.answers[request] * sampled
        self.reserved -= self._ahead(request)
        return sampled

    def _end(self, request: int) -> None:
        self._leave(request)
        node = self.home[request]
        while node:
            self.members[node] -= 1
            if self.members[node] == 0:
                self.held -= self.edge[node]
            node = self.parent[node]

    def _preempt(self, request: int) -> None:
        """Preempt a request: it frees its memory and is computed again before new requests."""
        sampled = min(self._leave(request), self.outputs[request] - 1)
        self.done.num_preempted += 1
        left = self.own[request] + self.answers[request] * sampled
        context = self.tokens[request] - self.own[request]
        self.again.appendleft(_Prompt(request, left, context, self.outputs[request] - sampled))
