"""Attention over a plan in float64, row by row: the slow definition of what is correct."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onestem.ops.kv import read_kv
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state import State, empty_state


@dataclass(frozen=True)
class ReferenceAttention:
    """Gathers each row's keys and computes a softmax over them in float64."""

    name: str = "reference"
    deterministic = False

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        return False

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedReference:
        return PreparedReference(plan, [visible(plan, row) for row in range(plan.num_rows)])


@dataclass(frozen=True)
class PreparedReference:
    plan: AttentionPlan
    keys: list[tuple[np.ndarray, np.ndarray]]  # per row: slots, positions

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """See `ops.attention`; `out` and `lse` are float64."""
        num_rows, num_heads, head_dim = q.shape
        state = empty_state(num_rows, num_heads, head_dim, device=q.device, dtype=torch.float64)
        for row, (slots, positions) in enumerate(self.keys):
            if len(slots) == 0:
                continue
            index = torch.from_numpy(slots).to(q.device)
            k = _per_q_head(read_kv(k_pages, index), num_heads)  # [num_heads, keys, head_dim]
            v = _per_q_head(read_kv(v_pages, index), num_heads)
            score = torch.einsum("hd,hkd->hk", q[row].double(), k)
            score *= scores.factor(head_dim)
            if scores.softcap is not None:
                score = scores.softcap * torch.tanh(score / scores.softcap)
            if scores.alibi_slopes is not None:
                distance = torch.from_numpy(positions).to(q.device) - int(
                    self.plan.row_position[row]
                )
                score = score + scores.alibi_slopes.double()[:, None] * distance
            state.lse[row] = torch.logsumexp(score, -1)
            state.out[row] = torch.einsum("hk,hkd->hd", torch.softmax(score, -1), v)
        return state


def visible(plan: AttentionPlan, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions (int64) of every key that a row sees."""
    slots: list[np.ndarray] = [np.zeros(0, np.int64)]
    positions: list[np.ndarray] = [np.zeros(0, np.int64)]
    for start, rows, run, first, end, step in plan.spans.tolist():
        j = row - start
        if 0 <= j < rows:
            last = max(end + j * step, first)
            slots.append(plan.slots(run, first, last))
            positions.append(plan.positions(run, first, last))
    every_slot, every_position = np.concatenate(slots), np.concatenate(positions)
    if plan.window is None:
        return every_slot, every_position
    near = int(plan.row_position[row]) - every_position < plan.window
    return every_slot[near], every_position[near]


def _per_q_head(values: Tensor, num_heads: int) -> Tensor:
    group = num_heads // values.shape[1]
    return values.double().transpose(0, 1).repeat_interleave(group, 0)
