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
from onestem.ops.kv import read_kv, slot_index


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
            place, end = one.position + one.begin, one.position + one.in_use
            total[place:end] += part[at : at + end - place]
            at += end - place

    @property
    def num_seen(self) -> int:
        """Tokens that they see of documents."""
        return sum(one.in_use - one.begin for one in self.seen)


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
        moved = {(int(row), int(shift)): i for i, (row, shift) in enumerate(plan.moved)}
        self._parts: list[tuple[Tensor, Tensor, Tensor | slice, Tensor]] = []
        for one in choices:
            rows = np.arange(one.first, one.first + one.rows)
            for run in one.seen:
                queries = rows
                if run.shift:
                    queries = np.array([moved[row, run.shift] for row in rows.tolist()])
                    queries = queries + plan.num_rows
                slots = run.run.slots(run.begin, run.in_use)
                place = np.arange(run.position + run.begin, run.position + run.in_use)
                distance = place - plan.row_position[rows].astype(np.int64)[:, None]
                self._parts.append(
                    (
                        torch.from_numpy(queries).to(device),
                        torch.from_numpy(rows).to(device),
                        slot_index(slots, device),
                        torch.from_numpy(distance).to(device),
                    )
                )
        self.total = torch.zeros(sum(one.num_seen for one in choices), device=device)

    def add(self, q: Tensor, k_pages: Tensor, lse: Tensor, scores: Scores) -> None:
        """Add a layer's weights. `q` `[num_queries, num_q_heads, head_dim]`; `lse`
        `[num_rows, num_q_heads]`."""
        at = 0
        for queries, rows, slots, distance in self._parts:
            part = attended(q[queries], read_kv(k_pages, slots), lse[rows], scores, distance)
            self.total[at : at + len(part)] += part
            at += len(part)
