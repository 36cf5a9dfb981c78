"""How much of a step jobs may take beside interactive requests, and how long steps are. No torch.

Interactive tokens may come a little slower than without jobs and no more. What a row costs depends
on the device, on the batch and on what it reads, so it is not predicted but measured: steps without
jobs give the reference. The number of jobs' rows grows slowly while steps with them are fast
enough, and shrinks fast when they are not (as TCP fits its window to a line).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SLOWDOWN = 1.15  # of a step, so that the 99th percentile stays below 1.25
SAMPLES = 4  # steps of a cycle that run without jobs and measure the reference
CYCLE = 68
RETRY = 2  # cycles until jobs are tried again after one row of theirs was too much
MEMORY = 0.25  # weight of the newest step in an average


@dataclass(kw_only=True, eq=False)
class JobShare:
    """Rows of jobs in a step, beside interactive requests.

    Attributes:
        most: rows that they ever have.
        limit: rows that jobs may have in a step now.
    """

    most: int
    limit: int = 1
    _seconds: dict[int, float] = field(default_factory=dict)  # of steps without jobs, by magnitude
    _steps: int = 0

    def rows(self, interactive: int) -> int:
        """Rows for jobs in a step with `interactive` decodes; 0 in steps that measure the time
        without jobs. Beside interactive prompts alone, jobs have the present limit, at least one
        row: no decode could raise the limit again."""
        if interactive == 0:
            return max(1, self.limit)
        known = interactive.bit_length() in self._seconds
        return self.limit if known and self._steps % CYCLE >= SAMPLES else 0

    def note(self, interactive: int, jobs: int, seconds: float) -> None:
        """Note that a step of `interactive` decodes and `jobs` rows of jobs took `seconds`."""
        key = interactive.bit_length()
        known = self._seconds.get(key)
        self._steps += 1
        if self.limit == 0 and self._steps % (RETRY * CYCLE) == 0:
            self.limit = 1
        if jobs == 0:
            self._seconds[key] = seconds if known is None else _mean(known, seconds)
        elif known is not None and seconds / known > SLOWDOWN:
            self.limit = min(self.limit, jobs) * 3 // 4
        elif known is not None and jobs >= self.limit:
            self.limit = min(self.most, self.limit + max(1, self.limit // 4))


@dataclass(kw_only=True, eq=False)
class StepLimits:
    """What a step may have, so that it takes about a given time.

    Attributes:
        step_tokens: maximum rows of a step, decodes included; half of them are for prompts, however
            many decodes there are. So full steps have one number of rows, for which libraries have
            chosen their kernels before.
        step_seconds: what a step may take, by the measured time of a prompt's row; None: no limit
            but `step_tokens`. It may be changed between steps.
        row_seconds: of a prompt's row, as measured; None: not yet.
    """

    step_tokens: int
    step_seconds: float | None = None
    row_seconds: float | None = None

    def rows(self, decodes: int = 0) -> int:
        """Rows of prompts that the next step may have beside `decodes` decodes."""
        most = max(self.step_tokens - decodes, (self.step_tokens + 1) // 2)
        if self.step_seconds is None:
            return most
        if self.row_seconds is None:
            return min(most, FIRST_ROWS)
        return min(most, max(FEWEST_ROWS, int(self.step_seconds / self.row_seconds)))

    def note(self, prompt_rows: int, seconds: float) -> None:
        """Note that a step with `prompt_rows` rows of prompts took `seconds`."""
        if prompt_rows < FEWEST_ROWS:
            return
        row = seconds / prompt_rows
        known = self.row_seconds
        self.row_seconds = row if known is None else _mean(known, row)

    def forget(self) -> None:
        """Measure the time of a row again."""
        self.row_seconds = None


CHECK_SHARE = 0.001  # of the time may go into checks
FIRST_ROWS = 64  # where nothing is known of a row's time yet
FEWEST_ROWS = 16  # below it a step is not shorter: weights are read whole


class CheckPace:
    """Checks now and then: recounting many runs takes long, and a request may come any moment."""

    def __init__(self) -> None:
        self._step = 0  # of the last check
        self._next = 0.0  # the time of the next one

    def call(self, check: Callable[[], object], step: int) -> None:
        """Check, if there were steps since the last time and that is not too short ago."""
        started = time.monotonic()
        if self._step != step and started >= self._next:
            self._step = step
            check()
            ended = time.monotonic()
            self._next = ended + (ended - started) / CHECK_SHARE


def _mean(old: float, new: float) -> float:
    return old + MEMORY * (new - old)
