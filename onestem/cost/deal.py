"""Costs of a plan's requests, for dealing them to replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onestem.cost.step import StepCost
from onestem.cost.work import IntArray, Limits, Work
from onestem.planner import JobPlan
from onestem.planner.deal import Costs


@dataclass(frozen=True)
class Weights:
    """Seconds of a token in full steps.

    Attributes:
        prompt: for each prompt token computed.
        sampled: for each token sampled.
        context: for each token sampled, times the tokens that only this request's prompt has.
    """

    prompt: float
    sampled: float
    context: float

    @staticmethod
    def of(cost: StepCost, limits: Limits, work: Work) -> Weights:
        """Weights on a device, with as many decodes in a step as memory holds."""
        held = work.own() + work.outputs * work.answers / 2
        rows = limits.kv_tokens * work.answers.sum() / max(1.0, float(held.sum()))
        rows = min(max(1.0, rows), float(limits.step_tokens), float(work.answers.sum()))
        full = limits.step_tokens
        linear = cost.linear(cost.shape.prompt_share * full)
        prompt = cost.step(linear, cost.host(0, full, 0)) / full
        decode = cost.step(cost.linear(rows) + cost.sampling(rows), cost.host(rows, 0, 0)) / rows
        return Weights(prompt, decode, cost.walk(1))


TOKENS = Weights(1.0, 1.0, 0.0)
"""The weights if no rates are known."""


def deal_costs(plan: JobPlan, positions: IntArray, weights: Weights) -> Costs:
    """Costs of some requests of a plan.

    Args:
        positions: their places in the plan's order, rising.
    """
    work = Work.of(plan, plan.output_tokens)
    if len(positions) < len(plan.order):
        work = work.part(positions)
    own, opened = work.own(), work.opened()
    group = plan.group_of[plan.order[positions]]
    starts = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    sampled = work.outputs * (weights.sampled + weights.context * own)
    return Costs(
        cost=(weights.prompt * (own + opened) + sampled).astype(np.float64),
        again=weights.prompt * (work.tree.lengths - own - opened).astype(np.float64),
        starts=starts.astype(np.int64),
    )
