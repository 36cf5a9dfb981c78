"""What a streak of decodes needs of the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from onestem.cache import Run
from onestem.engine.advance import Advance
from onestem.engine.drawing import Drawing
from onestem.engine.inputs import StepInputs
from onestem.engine.scheduler import Chunk
from onestem.engine.sequence import Sequence
from onestem.request import FinishReason, TokenLogprobs

__all__ = ["StreakHost"]


@dataclass(frozen=True)
class StreakHost:
    """The engine, as a streak knows it.

    Attributes:
        accept: takes a newcomer's first token, with its log-probabilities where they are wanted.
        end_without_token: ends a sequence that no token can follow.
        take: takes a further token of a sequence whose every token is shown, and tells whether its
            text or stop ids end it.
        append: takes sampled tokens, seen by nobody so far, that do not end a sequence.
        note_sampled: counts sampled tokens that are not shown to `take`.
        finish: ends a sequence.
        num_left: tokens that a sequence may still sample.
        may_sit: whether a sequence whose prompt was computed may have a row.
        newcomers: rows of prompts for the step: of those that are being computed (the first
            argument) and, if asked, of newcomers; and whose prompts go on behind them.
        lay_out: inputs of the step with such rows behind its decodes.
        undo: the rows of prompts that were asked for last are not computed.
        put: has the drawing sample sequences in such places, each its token of that index next.
        note_computed: takes the chunks of a step that was launched.
        note_prompts: takes how many rows of prompts a step had, and how long it took.
        eos_token_ids: of the model.
        depth: steps in flight at most; 2 hides the host's work behind the device's.
    """

    accept: Callable[[Sequence, int, TokenLogprobs | None], None]
    end_without_token: Callable[[Sequence, int], None]
    take: Callable[[Sequence, Run, int, TokenLogprobs | None], bool]
    append: Callable[[Sequence, list[int], list[TokenLogprobs]], None]
    note_sampled: Callable[[int], None]
    finish: Callable[[Sequence, FinishReason], None]
    num_left: Callable[[Sequence], int]
    may_sit: Callable[[Sequence], bool]
    newcomers: Callable[[list[Sequence], bool], tuple[list[Chunk], list[Sequence]]]
    lay_out: Callable[[Advance, list[Chunk]], StepInputs]
    undo: Callable[[], None]
    put: Callable[[Drawing, list[int], list[Sequence], int], None]
    note_computed: Callable[[list[Chunk]], None]
    note_prompts: Callable[[int, float], None]
    eos_token_ids: Collection[int]
    depth: int
