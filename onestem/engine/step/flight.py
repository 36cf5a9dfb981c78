"""A launched step, on its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onestem.engine.sampling.sampled import Pending, PendingLogprobs
from onestem.engine.schedule.edits import Edits
from onestem.engine.step.inputs import ScoreRow

__all__ = ["Flight"]


@dataclass(frozen=True, eq=False)
class Flight:
    """What a launched step will give.

    Attributes:
        edits: what it differed in from the one before it.
        slots, generations: int64 `[n]`, of each sample; a slot of another generation by now is
            another sequence's.
        num_released: slots that had been released when it was launched.
        last: bool `[n]`, samples after which their sequences may have no more.
        is_plain: nobody looks at a sample as it comes, unless it is an end-of-sequence id.
        num_decodes: samples of rows that decode; the others are the first behind prompts.
        sampled: the samples; None: there are none.
        scores: given tokens that are scored, and `scored` their log-probabilities.
        began: when it was launched, in seconds.
    """

    edits: Edits
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    num_released: int
    last: NDArray[np.bool_]
    is_plain: bool
    num_decodes: int
    sampled: Pending | None
    scores: list[ScoreRow]
    scored: PendingLogprobs | None
    began: float
