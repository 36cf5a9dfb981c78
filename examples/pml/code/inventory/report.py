"""A page of text about stock and orders."""

from __future__ import annotations

from collections.abc import Iterable

from .orders import Order
from .stock import Stock


def euros(cents: int) -> str:
    """An amount as people write it."""
    return f"{cents // 100}.{cents % 100:02d}"


def report(stock: Stock, orders: Iterable[Order]) -> str:
    """Value of the stock, then a line per order, open ones first."""
    lines = [f"stock is worth {euros(stock.value())}"]
    for order in sorted(orders, key=lambda order: (not order.open, order.customer)):
        state = "open" if order.open else "done"
        lines.append(f"{order.customer}: {euros(order.cents())} ({state})")
    return "\n".join(lines)
