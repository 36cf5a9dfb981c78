"""Search for the largest rate that holds: bracket it by factors, then bisect."""

from __future__ import annotations

import math

from onestem.errors import ConfigError

__all__ = ["RateSearch"]


class RateSearch:
    """Proposes rates until the highest that held and the lowest that failed are `resolution` apart
    (0.05: 5%). Until there are both, rates change by `factor`.

    `next_rate` is None once the search has ended; `record` takes a proposed rate's result. `best`
    is then the highest rate that held; None where not even `least` did.
    """

    def __init__(
        self,
        start: float = 1.0,
        *,
        resolution: float = 0.05,
        factor: float = 2.0,
        least: float = 0.01,
        most: float = 1e4,
    ) -> None:
        if not least <= start <= most:
            raise ConfigError(f"start-rate is {start}, expected {least} to {most}")
        if not 0 < resolution < math.inf:
            raise ConfigError(f"resolution is {resolution}, expected a number above 0")
        if factor <= 1:
            raise ConfigError(f"factor is {factor}, expected a number above 1")
        self._factor = factor
        self.best: float | None = None
        self.worst: float | None = None
        self.resolution = resolution
        self._start, self._least, self._most = start, least, most

    def next_rate(self) -> float | None:
        if self.best is None and self.worst is None:
            return self._start
        if self.best is None:
            assert self.worst is not None
            return max(self.worst / self._factor, self._least) if self.worst > self._least else None
        if self.worst is None:
            return min(self.best * self._factor, self._most) if self.best < self._most else None
        if self.worst <= self.best * (1 + self.resolution):
            return None
        return float((self.best * self.worst) ** 0.5)

    def record(self, rate: float, held: bool) -> None:
        if held:
            self.best = rate
        else:
            self.worst = rate
