"""A planned job on many replicas: the requests that each gets, and what happens when one dies.

Nothing here depends on an engine or on the way to replicas (`Crew`): tests use simulated ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from onestem.batch import DIED_TWICE
from onestem.cost import Work, deal_costs
from onestem.engine.outputs import EngineStats, refused_output
from onestem.errors import JobError
from onestem.planner import Deal, Planned, RunningOrder, plan_job, planned
from onestem.replicas.worker import Facts, Failure, Report
from onestem.request import Request, RequestOutput

# A replica has two open calls, so that it need not wait for the second one.
CALLS = 2
CALL_SECONDS = 0.25
# Minimum number of requests that a replica holds and has not begun.
LEAST_AHEAD = 16
# A speed counts once it was measured for this long.
MEASURED_SECONDS = 0.5
# A replica that died this often in a row, without an answer, is not started again.
MOST_DEATHS = 3
# A request that was alone in an engine at this many deaths becomes an error.
MOST_ALONE = 2


class Crew(Protocol):
    """The way to replicas, by their numbers. Only `wait` blocks."""

    def start(self, replica: int) -> None:
        """Begin to start a replica; `wait` returns its `Facts` or a `Failure`."""
        ...

    def call(self, replica: int, run: int, requests: list[Request], seconds: float) -> None:
        """Call `Worker.work`, after earlier calls. `wait` returns a `Report`, or one `Failure` for
        all open calls."""
        ...

    def wait(self) -> list[tuple[int, Facts | Report | Failure]]:
        """New events. Waits until there is one, or for about a minute."""
        ...

    def stop(self, replica: int) -> None:
        """End a replica at once. Nothing more comes from it."""
        ...


@dataclass
class _Replica:
    """A replica, as the dealer sees it.

    Attributes:
        facts: None: it is not running.
        is_gone: it will not be started again.
        is_refused: nor would one that the same command starts.
        calls: number of requests in each open call.
        num_waiting: requests that it has not begun, as far as is known.
        ahead: requests that it should hold and not have begun.
        hand: id -> item, of its requests.
        trial: the suspects that it tries now; None: it tries none.
        deaths: in a row, without an answer between them.
        work, seconds: work and computing time of this run.
        stats: of its engine.
        ended: of its earlier engines.
    """

    facts: Facts | None = None
    is_gone: bool = False
    is_refused: bool = False
    calls: deque[int] = field(default_factory=deque)
    num_waiting: int = 0
    ahead: int = LEAST_AHEAD
    hand: dict[str, int] = field(default_factory=dict)
    trial: _Trial | None = None
    deaths: int = 0
    work: float = 0.0
    seconds: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)
    ended: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True)
class _Trial:
    """Items that an engine had when it died. They are tried together, without others.

    Attributes:
        died_on: replicas that died with them.
    """

    items: list[int]
    died_on: frozenset[int]


class Dealer:
    """Deals runs of requests to replicas.

    When a replica dies, the others go on. The requests that it held are tried afterwards, in
    halves, each half alone in a replica. So a request that kills engines fails alone, and a machine
    that was switched off costs no answers.

    Args:
        num_replicas: replicas to start.
        tell: gets one line for each replica that cannot start or dies.
    """

    def __init__(self, crew: Crew, num_replicas: int, tell: Callable[[str], object]) -> None:
        self._crew, self._tell = crew, tell
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._run = 0
        self._told: set[str] = set()
        self._identity: dict[str, Any] | None = None  # options that answers depend on
        self._job: _Run | None = None
        for replica in range(num_replicas):
            crew.start(replica)

    def first(self) -> Facts:
        """Facts of the first replica that runs; waits for it.

        Raises:
            JobError: none can start.
        """
        while not self.facts:
            self._check()
            self._wait()
        return self.facts[0]

    @property
    def facts(self) -> list[Facts]:
        """Facts of the replicas that run."""
        return [one.facts for one in self._replicas if one.facts]

    def stats(self) -> EngineStats:
        """Sums over all engines, also ended ones; peaks are the maximum of any engine."""
        total = EngineStats()
        for one in self._replicas:
            for part in (one.ended, one.stats):
                _add(total, part)
        return total

    def _check(self) -> None:
        if all(one.is_gone for one in self._replicas):
            if all(one.is_refused for one in self._replicas):
                raise JobError("no replica can start, see above")
            raise JobError("no replica is left, see above: the same command goes on")

    def _wait(self) -> list[RequestOutput]:
        """Wait for events and handle them; returns the outputs in them."""
        outputs: list[RequestOutput] = []
        events = self._crew.wait()
        if not events and not self.facts:
            self._tell_once("no replica runs yet: Ray has no room for one, or they are loading")
        died: set[int] = set()  # their later events belong to void calls
        for replica, event in events:
            if replica in died:
                continue
            if isinstance(event, Facts):
                self._came(replica, event)
            elif isinstance(event, Failure):
                died.add(replica)
                self._failed(replica, event)
            else:
                outputs += self._worked(replica, event)
                if event.died is not None:
                    died.add(replica)
                    self._failed(replica, Failure(event.died))
        return outputs

    def _came(self, replica: int, facts: Facts) -> None:
        mine = facts.options.identity()
        self._identity = theirs = self._identity or mine
        for name in (name for name in mine if mine[name] != theirs.get(name)):
            reason = f"its {name} is {mine[name]}, that of others is {theirs.get(name)}"
            reason += "" if name == "bits" else ": give it to all"  # that is what its node is
            self._failed(replica, Failure(reason, is_final=True))
            return
        self._replicas[replica].facts = facts
        if self._job is not None:
            self._job.deal.begun[replica] = True

    def _failed(self, replica: int, failure: Failure) -> None:
        self._crew.stop(replica)
        one = self._replicas[replica]
        where = f" ({one.facts.node})" if one.facts else ""
        before = one.facts is not None
        one.deaths += one.trial is None
        one.is_refused = failure.is_final
        one.is_gone = failure.is_final or one.deaths >= MOST_DEATHS
        does = "died" if before else "cannot start"
        end = "it is not started again" if one.is_gone else "it is started again"
        told = f"replica {replica}{where} {does}: {failure.reason}: {end}"
        if before:
            self._tell(told)
        else:
            self._tell_once(told, failure.reason)
        if self._job is not None:
            self._job.lost(replica, one, failure.reason, gone=one.is_gone)
        one.facts, one.trial, one.num_waiting = None, None, 0
        one.hand.clear()
        one.calls.clear()
        _add(one.ended, one.stats)
        one.stats = EngineStats()
        if not one.is_gone:
            self._crew.start(replica)

    def _tell_once(self, line: str, reason: str | None = None) -> None:
        """Report a line, unless one was reported for this reason."""
        if (reason or line) not in self._told:
            self._told.add(reason or line)
            self._tell(line)

    def run(self, requests: Planned | Iterable[Request]) -> Iterator[RequestOutput]:
        """Answer requests; yields outputs as they come. What is not planned is planned first.

        Raises:
            JobError: no replica is left.
        """
        if not isinstance(requests, Planned):
            requests = _planned(list(requests))
        self._run += 1
        facts = self.first()
        for one in self._replicas:
            one.hand.clear()
            one.trial, one.num_waiting, one.ahead = None, 0, LEAST_AHEAD
            one.work = one.seconds = 0.0
        self._job = job = _Run(requests, facts, self._replicas)
        try:
            while job.num_left:
                self._check()
                self._hand_out(job)
                yield from self._wait()
                yield from job.blamed()
        finally:
            self._job = None

    def _hand_out(self, job: _Run) -> None:
        for replica, one in enumerate(self._replicas):
            while one.facts is not None and len(one.calls) < CALLS:
                requests = job.take(replica, one)
                if not requests and not one.hand:
                    break
                one.calls.append(len(requests))
                self._crew.call(replica, self._run, requests, CALL_SECONDS)

    def _worked(self, replica: int, report: Report) -> list[RequestOutput]:
        one = self._replicas[replica]
        one.calls.popleft()
        before, one.stats = one.stats, report.stats
        outputs: list[RequestOutput] = []
        if report.run == self._run and self._job is not None:
            outputs = self._job.worked(replica, one, report, before)
            if outputs:
                one.deaths = 0
        return outputs


class _Run:
    """The requests of one run: which replica holds which, and what is left."""

    def __init__(self, planned: Planned, facts: Facts, replicas: Sequence[_Replica]) -> None:
        self._planned, self._order = planned, planned.order
        planned.has_branches = facts.target.shape.state_bytes > 0
        plan, positions = planned.order.plan, planned.positions
        self._places = plan.order[positions]
        work = Work.of(plan, plan.output_tokens).part(positions)
        self.weights = facts.target.weights(work, facts.options.share)
        costs = deal_costs(plan, positions, self.weights)
        self.deal = Deal(costs, np.ones(len(replicas)))
        for replica, one in enumerate(replicas):
            self.deal.begun[replica] = one.facts is not None
            if one.is_gone:
                self.deal.leave(replica)
        self.num_left = len(costs.cost)
        self._speeds = np.full(len(replicas), np.nan)
        self._trials: deque[_Trial] = deque()
        self._alone: dict[int, int] = {}
        self._blamed: list[RequestOutput] = []

    def take(self, replica: int, one: _Replica) -> list[Request]:
        """Requests for a replica's next call."""
        requests: list[Request] = []
        if one.trial is not None:
            return requests
        self._sort()
        while one.num_waiting < one.ahead:
            piece = self.deal.take(replica, one.ahead - one.num_waiting)
            if piece is None:
                break
            requests += self._handed(one, range(piece.first, piece.end))
            self._order.begin(self._places[piece.first : piece.end])
        if not requests and not one.hand and self._trials:
            one.trial = self._next_trial(replica)
            requests = self._handed(one, one.trial.items)
        return requests

    def _sort(self) -> None:
        """Sort what was not handed out by what answers have shown since."""
        order = self._order.again()
        if order is not None:
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            self.deal.sort(place[self._places])

    def _request(self, item: int) -> Request:
        return self._planned.request(int(self._planned.positions[item]))

    def _handed(self, one: _Replica, items: Iterable[int]) -> list[Request]:
        requests = []
        for item in items:
            request = self._request(item)
            one.hand[request.request_id] = item
            requests.append(request)
        one.num_waiting += len(requests)
        return requests

    def _next_trial(self, replica: int) -> _Trial:
        """The first trial whose items did not die on this replica; if there is none, the first."""
        for trial in self._trials:
            if replica not in trial.died_on:
                self._trials.remove(trial)
                return trial
        return self._trials.popleft()

    def worked(
        self, replica: int, one: _Replica, report: Report, before: EngineStats
    ) -> list[RequestOutput]:
        """Take a replica's report; returns its outputs, of requests that it was known to hold."""
        handed = one.num_waiting
        outputs = []
        for output in report.outputs:
            item = one.hand.pop(output.request_id, None)
            if item is not None:
                outputs.append(output)
                if one.trial is None:
                    self.deal.done(replica, item, item + 1)
        self.num_left -= len(outputs)
        if not one.hand:
            one.trial = None
        one.num_waiting = report.num_waiting + sum(one.calls)
        one.ahead = max(LEAST_AHEAD, 2 * (handed - one.num_waiting))
        self._measure(replica, one, report, before)
        return outputs

    def _measure(self, replica: int, one: _Replica, report: Report, before: EngineStats) -> None:
        """Update the replica's speed from what it has computed."""
        now, weights = report.stats, self.weights
        prompts = now.processed_prompt_tokens - before.processed_prompt_tokens
        one.work += weights.prompt * prompts
        one.work += weights.sampled * (now.output_tokens - before.output_tokens)
        one.seconds += report.seconds
        if one.seconds >= MEASURED_SECONDS and one.work > 0:
            self._speeds[replica] = one.work / one.seconds
            mean = np.nanmean(self._speeds)
            self.deal.speeds = np.where(np.isnan(self._speeds), mean, self._speeds)

    def lost(self, replica: int, one: _Replica, reason: str, *, gone: bool) -> None:
        """Note that a replica died with the requests in its hand."""
        self.deal.begun[replica] = False
        if gone:
            self.deal.leave(replica)
        items = sorted(one.hand.values())
        if one.trial is None:
            for item in items:
                self.deal.done(replica, item, item + 1)
        if not items:
            return
        died_on = (one.trial.died_on if one.trial else frozenset()) | {replica}
        if len(items) > 1:
            half = len(items) // 2
            self._trials += [_Trial(items[:half], died_on), _Trial(items[half:], died_on)]
            return
        self._alone[items[0]] = self._alone.get(items[0], 0) + 1
        if self._alone[items[0]] < MOST_ALONE:
            self._trials.append(_Trial(items, died_on))
        else:
            request = self._request(items[0])
            self._blamed.append(refused_output(request, f"{DIED_TWICE}: {reason}"))

    def blamed(self) -> list[RequestOutput]:
        """Errors of the requests that engines died with."""
        outputs, self._blamed = self._blamed, []
        self.num_left -= len(outputs)
        return outputs


def _add(total: EngineStats, part: EngineStats) -> None:
    for name, value in vars(part).items():
        whole = max if name == "peak_kv_tokens" else lambda a, b: a + b
        setattr(total, name, whole(getattr(total, name), value))


def _planned(requests: list[Request]) -> Planned:
    prompts = [one.prompt_token_ids for one in requests]
    lengths = [one.params.max_tokens or 1 for one in requests]
    return planned(requests, RunningOrder(plan_job(prompts, output_lengths=lengths)))
