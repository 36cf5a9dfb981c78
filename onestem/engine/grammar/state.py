"""A sequence's place in its grammar, and the mask of what may come next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onestem.errors import RequestError

if TYPE_CHECKING:
    import xgrammar


class Grammar:
    """A format, compiled.

    Args:
        compiled: by xgrammar.
        allowed: int32 `[ceil(vocab / 32)]`: the tokens it may ever allow, packed as in a mask.
        num_bytes: about what it keeps. xgrammar's own count leaves most of it out.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, allowed: Tensor, num_bytes: int) -> None:
        self.compiled = compiled
        self.allowed = allowed
        self.num_bytes = num_bytes
        self.states: weakref.WeakSet[GrammarState] = weakref.WeakSet()


class GrammarState:
    """State of one sequence in its grammar."""

    def __init__(self, grammar: Grammar, vocab_size: int, stop_token_ids: list[int]) -> None:
        import xgrammar

        self._origin = (grammar, vocab_size, stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._allowed = grammar.allowed
        self._mask = torch.full(((vocab_size + 31) // 32,), -1, dtype=torch.int32)
        self._stops = packed(stop_token_ids, len(self._mask))
        self._filled = False
        grammar.states.add(self)

    def at_start(self) -> GrammarState:
        """The state of another sequence in the same grammar."""
        return GrammarState(*self._origin)

    def fill_mask(self) -> Tensor:
        """Which tokens may come next: bits packed in int32 `[ceil(vocab / 32)]`, on the CPU.

        The tensor belongs to this state and is written again at the next call after `accept`.
        """
        if not self._filled:
            if self._matcher.is_terminated():
                self._mask.copy_(self._stops)
            else:
                self._matcher.fill_next_token_bitmask(self._mask.unsqueeze(0))
                self._mask &= self._allowed
            self._filled = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            RequestError: the grammar does not allow it.
        """
        if not self._matcher.accept_token(token_id):
            raise RequestError(
                f"token {token_id} does not follow the response_format, expected one that "
                "fill_mask allows"
            )
        self._filled = False

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but its end may follow, or it has ended.

        So a closed JSON object ends without a step for the end-of-sequence token.
        """
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        return not bool((self.fill_mask() & ~self._stops).any())


def packed(token_ids: Iterable[int], num_words: int) -> Tensor:
    """Token ids as bits of int32 `[num_words]`."""
    words = np.zeros(num_words, np.uint32)
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))
