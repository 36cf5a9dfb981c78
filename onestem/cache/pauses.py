"""How long runs are idle before they are used again, as far as it is known."""

from __future__ import annotations

import numpy as np

AGES = np.array([0.0, *(2.0**i for i in range(-6, 5))])  # turnovers
MEMORY = 4.0  # turnovers after which an observation counts half: there are few of each age
UNKNOWN = 1 / 16  # turnovers of all pages for which a guess counts beside what was seen
CLEARLY = 2.0  # how much less likely a use of a younger run must be than of an older one


class Pauses:
    """Of idle pages of one kind: how often they are used, by how long they have been idle.

    Attributes:
        used: for each of `AGES`, pages that were used after they had been idle for so long.
        waited: turnovers that pages were idle beyond that age, until they were used or evicted.
    """

    def __init__(self) -> None:
        self.used, self.waited = np.zeros(len(AGES)), np.zeros(len(AGES))

    def note(self, pages: int, age: float, *, used: bool) -> None:
        """Note that pages were used or evicted at an age, in turnovers."""
        self.used += pages * used * (age >= AGES)
        self.waited += pages * np.maximum(age - AGES, 0.0)

    def rate(self, age: float, guess: float, weight: float) -> float:
        """Uses per page and turnover of what has been idle for that long.

        Args:
            guess: what it is at age 0, and half of it at each further one, as far as too little was
                seen.
            weight: turnovers of pages for which the guess counts.
        """
        known = int(np.searchsorted(AGES, max(age, 0.0), "right"))
        rate = 2 * guess
        for used, waited in zip(
            self.used[:known].tolist(), self.waited[:known].tolist(), strict=True
        ):
            rate = (used + weight * rate / 2) / (waited + weight)
        return rate

    def fade(self, turnovers: float) -> None:
        """Let what was seen so far weigh less, after that time."""
        for seen in (self.used, self.waited):
            seen *= 2 ** (-turnovers / MEMORY)


class BothPauses:
    """Those of first prompts (0), and of later turns of conversations (1)."""

    def __init__(self) -> None:
        self._each = Pauses(), Pauses()

    def note(self, kind: int, pages: int, age: float, *, used: bool) -> None:
        """See `Pauses`."""
        self._each[kind].note(pages, age, used=used)

    def rate(self, kind: int, age: float, available: int) -> float:
        """Uses per page and turnover of what has been idle for that long; `available`: pages that
        may be evicted."""
        weight = UNKNOWN * max(1, available)
        used = sum(one.used[0] for one in self._each)
        waited = sum(one.waited[0] for one in self._each)
        guess = float(used + 1) / (float(waited) + weight)
        return self._each[kind].rate(age, guess, weight)

    def fade(self, turnovers: float) -> None:
        """See `Pauses`."""
        for pauses in self._each:
            pauses.fade(turnovers)
