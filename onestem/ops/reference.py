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
    takes_parts = True

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        return False

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedReference:
        return PreparedReference(plan, [visible(plan, query) for query in range(plan.num_queries)])


@dataclass(frozen=True)
class PreparedReference:
    plan: AttentionPlan
    keys: list[tuple[np.ndarray, np.ndarray]]  # per query: slots, positions

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """See `PreparedAttention`; `out` and `lse` are float64."""
        rows, (_, num_heads, head_dim) = self.plan.num_rows, q.shape
        state = empty_state(rows, num_heads, head_dim, device=q.device, dtype=torch.float64)
        queries = [[row] for row in range(rows)]
        for number, row in enumerate(self.plan.moved[:, 0].tolist()):
            queries[row].append(rows + number)
        for row, these in enumerate(queries):
            score = torch.cat([self._scores(one, q, k_pages, scores) for one in these], -1)
            if not score.shape[1]:
                continue
            slots = np.concatenate([self.keys[one][0] for one in these])
            v = _per_q_head(read_kv(v_pages, torch.from_numpy(slots).to(q.device)), num_heads)
            state.lse[row] = torch.logsumexp(score, -1)
            state.out[row] = torch.einsum("hk,hkd->hd", torch.softmax(score, -1), v)
        return state

    def _scores(self, query: int, q: Tensor, k_pages: Tensor, scores: Scores) -> Tensor:
        """float64 `[num_heads, keys]`: of all keys that a query sees."""
        _, num_heads, head_dim = q.shape
        slots, positions = self.keys[query]
        k = _per_q_head(read_kv(k_pages, torch.from_numpy(slots).to(q.device)), num_heads)
        score = torch.einsum("hd,hkd->hk", q[query].double(), k)
        score *= scores.factor(head_dim)
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if scores.alibi_slopes is None:
            return score
        distance = torch.from_numpy(positions).to(q.device) - int(self.plan.row_position[query])
        return score + scores.alibi_slopes.double()[:, None] * distance


def visible(plan: AttentionPlan, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions (int64) of every key that a query sees."""
    slots: list[np.ndarray] = [np.zeros(0, np.int64)]
    positions: list[np.ndarray] = [np.zeros(0, np.int64)]
    for start, rows, run, first, end, step in plan.spans.tolist():
        j = query - start
        if 0 <= j < rows:
            last = max(end + j * step, first)
            slots.append(plan.slots(run, first, last))
            positions.append(plan.positions(run, first, last))
    every_slot, every_position = np.concatenate(slots), np.concatenate(positions)
    if plan.window is None:
        return every_slot, every_position
    near = int(plan.row_position[query]) - every_position < plan.window
    return every_slot[near], every_position[near]


def _per_q_head(values: Tensor, num_heads: int) -> Tensor:
    group = num_heads // values.shape[1]
    return values.double().transpose(0, 1).repeat_interleave(group, 0)
