"""Orders: lists of parts that leave the stock together or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from .items import Item
from .stock import OutOfStock, Stock


@dataclass
class Order:
    """What one customer wants. `open` until its parts were taken from the stock."""

    customer: str
    lines: list[tuple[Item, int]] = field(default_factory=list)
    open: bool = True

    def add(self, item: Item, many: int) -> None:
        """One more line; closed orders cannot grow."""
        if not self.open:
            raise ValueError(f"order of {self.customer} is closed: make a new one")
        self.lines.append((item, many))

    def cents(self) -> int:
        """Price of all lines."""
        return sum(item.cents * many for item, many in self.lines)


def fulfil(order: Order, stock: Stock) -> None:
    """Take every line's parts; if one is missing, put back what was taken and raise."""
    taken: list[tuple[Item, int]] = []
    try:
        for item, many in order.lines:
            stock.take(item, many)
            taken.append((item, many))
    except OutOfStock:
        for item, many in taken:
            stock.put(item, many)
        raise
    order.open = False
