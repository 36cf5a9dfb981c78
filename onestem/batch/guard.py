"""Keeps what goes wrong in one line of a job from ending the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from onestem.errors import OnestemError, RequestError, in_one_line

P = ParamSpec("P")
T = TypeVar("T")

ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What asks the program to end. All others are failures, a library's panic among them, which is no
`Exception` (that of Rust's is not)."""


def guarded(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which looks at one line; what fails in it is the line's `RequestError`. Errors that
    say something to a person, and a lack of memory, pass as they are."""

    def guard(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (*ENDS, OnestemError, MemoryError):
            raise
        except BaseException as error:
            raise RequestError(f"the line cannot be read: {in_one_line(error)}") from error

    return guard
