"""How long a job's answers may be, and what is predicted of those that set no limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.batch.interface import SpooledPrompts
from onestem.planner.sort import IntArray

ASSUMED_TOKENS = 256
"""Tokens that are predicted of an answer without `max_tokens`: models end most of their answers
long before the last position, and seldom after one token."""


@dataclass(frozen=True)
class OpenEnded:
    """Requests that set no `max_tokens`.

    Attributes:
        requests: how many there are.
        most_tokens: that an answer to one of them may have.
    """

    requests: int
    most_tokens: int

    @staticmethod
    def of(prompts: SpooledPrompts, max_model_len: int) -> OpenEnded:
        """Those of a job, for a model that has at most `max_model_len` tokens in a sequence."""
        room = (max_model_len - prompts.lengths)[prompts.most_outputs == 0]
        return OpenEnded(len(room), int(room.max(initial=0)))

    def line(self, *, has_template: bool) -> str:
        """One line with the way out; for a job of rows, if `has_template`."""
        out = (
            """give --body '{"max_tokens": 256}'"""
            if has_template
            else 'write "max_tokens" into their bodies'
        )
        return (
            f"{self.requests} requests set no max_tokens: each of their answers may run to "
            f"{self.most_tokens} tokens; to end them sooner, {out}"
        )


def expected_outputs(prompts: SpooledPrompts, max_model_len: int) -> IntArray:
    """`[num_prompts]` tokens of all answers to each: what `max_tokens` allows; where it is not
    given, `ASSUMED_TOKENS` an answer, or what the model leaves room for."""
    given = prompts.most_outputs
    if given.all():
        return given
    room = np.clip(max_model_len - prompts.lengths, 1, ASSUMED_TOKENS)
    return np.where(given > 0, given, prompts.answers() * room)
