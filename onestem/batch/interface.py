"""Arguments and results of `run_job`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from onestem.batch.results import line_number_of
from onestem.batch.spool import Spool
from onestem.errors import JobError
from onestem.planner import JobPlan
from onestem.planner.sort import IntArray
from onestem.request import Request, RequestOutput

Stage = Literal["read", "run", "write"]


class EngineDiedError(JobError):
    """The engine failed as a whole; another one is needed to go on.

    Attributes:
        there: ids of the requests that it had.
        num_settled: lines that became errors, since an engine had died with them before.
    """

    def __init__(self, message: str, there: Collection[str] = (), *, num_settled: int = 0) -> None:
        super().__init__(message)
        self.there = there
        self.num_settled = num_settled


DIED_TWICE = "the engine died twice while it answered this line"
"""Beginning of the message of a line that engines died with."""

# `onestem.planner.plan_job` with its options bound.
Planner = Callable[..., JobPlan]
# Pulls requests as it has room, returns outputs in any order; raises `EngineDiedError`.
Run = Callable[[Iterable[Request]], Iterable[RequestOutput]]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a job.

    Attributes:
        stage: "read": `done` and `total` are bytes of the input; "run": lines; "write": lines,
            reported once, when the output is ready to be renamed.
        failed: lines with an error so far.
        last: the output that was written last; None if the report is about something else.
    """

    stage: Stage
    done: int
    total: int
    failed: int = 0
    last: RequestOutput | None = None


@dataclass(kw_only=True)
class JobSummary:
    """The result of a job.

    Attributes:
        total: lines with a result: all lines of the input that are not blank.
        failed: of these, lines with an error object.
        resumed: results from earlier runs; their cost is not in the counts below.
        damaged: lines of earlier runs that were not as they were written; they were answered again.
        already_complete: the output was complete before this run, which computed nothing.
        num_prompt_tokens: prompt tokens of the requests answered in this run.
        num_cached_tokens, num_computed_tokens, num_output_tokens: sums of their metrics.
        read_seconds: hashing and first pass.
        plan_seconds: planning.
        seconds: the whole run.
        plan: the planner's plan; None: nothing was planned.
    """

    output: Path
    total: int = 0
    failed: int = 0
    resumed: int = 0
    damaged: int = 0
    already_complete: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    read_seconds: float = 0.0
    plan_seconds: float = 0.0
    seconds: float = 0.0
    plan: JobPlan | None = field(default=None, repr=False)

    @property
    def ok(self) -> int:
        """Lines with an answer."""
        return self.total - self.failed

    @property
    def exit_code(self) -> int:
        """Of a command that runs the job: 1 if a line failed."""
        return 1 if self.failed else 0

    def last_line(self) -> str:
        """The last line of output, for people."""
        done = "already complete" if self.already_complete else "complete"
        damaged = f", {self.damaged} damaged ones answered again" if self.damaged else ""
        return f"{self.output}: {done}: {self.total} lines, {self.failed} failed{damaged}"

    def add(self, output: RequestOutput) -> None:
        """Count an answer of this run."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.metrics.num_cached_tokens
        self.num_computed_tokens += output.metrics.num_computed_tokens
        self.num_output_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C, raised after all finished answers are written. Its text says how to go on."""


class SpooledPrompts:
    """The prompts of some lines for the planner, read from the disk by index."""

    def __init__(self, spool: Spool, indices: IntArray) -> None:
        self._spool = spool
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def lengths(self) -> IntArray:
        """`[num_prompts]` tokens of each prompt."""
        return self._spool.num_ids[self._indices]

    @property
    def most_outputs(self) -> IntArray:
        """`[num_prompts]` maximum tokens of all answers to each together; 0: not given."""
        return self._spool.max_output[self._indices]

    @property
    def folder(self) -> Path:
        """A folder with room for a second copy of the ids."""
        return self._spool.folder

    def __getitem__(self, i: int, /) -> npt.NDArray[np.int32]:
        return self._spool.prompt(int(self._indices[i]))

    def place_of(self, request_id: str) -> int | None:
        """Index of a line's request among these prompts; None: it is not one of them."""
        index = self._spool.index_of(line_number_of(request_id))
        place = int(np.searchsorted(self._indices, index))
        there = place < len(self) and self._indices[place] == index
        return place if there else None

    def answers(self) -> IntArray:
        """`[num_prompts]` number of answers that each asks for (n). Reads each line's record."""
        asked = (self._spool.spooled_request(i).sampling for i in self._indices.tolist())
        return np.array([sampling.get("n") or 1 for sampling in asked], np.int64)
