"""The oracle of the order of rows: all of it made anew from the sequences."""

from __future__ import annotations

from onestem.engine.engine import Engine
from onestem.engine.step.batch_rows import BatchRows
from onestem.ops.reference import visible


def watched(engine: Engine) -> list[int]:
    """Have each step's rows compared with rows made anew; the number of rows of each step. The
    engine takes an assertion for a step that failed, which the tests' own fixture sees."""
    apply, sizes = engine.batch_rows.apply, []

    def checked(changes):
        apply(changes)
        sizes.append(len(engine.batch_rows))
        compare(engine)

    engine.batch_rows.apply = checked
    return sizes


def compare(engine: Engine) -> None:
    """Each row sees the same keys as in rows made anew, and stands and writes in the same place."""
    batch_rows = engine.batch_rows
    anew = BatchRows(engine.cache, batch_rows.table, windows=(None,), share=batch_rows.share)
    anew.rebuild([sequence for sequence in batch_rows.sequences if sequence is not None])
    assert sorted(anew.rows.sid.tolist()) == sorted(batch_rows.rows.sid.tolist())
    plan = anew.inputs.plans[None]
    other = {sid: row for row, sid in enumerate(anew.rows.sid.tolist())}
    window = next(iter(batch_rows.inputs.plans))
    for row, sid in enumerate(batch_rows.rows.sid.tolist()):
        mine, theirs = visible(batch_rows.inputs.plans[window], row), visible(plan, other[sid])
        if window is None:
            assert _keys(mine) == _keys(theirs)
        assert batch_rows.inputs.positions[row] == anew.inputs.positions[other[sid]]
        assert batch_rows.inputs.slots[row] == anew.inputs.slots[other[sid]]


def _keys(seen) -> list[tuple[int, int]]:
    slots, positions = seen
    return sorted(zip(positions.tolist(), slots.tolist(), strict=True))
