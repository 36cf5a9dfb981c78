"""The order in which the fields of a prompt are shared most.

Prompts of one template are rows of fields. Two rows share the fields before the first one in which
they differ; what follows is not shared, even if equal. So the order decides. A field costs its
length once for each distinct combination of it and the fields before it, whatever their own order.
(Liu et al. 2024, "Optimizing LLM Queries in Relational Data Analytics Workloads", have the problem;
they reorder the fields of each row, here one order serves all.)
"""

from __future__ import annotations

from functools import cache

import numpy as np

from onestem.planner.sort import IntArray

MOST_FIELDS = 8  # up to these all orders are compared; of more, one: by distinct values
MOST_ROWS = 20_000  # that are looked at
INVERSION_COST = 1 / 500  # of all text: two fields trade places only for more


def best_order(values: IntArray, lengths: IntArray, last: int = 0) -> list[int]:
    """The order of fields that costs least; none moves for less than `INVERSION_COST`.

    Args:
        values: `[num_fields, num_rows]` equal numbers where the texts are equal.
        lengths: `[num_fields, num_rows]` of the texts, in any unit.
        last: number of fields that stay where they are, at the end.
    """
    count = len(values) - last
    step = -(-values.shape[1] // MOST_ROWS)
    values, lengths = values[:count, ::step], lengths[:count, ::step]
    penalty = lengths.sum() * INVERSION_COST
    tail = list(range(count, count + last))
    if count > MOST_FIELDS:
        distinct = [len(np.unique(row)) for row in values]
        order = sorted(range(count), key=lambda field: distinct[field])
        moved = sum(costs_in(values, lengths, order)) + penalty
        as_it_is = list(range(count))
        return (order if moved < sum(costs_in(values, lengths, as_it_is)) else as_it_is) + tail
    added = _Costs(values, lengths)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for chosen in range(1, 1 << count):
        ways = []
        for field in range(count):
            if chosen >> field & 1:
                before = chosen & ~(1 << field)
                overtaken = (~before & ((1 << field) - 1)).bit_count()
                cost, order = best[before]
                ways.append((cost + added(before, field) + penalty * overtaken, [*order, field]))
        best[chosen] = min(ways)
    return best[(1 << count) - 1][1] + tail


def costs_in(values: IntArray, lengths: IntArray, order: list[int]) -> list[float]:
    """`[num_fields]` what each field costs in an order; arguments as of `best_order`."""
    added, chosen = _Costs(values, lengths), 0
    costs = [0.0] * len(order)
    for field in order:
        costs[field] = added(chosen, field)
        chosen |= 1 << field
    return costs


class _Costs:
    """Costs of a field that follows a set of fields, given as a bit each."""

    def __init__(self, values: IntArray, lengths: IntArray) -> None:
        self._values = [np.unique(row, return_inverse=True)[1].astype(np.int64) for row in values]
        self._lengths = lengths
        self._rows_of = cache(self._found)

    def __call__(self, before: int, field: int) -> float:
        _, firsts = self._rows_of(before | 1 << field)
        return float(self._lengths[field][firsts].sum())

    def _found(self, chosen: int) -> tuple[IntArray, IntArray]:
        """`[num_rows]` number of each row's combination, and `[num_combinations]` a row of each."""
        if not chosen:
            return np.zeros(self._lengths.shape[1], np.int64), np.zeros(1, np.int64)
        field = chosen.bit_length() - 1
        rest, _ = self._rows_of(chosen & ~(1 << field))
        both = rest * (int(self._values[field].max()) + 1) + self._values[field]
        _, firsts, number = np.unique(both, return_index=True, return_inverse=True)
        return number.astype(np.int64), firsts
