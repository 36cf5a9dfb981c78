"""Why a prompt shares what it shares, told from its path when it is admitted."""

from __future__ import annotations

from itertools import islice

from onestem.cache import Run
from onestem.engine.sequence import Sequence
from onestem.request import Reuse

__all__ = ["explain"]

SHOWN = 4


def explain(sequence: Sequence, path: list[Run], prefix: str | None) -> Reuse:
    """Args:
    sequence: just admitted: the runs that it is to compute are its own.
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
    )


def _beside(own: Run) -> tuple[int, ...]:
    """First tokens of the other runs that go on where this one begins, of the same label: what
    another salt has stored is nobody's business."""
    assert own.parent is not None
    others = (run for run in own.parent.children.values() if run is not own)
    return tuple(islice((run.tokens[0] for run in others if run.label == own.label), SHOWN))
