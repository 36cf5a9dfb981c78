"""What can be stored: parts with a number, a name and a price in cents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Item:
    """A part. Numbers are unique; prices are whole cents, so that sums are exact."""

    number: int
    name: str
    cents: int

    def __post_init__(self) -> None:
        if self.number <= 0:
            raise ValueError(f"number is {self.number}, expected a positive one")
        if self.cents < 0:
            raise ValueError(f"{self.name} costs {self.cents} cents, expected 0 or more")


def parse_item(line: str) -> Item:
    """An item from a line such as `17;hinge;250`."""
    number, name, cents = line.strip().split(";")
    return Item(int(number), name, int(cents))
