"""How many of each part are there, and who may take them."""

from __future__ import annotations

from collections import Counter

from .items import Item


class OutOfStock(Exception):
    """Fewer parts are there than were asked for."""


class Stock:
    """Counts of items. A count never falls below zero."""

    def __init__(self) -> None:
        self._count: Counter[Item] = Counter()

    def put(self, item: Item, many: int = 1) -> None:
        """Add parts."""
        if many < 1:
            raise ValueError(f"many is {many}, expected 1 or more")
        self._count[item] += many

    def take(self, item: Item, many: int = 1) -> None:
        """Remove parts, or raise and change nothing."""
        if self._count[item] < many:
            raise OutOfStock(f"{item.name}: {many} wanted, {self._count[item]} there")
        self._count[item] -= many

    def value(self) -> int:
        """What all parts together cost, in cents."""
        return sum(item.cents * many for item, many in self._count.items())
