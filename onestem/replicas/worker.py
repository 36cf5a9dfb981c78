"""One replica: an `LLM` that takes requests while it computes others."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onestem.engine.outputs import EngineStats
from onestem.errors import OnestemError, RankError
from onestem.forecasts import Target
from onestem.llm import LLM
from onestem.options import EngineOptions
from onestem.request import Request, RequestOutput

log = logging.getLogger(__name__)

AGAIN = ": start the engine again"  # of a `RankError`: replicas do that by themselves


@dataclass(frozen=True)
class Facts:
    """Facts of a replica that has started.

    Attributes:
        node, pid: its machine and process.
        options: as resolved by its `LLM`.
        target: its model on its device.
    """

    node: str
    pid: int
    options: EngineOptions
    target: Target


@dataclass(frozen=True)
class Failure:
    """A replica could not start, or has died.

    Attributes:
        reason: one line.
        is_final: another attempt would fail alike.
    """

    reason: str
    is_final: bool = False


@dataclass(frozen=True)
class Report:
    """The result of one call of `Worker.work`.

    Attributes:
        run: the run of its requests.
        outputs: finished ones.
        num_waiting: requests that it has not begun.
        seconds: computing time.
        stats: of its engine, since its start.
        died: why the engine died; None: it did not.
    """

    run: int
    outputs: list[RequestOutput]
    num_waiting: int
    seconds: float
    stats: EngineStats
    died: str | None = None


class Worker:
    """An engine's side of a replica. Its methods are called one at a time.

    Args:
        options: of the engine.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._run = 0
        self._num_jobs = 0
        self._num_waiting = 0
        self._groups: dict[int, int] = {}  # of this run, which hand-outs may cut

    def load(self) -> Facts | Failure:
        """Load the model."""
        try:
            self._llm = llm = LLM.from_options(self._options)
            self._stats = llm.engine.stats
            return Facts(platform.node(), os.getpid(), llm.options, Target.of_llm(llm).settled())
        except RankError as error:
            return Failure(_line(error))  # what ended one of its processes may not come again
        except Exception as error:
            return Failure(_line(error), is_final=True)

    def work(self, run: int, requests: Sequence[Request], seconds: float) -> Report:
        """Take requests and compute for `seconds`, or until no request is waiting any more.
        Requests of another run are dropped."""
        began, outputs, died = time.monotonic(), list[RequestOutput](), None
        try:
            engine = self._llm.engine  # an error if one of its processes has ended
            if run != self._run:
                self._forget(run)
            if requests:
                self._num_jobs += 1
                self._num_waiting += len(requests)
                engine.requests.add_job(
                    str(self._num_jobs), self._counted(list(requests)), groups=self._groups
                )
            had_waiting = self._num_waiting > 0
            while engine.has_unfinished():
                outputs += [output for output in engine.step() if output.finished]
                if (had_waiting and not self._num_waiting) or time.monotonic() - began >= seconds:
                    break
        except Exception as error:
            log.error("the engine died", exc_info=error)
            died = _line(error)
        spent = time.monotonic() - began
        return Report(run, outputs, self._num_waiting, spent, self._stats, died)

    def _forget(self, run: int) -> None:
        for job in self._llm.engine.requests.job_ids:
            self._llm.engine.requests.remove_job(job)
        self._run, self._num_waiting, self._groups = run, 0, {}

    def _counted(self, requests: list[Request]) -> Iterator[Request]:
        run = self._run
        for request in requests:
            if run == self._run:
                self._num_waiting -= 1
            yield request


def _line(error: Exception) -> str:
    """An error as one line."""
    told = " ".join(str(error).split()).removesuffix(AGAIN)
    return told if isinstance(error, OnestemError) else f"{type(error).__name__}: {told}"
