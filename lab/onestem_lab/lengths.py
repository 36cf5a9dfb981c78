"""Token counts of synthetic requests: numbers, or distributions that a seed draws from.

`parse_lengths` reads what an option says:

* `200`: the same for all.
* `uniform:A..B`: each number from A to B equally likely.
* `poisson:MEAN`: around a base value, as BatchLLM perturbs its lengths (figure 6e).
* `pareto:ALPHA:A..B` or `pareto:ALPHA:MEDIAN:A..B`: a heavy tail, as in BatchLLM's section 4.2.3.
* `lognormal:MEDIAN:SIGMA:A..B`: the long tail of chats.
* `sharegpt`, `mmlu`, `apps`, `longbench`: what is published of these data sets (`DATA_SETS`).
* `file:PATH`: the counts of a file, one a line, each line equally likely.

Draws depend on the generator alone, so a seed gives the same lengths everywhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from onestem.bench import FEWEST, MOST_TOKENS, Distribution, Lengths, Part
from onestem.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DATA_SETS",
    "FORMS",
    "Listed",
    "LogNormal",
    "Pareto",
    "Poisson",
    "Scaled",
    "Uniform",
    "length_files",
    "parse_lengths",
]

# Fields of a file's lines that are JSON objects.
FIELDS: Mapping[Part, str] = {
    "prefix": "prefix_tokens",
    "question": "prompt_tokens",
    "answer": "output_tokens",
}


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"its {name} is {value:g}, expected from {least:g} to {most:g}")


def _check_span(least: int, most: int) -> None:
    if not 0 <= least <= most <= MOST_TOKENS:
        raise ConfigError(f"expected numbers from 0 to {MOST_TOKENS}, the lower one first")


def _normal_cdf(score: float) -> float:
    return (1 + math.erf(score / 2**0.5)) / 2


# --------------------------------------------------------------------------- distributions


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check_span(self.least, self.most)

    def __str__(self) -> str:
        return f"uniform:{self.least}..{self.most}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.least, self.most, endpoint=True))


@dataclass(frozen=True)
class Poisson:
    """Poisson with this mean, drawn again where it is 0."""

    mean: float
    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check("mean", self.mean, 1, MOST_TOKENS)

    def __str__(self) -> str:
        return f"poisson:{self.mean:.12g}"

    def draw(self, rng: np.random.Generator) -> int:
        while True:
            count = int(rng.poisson(self.mean))
            if count:
                return count


@dataclass(frozen=True)
class Pareto:
    """`least` + scale * Lomax(`alpha`), rounded; what is longer than `most` counts as `most`.

    The scale is that of the median. Without one it is `least`, which is the textbook's Pareto
    distribution with its minimum there.

    BatchLLM (section 4.2.3) gives alpha 1.5, 10 to 512 tokens, and of its 320 draws the mean 51.2,
    the median 25 and the 99th percentile 509. The textbook's would have a mean of 27 and a median
    of 16. With the published median, `pareto:1.5:25:10..512`, the mean is 49.8 and the 99th
    percentile 512.
    """

    alpha: float
    median: float
    least: int
    most: int

    @staticmethod
    def textbook(alpha: float, least: int, most: int) -> Pareto:
        _check("alpha", alpha, 0.1, 100)
        return Pareto(alpha, least * 2 ** (1 / alpha), least, most)

    def __post_init__(self) -> None:
        _check_span(self.least, self.most)
        _check("alpha", self.alpha, 0.1, 100)
        if not self.least < self.median < self.most:
            raise ConfigError(
                f"its median is {self.median:g}, expected between {self.least} and {self.most}"
            )

    def __str__(self) -> str:
        return f"pareto:{self.alpha:.12g}:{self.median:.12g}:{self.least}..{self.most}"

    def draw(self, rng: np.random.Generator) -> int:
        scale = (self.median - self.least) / (2 ** (1 / self.alpha) - 1)
        return round(min(self.most, self.least + scale * float(rng.pareto(self.alpha))))


@dataclass(frozen=True)
class LogNormal:
    """exp(normal(ln median, sigma)), rounded, drawn again until `least`..`most`."""

    median: float
    sigma: float
    least: int
    most: int

    def __post_init__(self) -> None:
        _check_span(self.least, self.most)
        _check("median", self.median, 1, MOST_TOKENS)
        _check("sigma", self.sigma, 0.001, 10)
        below = [_normal_cdf(self._score(edge)) for edge in (self.least - 0.5, self.most + 0.5)]
        if below[1] - below[0] < 0.01:
            raise ConfigError(
                f"less than one in a hundred draws lies in {self.least}..{self.most}: widen it"
            )

    def __str__(self) -> str:
        return f"lognormal:{self.median:.12g}:{self.sigma:.12g}:{self.least}..{self.most}"

    def draw(self, rng: np.random.Generator) -> int:
        while True:
            count = round(self.median * math.exp(self.sigma * rng.standard_normal()))
            if self.least <= count <= self.most:
                return count

    def _score(self, count: float) -> float:
        """How many sigmas a count is above the median."""
        return math.log(max(count, 0.5) / self.median) / self.sigma


@dataclass(frozen=True)
class Listed:
    """Given counts, each equally likely.

    Attributes:
        name: what an option calls them.
    """

    name: str
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def least(self) -> int:
        return min(self.counts)

    def draw(self, rng: np.random.Generator) -> int:
        return self.counts[int(rng.integers(len(self.counts)))]


@dataclass(frozen=True)
class Scaled:
    """Another distribution's counts times a factor, rounded, at least 1."""

    drawn: Distribution
    factor: float

    def __str__(self) -> str:
        return f"{self.factor:g} x {self.drawn}"

    @property
    def least(self) -> int:
        return max(1, round(self.factor * self.drawn.least))

    def draw(self, rng: np.random.Generator) -> int:
        return max(1, round(self.factor * self.drawn.draw(rng)))


