"""Compiled grammars that are kept for the next request, and what is known not to compile."""

from __future__ import annotations

from collections import OrderedDict

from onestem.engine.grammar.state import Grammar

_MOST_FAILURES = 1_000


class Kept:
    """Grammars by their formats' keys, least recently used first, up to `most_bytes`; those that
    sequences are in stay beyond it, since forgetting them frees nothing. Errors of those that are
    too costly are kept too (`failures`), so that none is tried again. Not safe to use from several
    threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self.failures: OrderedDict[str, Exception] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, key: str) -> Grammar | Exception | None:
        """What became of a format; None: that is not known."""
        for found in (self._grammars, self.failures):
            if key in found:
                found.move_to_end(key)
        return self._grammars.get(key) or self.failures.get(key)

    def add(self, key: str, grammar: Grammar) -> None:
        """Keep a grammar, and forget others that are too much then."""
        self._grammars[key] = grammar
        self.num_bytes += grammar.num_bytes
        for other in list(self._grammars):
            if self.num_bytes <= self._most_bytes:
                break
            if not self._grammars[other].states and other != key:
                self.num_bytes -= self._grammars.pop(other).num_bytes

    def add_failure(self, key: str, error: Exception) -> None:
        """Keep what is raised for a format."""
        self.failures[key] = error
        if len(self.failures) > _MOST_FAILURES:
            self.failures.popitem(last=False)
