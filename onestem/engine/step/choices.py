"""Rows of questions, whose attention says what is repaired of the documents before them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onestem.engine.modules.prompt import ImportedRun
from onestem.engine.sequence import Sequence
from onestem.ops import AttentionPlan, Scores
from onestem.ops.attended import attended
from onestem.ops.copies import on_device
from onestem.ops.kv import read_kv

MOST_PADDED = 2**20  # rows times tokens that a product has: 128 MiB of weights, of 32 heads


@dataclass(frozen=True, eq=False)
class ChoiceRows:
    """Rows of a step that are the last of a sequence's question.

    Attributes:
        first: of the step's rows, and `rows` their number.
        end: index of the token after them in the sequence.
        seen: the documents' runs that they see.
    """

    sequence: Sequence
    first: int
    rows: int
    end: int
    seen: Seq[ImportedRun]

    def add(self, part: np.ndarray, total: np.ndarray) -> None:
        """Add what they attend to, float32, token after token of `seen`, to `total` `[n]` by place
        in the prompt."""
        at = 0
        for one in self.seen:
            tokens = one.tokens
            total[one.position + tokens] += part[at : at + len(tokens)]
            at += len(tokens)

    @property
    def num_seen(self) -> int:
        """Tokens that they see of documents."""
        return sum(len(one.tokens) for one in self.seen)


def choice_bounds(choices: Seq[ChoiceRows]) -> np.ndarray:
    """Where, one after the other, what each attends to ends; the last left out."""
    return np.cumsum([one.num_seen for one in choices])[:-1]


class Watched:
    """What rows of questions attend to in a step, summed over layers.

    Args:
        plan: of the step.
        device: of the queries.
    """

    def __init__(self, choices: Seq[ChoiceRows], plan: AttentionPlan, device: torch.device) -> None:
        runs = []
        for one in choices:
            rows = np.arange(one.first, one.first + one.rows)
            for run in one.seen:
                queries = rows
                if run.shift:
                    moved = np.flatnonzero(plan.moved[:, 1] == run.shift)
                    queries = moved[np.searchsorted(plan.moved[moved, 0], rows)] + plan.num_rows
                tokens = run.tokens
                slots = run.run.slots(0, len(run.run.tokens))[tokens]
                place = run.position + tokens
                runs.append((slots, place, queries, rows, plan.row_position[rows]))
        order = sorted(range(len(runs)), key=lambda i: len(runs[i][0]))
        self._parts: list[_Part] = []
        at, places = 0, [np.zeros(0, np.int64)] * len(runs)
        while order:
            shortest, fitting = len(runs[order[0]][0]), 0
            while fitting < len(order):
                slots, *_, rows, _ = runs[order[fitting]]
                size = (fitting + 1) * len(slots) * len(rows)
                if fitting and (len(slots) > 2 * shortest or size > MOST_PADDED):
                    break
                fitting += 1
            taken, order = order[:fitting], order[fitting:]
            part = _Part.of([runs[i] for i in taken], device)
            self._parts.append(part)
            for i in taken:
                places[i] = at + np.arange(len(runs[i][0]))
                at += part.sums.shape[1]
        self._places = on_device(np.concatenate(places), device)

    @property
    def total(self) -> Tensor:
        """float32 `[n]`, of one choice's tokens after the other's."""
        return torch.cat([part.sums.flatten() for part in self._parts])[self._places]

    def add(self, q: Tensor, k_pages: Tensor, lse: Tensor, scores: Scores) -> None:
        """Add a layer's weights. `q` `[num_queries, num_q_heads, head_dim]`; `lse`
        `[num_rows, num_q_heads]`."""
        for part in self._parts:
            part.add(q, k_pages, lse, scores)


@dataclass(frozen=True, eq=False)
class _Part:
    """Runs of about the same length and the rows that see them, in few operations: arrays are
    filled up with their last value.

    Attributes:
        sums: float32 `[num_runs, num_tokens]`.
        filled: bool `[num_runs, num_rows]`: what is no row of its own.
        slots, places: int64 `[num_runs, num_tokens]`, of tokens, in memory and in the prompts.
        queries, rows, positions: int64 `[num_runs, num_rows]`, of rows.
    """

    sums: Tensor
    filled: Tensor
    slots: Tensor
    places: Tensor
    queries: Tensor
    rows: Tensor
    positions: Tensor

    @classmethod
    def of(cls, runs: Seq[tuple[np.ndarray, ...]], device: torch.device) -> _Part:
        slots, places, *of_rows = map(_filled, zip(*runs, strict=True))
        rows = np.array([len(one[2]) for one in runs])
        filled = np.arange(rows.max()) >= rows[:, None]
        tokens = on_device(np.stack((slots, places)), device)
        filled_up, *others = on_device(np.stack((filled, *of_rows)), device)
        sums = torch.zeros(tokens.shape[1:], device=device)
        return cls(sums, filled_up.bool(), *tokens, *others)

    def add(self, q: Tensor, k_pages: Tensor, lse: Tensor, scores: Scores) -> None:
        distance = None
        if scores.alibi_slopes is not None:
            distance = self.places[:, None] - self.positions[..., None]
        seen = lse[self.rows].masked_fill(self.filled[..., None], torch.inf)
        self.sums.add_(
            attended(q[self.queries], read_kv(k_pages, self.slots), seen, scores, distance)
        )


def _filled(arrays: Seq[np.ndarray]) -> np.ndarray:
    """int64 `[len(arrays), longest]`."""
    index = np.arange(max(map(len, arrays)))
    return np.array([one[np.minimum(index, len(one) - 1)] for one in arrays], np.int64)
