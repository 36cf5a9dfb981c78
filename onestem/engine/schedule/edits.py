"""What the scheduler changes in the next step: a small value, without torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from onestem.cache import ModuleRun
from onestem.engine.sequence import Sequence

__all__ = ["Chunk", "Edits"]


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start..end-1 of a sequence are rows of this step; or those of a module that it
    imports, which see the runs that it `attends` to. `samples`: who samples behind them."""

    sequence: Sequence
    start: int
    end: int
    module: ModuleRun | None = None
    attends: Seq[ModuleRun] = ()
    samples: Seq[Sequence] = ()

    @property
    def num_prompt_rows(self) -> int:
        if self.module is not None:
            return self.end - self.start
        return max(0, min(self.end, self.sequence.num_prompt) - self.start)

    @property
    def module_path(self) -> list[ModuleRun]:
        """A module behind what it attends to."""
        return [] if self.module is None else [*self.attends, self.module]


@dataclass(eq=False)
class Edits:
    """What the next step differs in from the one before it. All other rows decode one token more,
    but those of sequences that have ended, were preempted, or sample no more.

    Attributes:
        leave: jobs that pause.
        enter: sequences that decode from this step on.
        chunks: of prompts, rows of this step alone.
        unfit: sequences that do not fit in KV memory alone, and why; they have left.
        decodes: rows of interactive requests that decode.
        jobs: rows of jobs, those of prompts too.
    """

    leave: list[Sequence] = field(default_factory=list)
    enter: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    unfit: list[tuple[Sequence, str]] = field(default_factory=list)
    decodes: int = 0
    jobs: int = 0

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts."""
        return sum(chunk.end - chunk.start for chunk in self.chunks if chunk.num_prompt_rows > 0)

    @property
    def has_interactive_prompts(self) -> bool:
        return any(chunk.num_prompt_rows and not chunk.sequence.is_job for chunk in self.chunks)
