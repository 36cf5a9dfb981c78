"""Calls into libraries that are written in another language.

A panic of a Rust library is no `Exception`: it passes every `except Exception`, and would end the
loop or the process that made the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onestem.errors import OnestemError, first_line


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library failed in itself. Interrupts, exits, cancellations and what handlers
    of signals raise are `BaseException`s too, and are none of these."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


@contextmanager
def native(what: str, error: type[OnestemError]) -> Iterator[None]:
    """Raise `error` with one line for a panic; all else passes.

    Args:
        what: the beginning of the line: what cannot be done.
    """
    try:
        yield
    except BaseException as raised:
        if not is_panic(raised):
            raise
        raise error(f"{what}: its library fails ({first_line(raised)})") from raised
