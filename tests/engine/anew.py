"""The oracle of the order of rows: all of it made anew from the sequences."""

from __future__ import annotations

from onestem.engine.engine import Engine
from onestem.engine.step.order import Order
from onestem.ops.reference import visible


def watched(engine: Engine) -> list[int]:
    """Have each step's rows compared with rows made anew; the number of rows of each step. The
    engine takes an assertion for a step that failed, which the tests' own fixture sees."""
    apply, sizes = engine.order.apply, []

    def checked(edits):
        apply(edits)
        sizes.append(len(engine.order))
        compare(engine)

    engine.order.apply = checked
    return sizes


def compare(engine: Engine) -> None:
    """Each row sees the same keys as in rows made anew, and stands and writes in the same place."""
    order = engine.order
    anew = Order(engine.cache, order.slots, windows=(None,), share=order._share)
    anew._put([sequence for sequence in order.sequences if sequence is not None])
    assert sorted(anew.rows.slot.tolist()) == sorted(order.rows.slot.tolist())
    plan = anew.inputs.plans[None]
    other = {slot: row for row, slot in enumerate(anew.rows.slot.tolist())}
    window = next(iter(order.inputs.plans))
    for row, slot in enumerate(order.rows.slot.tolist()):
        mine, theirs = visible(order.inputs.plans[window], row), visible(plan, other[slot])
        if window is None:
            assert _keys(mine) == _keys(theirs)
        assert order.inputs.positions[row] == anew.inputs.positions[other[slot]]
        assert order.inputs.slots[row] == anew.inputs.slots[other[slot]]


def _keys(seen) -> list[tuple[int, int]]:
    slots, positions = seen
    return sorted(zip(positions.tolist(), slots.tolist(), strict=True))
