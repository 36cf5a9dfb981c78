"""Tokens that a request forbids by itself: `allowed_token_ids` and `bad_words`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy

import torch
from torch import Tensor

from onestem.engine.grammar.state import GrammarState, packed
from onestem.rawtext import RawText


class TokenRules:
    """State of one sequence under what its request forbids, and under its grammar if it has one.

    Args:
        vocab_size: of the logits.
        allowed: ids that may be sampled; None: all.
        bad: token ids of words that the answer may not contain.
        grammar: of the same sequence.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Iterable[int] | None,
        bad: Sequence[Sequence[int]],
        grammar: GrammarState | None = None,
    ) -> None:
        words = (vocab_size + 31) // 32
        self._allowed = torch.full((words,), -1, dtype=torch.int32)
        if allowed is not None:
            self._allowed = packed(allowed, words)
        self._grammar = grammar
        self._bad = [tuple(word) for word in bad]
        self._longest = max(map(len, self._bad), default=1)
        self._last: list[int] = []

    def at_start(self) -> TokenRules:
        """The state of another sequence under the same rules."""
        other = copy(self)
        other._grammar = None if self._grammar is None else self._grammar.at_start()
        other._last = []
        return other

    def fill_mask(self) -> Tensor:
        """Which tokens may come next, as `GrammarState.fill_mask`."""
        mask = self._allowed.clone()
        if self._grammar is not None:
            mask &= self._grammar.fill_mask()
        for word in self._bad:
            *before, last = word
            if self._last[len(self._last) - len(before) :] == before:
                bit = 1 << (last % 32)
                mask[last // 32] &= ~(bit - (1 << 32) if bit >= 1 << 31 else bit)
        return mask

    def accept(self, token_id: int) -> None:
        """Take a sampled token."""
        if self._grammar is not None:
            self._grammar.accept(token_id)
        self._last = [*self._last, token_id][-(self._longest - 1) :] if self._longest > 1 else []

    @property
    def is_finished(self) -> bool:
        """Whether its grammar lets nothing follow."""
        return self._grammar is not None and self._grammar.is_finished


def spelled(word: str, encode: Callable[[Sequence[RawText]], list[list[int]]]) -> list[list[int]]:
    """A word's token ids, at the beginning of a text and inside one. A control token's name is this
    token."""
    forms = encode([RawText(word), RawText(" " + word)])
    return [form for index, form in enumerate(forms) if form and form not in forms[:index]]
