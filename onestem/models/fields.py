"""The fields of a JSON file; errors name the file, the field and what is expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError, UnsupportedError
from onestem.files import read_regular

LARGEST = 3.4e38  # float32, in which everything is computed


@dataclass(frozen=True)
class Fields:
    """A JSON object. A field that is null counts as absent."""

    values: Mapping[str, Any]
    source: Path | str

    def wrong(self, name: str, expected: str) -> ConfigError:
        """The error for a field that is missing or no such value."""
        given = repr(self.values[name]) if name in self.values else "missing"
        return ConfigError(f"{self.source}: {name} is {given}, expected {expected}")

    def unsupported(self, name: str, supported: str) -> UnsupportedError:
        """The error for a value that means something, but is not computed here."""
        return UnsupportedError(
            f"{self.source}: {name} is {self.values.get(name)!r}, supported: {supported}"
        )

    def refuse_others(self, **supported: object) -> None:
        """Refuse fields with another value than the one given here, which is the one computed."""
        for name, value in supported.items():
            if self.values.get(name) not in (None, value):
                raise self.unsupported(name, repr(value))

    def one_of(self, name: str, *known: str, default: str | None = None) -> Any:
        """One of the known values; `default` where the field is absent. Raises `UnsupportedError`
        for another value."""
        value = self.values.get(name)
        if value not in (None, *known):
            raise self.unsupported(name, ", ".join(known))
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """An integer; None: the field is absent. Raises `ConfigError` for another value."""
        value = self.values.get(name)
        if value is None or is_integer(value):
            return value
        raise self.wrong(name, "an integer")

    def optional_number(self, name: str) -> float | None:
        """A number that float32 can hold; None: the field is absent. Raises `ConfigError` for
        another value."""
        value = self.values.get(name)
        if value is None:
            return None
        if (is_integer(value) and abs(value) < 2**63) or isinstance(value, float):
            number = float(value)
            if abs(number) <= LARGEST:
                return number
        raise self.wrong(name, "a finite number of float32")

    def positive(self, name: str, default: int | None = None) -> int:
        """An integer above 0. Raises `ConfigError` for another value, and if there is neither a
        value nor a default."""
        value: Any = self.values.get(name)
        value = default if value is None else value
        if not is_integer(value) or value <= 0:
            raise self.wrong(name, "a positive integer")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. Raises `ConfigError` for another value, and if there is neither a
        value nor a default."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None or value <= 0:
            raise self.wrong(name, "a positive number")
        return value

    def positive_numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers. Raises `ConfigError` for another value."""
        values = self.values.get(name)
        if not isinstance(values, list) or not values:
            raise self.wrong(name, "a list of positive numbers")
        item = {f"{name}[{i}]": value for i, value in enumerate(values)}
        return tuple(Fields(item, self.source).number(key) for key in item)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false. Raises `ConfigError` for another value."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if the field is absent. Raises `ConfigError` for another value."""
        value = self.values.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.wrong(name, "an object or null")

    def within(self, name: str) -> Fields:
        """The fields of an object; none if it is absent. Raises `ConfigError` for another value."""
        return Fields(self.mapping(name), f"{self.source}: {name}")

    def head_dim(self, size: str, heads: str) -> int:
        """The field `size` divided by the field `heads`. Raises `ConfigError` where one is absent,
        or `size` is no multiple of `heads`."""
        if self.positive(size) % self.positive(heads):
            raise self.wrong(size, f"a multiple of {heads} ({self.positive(heads)})")
        return self.positive(size) // self.positive(heads)


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer: `True` and `1.0` are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises `ConfigError` where it is absent,
    cannot be read or is no object."""
    try:
        text = read_regular(file, ConfigError)
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist: expected a Hugging Face model directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds {type(value).__name__}, expected a JSON object")
    return value
