"""Errors that name the thing, the limit and the way out.

A caller's mistake raises `OnestemError` (or a subclass). The command line prints its one line and
exits with 2; nothing else in the package catches it to go on as if nothing had happened.
"""


def in_one_line(error: BaseException) -> str:
    """Kind and text of a failure that nobody expected."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def first_line(error: BaseException) -> str:
    """What a library says went wrong; its kind, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class OnestemError(Exception):
    """Base of every error that a caller can cause. Its text is one line for a person: names of
    others may have control characters, which are escaped."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_visible(one) if isinstance(one, str) else one for one in arguments))


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class RequestError(OnestemError, ValueError):
    """A request that can never be answered as it stands (too long, a bad parameter)."""


class ConfigError(OnestemError, ValueError):
    """A model configuration or an engine option that does not make sense."""


class UnsupportedError(OnestemError):
    """Something that other engines have and this one has not: refused, never approximated."""


class WeightsError(OnestemError):
    """Missing, unknown or misshapen tensors in a model directory."""


class JobError(OnestemError):
    """An offline job that cannot start or go on (a foreign output file, an unreadable input)."""


class CacheError(OnestemError):
    """KV memory that cannot hold what is asked, or whose books do not balance."""


class RankError(OnestemError):
    """One of the processes that hold a model together has ended, and so have the others."""
