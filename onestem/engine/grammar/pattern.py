"""Which regular expressions of a JSON schema the grammar compiler holds an answer to.

It reads ECMA-262 patterns as if they stood between `^` and `$`, which is stricter and so harmless,
and reads over anchors elsewhere, lookarounds and escapes that it does not know; it also writes
characters that JSON must escape as they are.
"""

from __future__ import annotations

import re

__all__ = ["num_characters", "pattern_fault"]

_ESCAPE = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\."
_CHARACTER = re.compile(
    r"\\x(?P<hex>[0-9a-fA-F]{2})|\\u(?P<unicode>[0-9a-fA-F]{4})|\\(?P<escaped>.)|(?P<raw>.)",
    re.DOTALL,
)
_CLASS = re.compile(r"\[\^?[^\]]*\]")
_MODIFIER = re.compile(r"\(\?(?!:|<[A-Za-z_]\w*>)<?.?")
_PART = re.compile(r"\((?:\?:|\?<\w*>)?|\{(?P<least>\d+)(?P<comma>,?)(?P<most>\d*)\}|.", re.DOTALL)
_CLASS_ESCAPES = frozenset("dDwWsS")
_JSON_ESCAPES = frozenset('nrtfv0c"\\')
_MUST_ESCAPE = frozenset((*map(chr, range(0x20)), '"', "\\"))


def pattern_fault(pattern: str) -> str | None:
    """What of a pattern an answer would not be held to, as a noun for an error; None: nothing."""
    fault = _character_fault(pattern)
    if fault is not None:
        return fault
    structure = _structure(pattern)
    modifier = _MODIFIER.search(structure)
    if modifier is not None:
        return f"a pattern with {modifier[0]}...) ({pattern!r:.80})"
    anchor = re.search(r"(?<!^)\^|\$(?!\Z)", structure)
    if anchor is not None:
        return f"a pattern with {anchor[0]!r} inside ({pattern!r:.80})"
    return None


def _character_fault(pattern: str) -> str | None:
    for found in _CHARACTER.finditer(pattern):
        code, escaped = found["hex"] or found["unicode"], found["escaped"]
        character = chr(int(code, 16)) if code else found["raw"]
        if escaped in _JSON_ESCAPES or character in _MUST_ESCAPE:
            return f"a pattern with quotes, backslashes or control characters ({pattern!r:.80})"
        if escaped is not None and escaped.isalnum() and escaped not in _CLASS_ESCAPES:
            return f"a pattern with \\{escaped} ({pattern!r:.80})"
    return None


def _structure(pattern: str) -> str:
    """A pattern of which groups, anchors and quantifiers are left; an x for each character."""
    return _CLASS.sub("x", re.sub(_ESCAPE, "x", pattern, flags=re.DOTALL))


def num_characters(pattern: str) -> int:
    """Of a pattern with its repetitions written out, the most of them."""
    totals, last = [0], 0  # of each open group; of what a quantifier would repeat
    for found in _PART.finditer(_structure(pattern)):
        part = found[0]
        if part.startswith("("):
            totals.append(0)
        elif part == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif found["least"] is not None:
            copies = max(1, int(found["least"]), int(found["most"] or 0))
            totals[-1] += last * (copies - 1)
            last *= copies
        elif part not in "*+?":
            last = 1
            totals[-1] += last
    return sum(totals)