# ------------------------------------------------------------------------------- data sets

DATA_SETS: Mapping[str, Mapping[Part, Lengths]] = {
    "sharegpt": {
        "question": LogNormal(median=85, sigma=1.6, least=4, most=1024),
        "answer": LogNormal(median=230, sigma=1.0, least=4, most=2013),
    },
    "mmlu": {
        "prefix": LogNormal(median=1047, sigma=0.51, least=379, most=2895),
        "question": LogNormal(median=259, sigma=0.775, least=55, most=1219),
        "answer": 32,
    },
    "apps": {"prefix": 2400, "question": 391, "answer": 512},
    "longbench": {
        "prefix": LogNormal(median=4650, sigma=0.17, least=4000, most=10000),
        "answer": Listed("longbench", (128, 128, 64, 32, 32, 32, 512, 512, 512, 32, 32, 32)),
    },
}
"""What is published of data sets' lengths, and what we assume where nothing is.

* `sharegpt`: bounds of RelayAttention, table 1. Means 161 and 338, as PagedAttention (Kwon et al.
  2023, section 6.1) reports. Assumed: log-normal, with our sigmas for its long tails; the medians
  follow from means, sigmas and bounds. It has no prefixes: RelayAttention makes up its own.
* `mmlu`: few-shot prompts, questions and 32 sampled tokens of RelayAttention, table 1, which gives
  only bounds. Assumed: log-normal, with the bounds two sigmas from the median on either side.
* `apps`: two-shot prompt and 512 sampled tokens of Hydragen, appendix E.4. Problems have 293.2
  words on average (Hendrycks et al. 2021). Assumed: 4 tokens in 3 words, no spread.
* `longbench`: contexts of 4K to 10K tokens, 5K on average (Prompt Cache, sections 5.1 and 5.2.1).
  Assumed: log-normal. Answers: LongBench's own limits for the 12 tasks of Prompt Cache's table 3.

Nothing is published of the lengths of GSM8K's questions and prompts in Hydragen (table 1).
"""


