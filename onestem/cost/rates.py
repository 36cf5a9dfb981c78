"""The rates of a device: of products by their rows, of memory, and of the host."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError

DEVICES = Path(__file__).parent / "devices"
CURVES = ("linear", "attention", "head")


@dataclass(frozen=True)
class Curve:
    """Rates of products of some rows with a matrix that is read once.

    Time is linear between two numbers of rows. Below the first it is that of the first; above the
    last the rate stays.

    Attributes:
        rows: rising numbers of rows.
        flops: FLOP/s with each.
        bytes: bytes/s at which the matrix is read at best.
    """

    rows: tuple[int, ...]
    flops: tuple[float, ...]
    bytes: float

    def __post_init__(self) -> None:
        rates = (*self.flops, self.bytes)
        if not self.rows or len(self.rows) != len(self.flops) or min(rates) <= 0:
            raise ConfigError("rates: expected as many rows as FLOP/s, one at least, all above 0")
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"rates: rows are {list(self.rows)}, expected rising numbers from 1")

    def seconds(self, flops_per_row: float, num_bytes: float, rows: float) -> float:
        """Seconds of one product: the longer of its FLOPs and its bytes."""
        return max(flops_per_row * self._row_seconds(rows), num_bytes / self.bytes)

    def _row_seconds(self, rows: float) -> float:
        """Seconds of `rows` rows with one FLOP each."""
        at = bisect_right(self.rows, rows)
        if at == 0:
            return self.rows[0] / self.flops[0]
        if at == len(self.rows):
            return rows / self.flops[-1]
        low, high = (self.rows[i] / self.flops[i] for i in (at - 1, at))
        part = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return low + part * (high - low)


@dataclass(frozen=True)
class Rates:
    """Rates of one device with one dtype.

    Attributes:
        device: its name.
        source: where the figures come from.
        dtype: of weights, keys and values.
        linear: the layers' products, by rows of the step.
        attention: walks over a run's keys and values, by query heads for each KV head (rows that
            see the run times heads that share a KV head).
        head: the head's product with its draws, by rows that sample.
        walk_seconds: of a decode in each layer, besides the bytes that it moves.
        call_seconds: of a layer's attention, whatever it sees.
        step_seconds, row_seconds, token_seconds, request_seconds: of the host, for a step, a row
            that decodes, a prompt's token, and a request from its admission to its output.
        overlaps: the host works while the device computes the step before.
        step_tokens: rows of a full step.
        memory_bytes: of the device; 0: unknown.
    """

    device: str
    source: str
    dtype: str
    linear: Curve
    attention: Curve
    head: Curve
    walk_seconds: float = 0.0
    call_seconds: float = 0.0
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    token_seconds: float = 0.0
    request_seconds: float = 0.0
    overlaps: bool = False
    step_tokens: int = 1024
    memory_bytes: int = 0

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Rates:
        """The rates of which `asdict` made `values`."""
        curves = {
            name: Curve(tuple(one["rows"]), tuple(one["flops"]), one["bytes"])
            for name in CURVES
            for one in (values[name],)
        }
        return Rates(**{**values, **curves})


def named_devices() -> tuple[str, ...]:
    """Devices whose rates come with the package."""
    return tuple(sorted(file.stem for file in DEVICES.glob("*.json")))


def named_rates(name: str) -> Rates:
    """The rates of one of `named_devices`.

    Raises:
        ConfigError: no device has this name.
    """
    if name not in named_devices():
        known = ", ".join(named_devices())
        raise ConfigError(f"no rates are known of a device {name!r}, expected one of: {known}")
    return Rates.from_dict(json.loads((DEVICES / f"{name}.json").read_text()))
