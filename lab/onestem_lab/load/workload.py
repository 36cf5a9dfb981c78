"""Workloads: seeded arrivals, prompt and answer lengths, system prompts.

No data set of conversations is needed: a benchmark asks for as many tokens as it wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from onestem.bench import Lengths, draw_length
from onestem.errors import ConfigError
from onestem_lab.lengths import DATA_SETS

__all__ = ["Ask", "Workload"]

# Streams of random numbers from one seed.
ARRIVALS, SYSTEMS, LENGTHS, QUESTION = 0, 1, 2, 3
MOST_SCALE = 1000  # of questions and answers
# Lower token ids are often special (padding, begin, end, bytes): a prompt has none of them.
FIRST_ID = 300
WORDS = (  # noqa: SIM905
    "the of and to in is that for it as was with be by on not he this are or his from at which but "
    "have an had they you were their one all we can her has there been if more when will would who "
    "so no out up into them then she time could only new some other also two may first any like"
).split()


@dataclass(frozen=True)
class Ask:
    """One request: `prompt` is token ids, or text for the server to tokenise."""

    index: int
    app: int
    system: list[int] | str
    question: list[int] | str
    output_tokens: int

    @property
    def prompt(self) -> list[int] | str:
        if isinstance(self.system, str):
            return f"{self.system} {self.question}"
        return [*self.system, *self.question]


@dataclass(frozen=True)
class Workload:
    """Requests of `apps` applications; request i of a run is a function of the seed, i and the run.

    Runs differ only in the words of the questions, so that no run is answered from what a prefix
    cache kept of an earlier one. Arrivals, lengths and system prompts are the same in all.

    Attributes:
        system_tokens: tokens of each application's system prompt (words, with `text`).
        question, answer: lengths of a request's own text and of its sampled tokens.
        scale: factor of both; system prompts keep their length.
        vocab_size: ids are drawn from 300..vocab_size - 1.
        text: prompts of common words instead of token ids, about a token each.
        systems: texts of the applications' system prompts, instead of drawn ones.
    """

    seed: int = 0
    apps: int = 1
    system_tokens: int = 2048
    question: Lengths = DATA_SETS["sharegpt"]["question"]
    answer: Lengths = DATA_SETS["sharegpt"]["answer"]
    scale: float = 1.0
    vocab_size: int = 32000
    text: bool = False
    systems: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("apps", self.apps, 1),
            ("system-tokens", self.system_tokens, 0),
            ("vocab-size", self.vocab_size, FIRST_ID + 2),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}, expected at least {least}")
        if not 0 < self.scale <= MOST_SCALE:
            raise ConfigError(f"scale is {self.scale}, expected above 0, up to {MOST_SCALE}")

    def arrivals(self, rate: float, count: int) -> np.ndarray:
        """Seconds of `count` arrivals of a Poisson process; another rate only stretches them."""
        gaps = np.random.default_rng((self.seed, ARRIVALS)).exponential(size=count)
        return np.asarray(np.cumsum(gaps) / rate)

    def count_within(self, rate: float, seconds: float) -> int:
        """How many arrive within some seconds, at least one."""
        many = int(rate * seconds + 10 * (rate * seconds) ** 0.5) + 10
        return max(1, int(np.searchsorted(self.arrivals(rate, many), seconds, side="right")))

    def ask(self, index: int, run: int = 0) -> Ask:
        """Request number `index`, from 0, of a run."""
        rng = np.random.default_rng((self.seed, LENGTHS, index))
        app = int(rng.integers(self.apps))
        question, answer = (self._scaled(lengths, rng) for lengths in (self.question, self.answer))
        words = np.random.default_rng((self.seed, QUESTION, run, index))
        return Ask(index, app, self._systems[app], self._draw(words, question), answer)

    def warm_up(self, app: int, run: int = 0) -> Ask:
        """A short request of an application, other than the measured ones."""
        rng = np.random.default_rng((self.seed, QUESTION, run, 2**31 + app))
        return Ask(-1 - app, app, self._systems[app], self._draw(rng, 16), 8)

    @cached_property
    def _systems(self) -> list[list[int] | str]:
        if self.systems:
            return list(self.systems)
        rngs = (np.random.default_rng((self.seed, SYSTEMS, app)) for app in range(self.apps))
        return [self._draw(rng, self.system_tokens) for rng in rngs]

    def _scaled(self, lengths: Lengths, rng: np.random.Generator) -> int:
        return max(1, round(draw_length(lengths, rng) * self.scale))

    def _draw(self, rng: np.random.Generator, count: int) -> list[int] | str:
        if self.text:
            return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), count))
        return [int(token) for token in rng.integers(FIRST_ID, self.vocab_size, count)]