# --------------------------------------------------------------------------------- parsing

_NUMBER = r"(\d{1,18}(?:\.\d{1,12})?(?:e\+?\d{1,2})?)"
_SPAN = r"(\d{1,9})\.\.(\d{1,9})"
_READERS: Mapping[str, Callable[..., Distribution]] = {
    rf"uniform:{_SPAN}": lambda a, b: Uniform(int(a), int(b)),
    rf"poisson:{_NUMBER}": lambda mean: Poisson(float(mean)),
    rf"pareto:{_NUMBER}:{_SPAN}": lambda alpha, a, b: Pareto.textbook(float(alpha), int(a), int(b)),
    rf"pareto:{_NUMBER}:{_NUMBER}:{_SPAN}": lambda alpha, median, a, b: Pareto(
        float(alpha), float(median), int(a), int(b)
    ),
    rf"lognormal:{_NUMBER}:{_NUMBER}:{_SPAN}": lambda median, sigma, a, b: LogNormal(
        float(median), float(sigma), int(a), int(b)
    ),
}
FORMS = (
    "a number, uniform:A..B, poisson:MEAN, pareto:ALPHA:A..B, pareto:ALPHA:MEDIAN:A..B, "
    f"lognormal:MEDIAN:SIGMA:A..B, {', '.join(DATA_SETS)}, or file:PATH"
)
"""What `parse_lengths` reads, for people."""


def parse_lengths(option: str, text: str, part: Part) -> Lengths:
    """What an option says of the lengths of a part of requests (see the module's docstring).

    Args:
        option: its name, for errors.

    Raises:
        ConfigError: one line that names the option.
    """
    try:
        lengths = _parsed(text, part)
        least = lengths if isinstance(lengths, int) else lengths.least
        if least < FEWEST[part]:
            raise ConfigError(f"expected at least {FEWEST[part]}")
    except ConfigError as error:
        raise ConfigError(f"{option} is {text!r}: {error}") from None
    return lengths


def length_files(options: Iterable[tuple[str, str]]) -> dict[str, Path]:
    """The files that options read (`file:PATH`), by what each is.

    Args:
        options: names and texts.
    """
    return {
        f"the file of lengths of {option}": Path(text.removeprefix("file:"))
        for option, text in options
        if text.startswith("file:")
    }


def _parsed(text: str, part: Part) -> Lengths:
    if re.fullmatch(r"-?\d{1,99}", text, re.ASCII):
        if int(text) > MOST_TOKENS:
            raise ConfigError(f"expected at most {MOST_TOKENS}")
        return int(text)
    if text in DATA_SETS:
        if part not in DATA_SETS[text]:
            raise ConfigError("nothing is published of these lengths: give a number")
        return DATA_SETS[text][part]
    if text.startswith("file:"):
        return Listed(text, _counts_of(Path(text.removeprefix("file:")), part))
    for form, read in _READERS.items():
        match = re.fullmatch(form, text, re.ASCII)
        if match:
            return read(*match.groups())
    raise ConfigError(f"expected {FORMS}")


def _counts_of(file: Path, part: Part) -> tuple[int, ...]:
    """The counts of a file whose lines are numbers, or JSON objects with that part's field."""
    try:
        text = file.read_text("utf-8").removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError("it is no text in UTF-8") from None
    if not text:
        raise ConfigError("it is empty, expected a count in each line")
    # Not `splitlines`: a JSON text may hold other separators.
    return tuple(_count_of(line, part, number) for number, line in enumerate(text.split("\n"), 1))


def _count_of(line: str, part: Part, number: int) -> int:
    value: Any
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    count = value.get(FIELDS[part]) if isinstance(value, dict) else value
    if type(count) is not int or not 0 <= count <= MOST_TOKENS:
        raise ConfigError(
            f"line {number} is {line[:40]!r}, expected a number of tokens, or an object with "
            f"{FIELDS[part]}"
        )
    return count
