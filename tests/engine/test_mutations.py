"""Faults that the exactness tests must see: each is put in on purpose, and the check must fail."""

from __future__ import annotations

import dataclasses

import pytest

from onestem.engine.step.batch_rows import BatchRows
from onestem.errors import OnestemError
from onestem.ops.plan import END, FIRST, RUN, STEP
from tests.engine.harness import check


def _plans(inputs, change):
    plans = {window: change(plan) for window, plan in inputs.plans.items()}
    return dataclasses.replace(inputs, plans=plans)


def _spans(change):
    def mutate(inputs):
        def one(plan):
            spans = plan.spans.copy()
            return dataclasses.replace(plan, spans=change(plan, spans))

        return _plans(inputs, one)

    return mutate


def mask_hides_last(plan, spans):
    """Off by one: a causal row does not see itself."""
    spans[(spans[:, STEP] == 1) & (spans[:, END] > 1), END] -= 1
    return spans


def mask_hides_first(plan, spans):
    """Off by one at the other end, in shared runs only."""
    spans[(spans[:, STEP] == 0) & (spans[:, END] > 1), FIRST] = 1
    return spans


def shared_end_short(plan, spans):
    shared = (spans[:, STEP] == 0) & (spans[:, END] > 1)
    spans[shared, END] -= 1
    return spans


def run_dropped(plan, spans):
    return spans[spans[:, RUN] != 0] if (spans[:, RUN] != 0).any() else spans


def pages_swapped(inputs):
    def one(plan):
        pages = plan.run_pages.copy()
        if len(pages) > 2:
            pages[[0, -1]] = pages[[-1, 0]]
        return dataclasses.replace(plan, run_pages=pages)

    return _plans(inputs, one)


def offset_ignored(inputs):
    def one(plan):
        runs = plan.runs.copy()
        runs[:, 1] = 0
        return dataclasses.replace(plan, runs=runs)

    return _plans(inputs, one)


def window_off_by_one(inputs):
    def one(plan):
        if plan.window is None:
            return plan
        return dataclasses.replace(plan, window=plan.window - 1)

    return _plans(inputs, one)


def position_shifted(inputs):
    """RoPE positions of every row but the first of each sequence's are one too high."""
    return dataclasses.replace(inputs, positions=inputs.positions + (inputs.positions > 30))


def run_position_shifted(inputs):
    """What ALiBi goes by: every run but the first stands one position further."""

    def one(plan):
        runs = plan.runs.copy()
        runs[1:, 3] += 1
        return dataclasses.replace(plan, runs=runs)

    return _plans(inputs, one)


def slot_shifted(inputs):
    """The last row of a step writes its K and V over its neighbour's."""
    slots = inputs.slots.copy()
    if len(slots) > 1:
        slots[-1] = slots[-2]
    return dataclasses.replace(inputs, slots=slots)


MUTATIONS = {
    **{
        f.__name__: _spans(f)
        for f in (mask_hides_last, mask_hides_first, shared_end_short, run_dropped)
    },
    **{f.__name__: f for f in (pages_swapped, offset_ignored, position_shifted, slot_shifted)},
}

OF_SOME = {"window": window_off_by_one, "run_position_shifted": run_position_shifted}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in ("llama", "mistral") for name in MUTATIONS),
        ("mistral", "window"),
        ("gpt2", "position_shifted"),
        ("mpt", "run_position_shifted"),
        ("falcon_rw", "run_position_shifted"),
    ],
)
def test_the_exactness_check_sees(tiny, expected, monkeypatch, family, name):
    mutate_steps(monkeypatch, {**MUTATIONS, **OF_SOME}[name])
    with pytest.raises((AssertionError, OnestemError)):
        check(tiny(family), expected(family), max_step_tokens=48)


def mutate_steps(monkeypatch, mutate):
    """Change what each step is."""
    apply = BatchRows.apply

    def mutated(self, changes):
        apply(self, changes)
        self.inputs, self.change = mutate(self.inputs), None

    monkeypatch.setattr(BatchRows, "apply", mutated)


def test_without_a_mutation_it_passes(tiny, expected, monkeypatch):
    mutate_steps(monkeypatch, lambda inputs: inputs)
    check(tiny("llama"), expected("llama"), max_step_tokens=48)
