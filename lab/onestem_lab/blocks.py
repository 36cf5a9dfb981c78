"""Blocks of pages that a script makes, between two comments that name it."""

from __future__ import annotations

__all__ = ["replaced"]


def replaced(page: str, script: str, block: str) -> str:
    """The page with another block of a script (`python -m SCRIPT`) in it.

    Raises:
        ValueError: the page has no such block.
    """
    begin, end = f"<!-- made by {script} -->\n", f"<!-- end of {script} -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no block between {begin.strip()!r} and {end!r}")
    return f"{before}{begin}{block}\n{end}{rest.partition(end)[2]}"
