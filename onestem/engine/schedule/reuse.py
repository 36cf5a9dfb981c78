"""Why a prompt shares what it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from onestem.cache import Run
from onestem.engine.sequence import Sequence
from onestem.request import Rerendered, Reuse

SHOWN = 4  # tokens of runs beside a prompt's own, for an explanation
SHOWN_ANSWER = 16  # tokens of an answer that a prompt leaves
LOOKED_AT = 16  # newest runs beside one, among which an answer is looked for


def explain(sequence: Sequence, path: list[Run], prefix: str | None) -> Reuse:
    """What a prompt shares, and where its match ended.

    Args:
        sequence: newly admitted: the runs that it is to compute are its own.
        path: its runs.
        prefix: the longest pinned prefix on it.
    """
    own = next((run for run in path if run.owner is sequence and run.computed == 0), None)
    matched = own.start if own is not None else len(sequence.tokens)
    beside = _beside(own) if own is not None else ()
    at_end = matched >= sequence.match_limit
    return Reuse(
        matched_tokens=matched,
        prefix=prefix,
        ended="prompt" if at_end else "differs" if beside else "new",
        here=sequence.tokens[matched] if matched < len(sequence.tokens) else None,
        there=() if at_end else beside,
        rerendered=_rerendered(own) if own is not None and not at_end else None,
    )


def _beside(own: Run) -> tuple[int, ...]:
    """First tokens of the other runs of the same label that begin where this one does. What another
    salt has stored is not shown."""
    assert own.parent is not None
    others = (run for run in own.parent.children.values() if run is not own)
    return tuple(islice((run.tokens[0] for run in others if run.label == own.label), SHOWN))


def _rerendered(own: Run) -> Rerendered | None:
    """What a prompt leaves that goes on, as `own`, from inside an answer that has ended. O(1) where
    there is no answer, otherwise O(runs of the conversation's path)."""
    assert own.parent is not None
    if own.parent.answer_at > own.start:
        return None
    left = _newest(own.parent, own, lambda run: run.answer_at <= own.start)
    if left is None or left.grows:
        return None
    lost = list(_below(left))
    earlier = (token for run in lost for token in run.tokens[: min(run.computed, SHOWN_ANSWER)])
    return Rerendered(
        at=own.start,
        num_tokens=sum(run.computed for run in lost),
        offset=own.start - left.answer_at,
        earlier=tuple(islice(earlier, SHOWN_ANSWER)),
    )


def _below(run: Run) -> Iterator[Run]:
    """A run and the newest runs that follow it, as far as they have ended."""
    following: Run | None = run
    while following is not None and not following.grows:
        yield following
        following = _newest(following, run, lambda _: True)


def _newest(parent: Run, like: Run, wanted: Callable[[Run], bool]) -> Run | None:
    """The newest `wanted` run below another, of the label of `like` and not `like` itself."""
    children = islice(reversed(parent.children.values()), LOOKED_AT)
    return next(
        (c for c in children if c is not like and c.label == like.label and wanted(c)), None
    )
