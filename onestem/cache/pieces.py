"""Names of stored keys and values: which piece of which prompt a file or a host tensor holds.

What a token's keys and values are depends on all tokens before it. So a piece is named by a digest
of the chain from the root: the model, the labels and the tokens. A run that leaves KV memory is cut
into pieces at fixed indices, so that the same tokens have the same pieces in every process. The
recurrent state after a token is named as the piece is that begins at such an index and ends there.
"""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Self

import numpy as np

from onestem.tree import Label, Stretch, cut, num_common

PIECE_TOKENS = 512
"""Most tokens of a piece; one ends at each multiple."""

LOOKED_AT = 16  # pieces of which only the beginning may fit
NO_TOKENS = np.zeros(0, np.int32)
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-(\d{1,9})(-state)?")


class Piece(NamedTuple):
    """Consecutive tokens of a chain.

    Attributes:
        parent, key: the chain's digests before them, with their label, and after them.
        num_tokens: how many they are.
        is_state: what is stored is the recurrent state after them.
    """

    parent: str
    key: str
    num_tokens: int
    is_state: bool = False

    @property
    def name(self) -> str:
        """Its name in every store."""
        return f"{self.parent}-{self.key}-{self.num_tokens}{'-state' * self.is_state}"

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are stored; 0 of a state."""
        return 0 if self.is_state else self.num_tokens

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """The piece of a name; None: it names something else."""
        found = _NAME.fullmatch(name)
        if found is None or not 0 < int(found[3]) <= PIECE_TOKENS:
            return None
        return cls(found[1], found[2], int(found[3]), found[4] is not None)


def storable(stretches: Sequence[Stretch], end: int) -> int:
    """How many of a sequence's first `end` tokens have keys and values that another process can
    find: those of plain text, at the positions of their indices."""
    for first, _, label in cut(stretches, end):
        if label.shift or not isinstance(label.space, str):
            return first
    return end


def piece_start(index: int) -> int:
    """Where a piece with a token begins, if its run does not begin after that."""
    return index - index % PIECE_TOKENS


def piece_ends(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Tokens first..end-1 in pieces: the first token and the end of each."""
    while first < end:
        stop = min(end, piece_start(first) + PIECE_TOKENS)
        yield first, stop
        first = stop


class Chain:
    """Digests of the beginnings of one sequence.

    Args:
        root: what keys and values depend on besides the tokens before them.
        tokens: int32 `[n]`.
        stretches: their labels.
        like: a chain of the same root, whose digests of what both begin with are taken.
    """

    def __init__(
        self, root: str, tokens: np.ndarray, stretches: Sequence[Stretch], like: Self | None = None
    ) -> None:
        self.tokens = tokens
        self.stretches = stretches
        self._labels = dict(stretches)
        self._ends = [0]
        self._states = [hashlib.blake2b(root.encode(), digest_size=16)]
        if like is not None and like.stretches == stretches:
            same = bisect_right(like._ends, num_common(like.tokens, tokens))
            self._ends, self._states = like._ends[:same], like._states[:same]

    def key(self, end: int) -> str:
        """The digest of the first `end` tokens."""
        at = bisect_right(self._ends, end) - 1
        if self._ends[at] < end:
            state = self._states[at].copy()
            for first, stop, label in cut(self.stretches, end, self._ends[at]):
                if first in self._labels:
                    state.update(_said(label))
                state.update(np.ascontiguousarray(self.tokens[first:stop], np.int32).tobytes())
            at += 1
            self._ends.insert(at, end)
            self._states.insert(at, state)
        return self._states[at].hexdigest()

    def parent(self, end: int) -> str:
        """The digest of the first `end` tokens and the next one's label."""
        key = self.key(end)
        label = self._labels.get(end)
        if label is None:
            return key
        state = self._states[bisect_right(self._ends, end) - 1].copy()
        state.update(_said(label))
        return state.hexdigest()

    def piece(self, first: int, end: int) -> Piece:
        """The piece of tokens first..end-1, which have one label."""
        return Piece(self.parent(first), self.key(end), end - first)

    def state(self, end: int) -> Piece:
        """The recurrent state after the first `end` tokens, one at least."""
        first = piece_start(end - 1)
        return Piece(self.parent(first), self.key(end), end - first, is_state=True)


def _said(label: Label) -> bytes:
    space = str(label.space).encode(errors="surrogatepass")
    return b"%d %d " % (len(space), label.shift) + space


class Found(NamedTuple):
    """The first tokens of a piece, which are tokens `start` and on of a sequence."""

    piece: Piece
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """After the last of them."""
        return self.start + self.num_tokens


class PieceIndex:
    """Which pieces there are, by the digest before them. Threads may share it.

    Args:
        look: reads a piece's tokens, int32 `[n]`; None: they cannot be read.
    """

    def __init__(self, look: Callable[[Piece], np.ndarray | None]) -> None:
        self._look = look
        self._after: dict[str, dict[Piece, np.ndarray | None]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def add(self, piece: Piece, tokens: np.ndarray | None = None) -> None:
        """Note a piece; `tokens`, int32 `[n]`, where they are at hand."""
        with self._lock:
            there = self._after.setdefault(piece.parent, {})
            self._size += piece not in there
            if tokens is not None or piece not in there:
                there[piece] = tokens

    def discard(self, piece: Piece) -> None:
        """Forget a piece."""
        with self._lock:
            there = self._after.get(piece.parent, {})
            if piece in there:
                self._size -= 1
                del there[piece]
                if not there:
                    del self._after[piece.parent]

    def prune(self, is_kept: Callable[[str], bool]) -> None:
        """Forget pieces whose names are not kept."""
        with self._lock:
            every = [piece for there in self._after.values() for piece in there]
        for piece in every:
            if not is_kept(piece.name):
                self.discard(piece)

    def beginnings(self, piece: Piece, tokens: np.ndarray) -> list[Piece]:
        """Shorter pieces at the same place with the first of `tokens` (int32 `[n]`)."""
        with self._lock:
            there = list(self._after.get(piece.parent, {}).items())
        return [
            one
            for one, own in there
            if own is not None and 0 < num_common(own, tokens) == len(own) < len(tokens)
        ]

    def find(self, chain: Chain, starts: Sequence[int], end: int) -> list[Found]:
        """Pieces that follow each other in a sequence, as far as there are any.

        Args:
            starts: where pieces may begin: those that reach furthest are taken, of equals the
                last start's.
            end: tokens after it are not wanted.
        """
        best: list[Found] = []
        for start in sorted(set(starts), reverse=True):
            with self._lock:
                found = list(self._follow(chain, start, end))
            if found and (not best or found[-1].end > best[-1].end):
                best = found
            if found and found[-1].end == end:
                break
        return best

    def states(self, chain: Chain, first: int, end: int) -> Iterator[tuple[Piece, int]]:
        """States that there are after more than the `first` tokens of a sequence and `end` at most,
        each with the number of these; the deepest first."""
        starts = range(piece_start(first), end, PIECE_TOKENS)
        parents = [chain.parent(start) for start in starts]
        for start, parent in zip(reversed(starts), reversed(parents), strict=True):
            with self._lock:
                there = {one for one in self._after.get(parent, ()) if one.is_state}
            for size in sorted({one.num_tokens for one in there}, reverse=True):
                if first < start + size <= end and (state := chain.state(start + size)) in there:
                    yield state, start + size

    def _follow(self, chain: Chain, at: int, end: int) -> Iterator[Found]:
        while at < end:
            there = self._after.get(chain.parent(at))
            found = None if there is None else self._next(there, chain, at, end)
            if found is None:
                return
            yield found
            at = found.end

    def _next(
        self, there: dict[Piece, np.ndarray | None], chain: Chain, at: int, end: int
    ) -> Found | None:
        """The piece that goes furthest from a token on: whole, else the beginning of one."""
        pieces = [piece for piece in there if not piece.is_state]
        for size in sorted({piece.num_tokens for piece in pieces}, reverse=True):
            if at + size <= end:
                whole = Piece(next(iter(there)).parent, chain.key(at + size), size)
                if whole in there:
                    return Found(whole, at, size)
        best: Found | None = None
        for piece in islice(reversed(pieces), LOOKED_AT):
            tokens = there[piece]
            if tokens is None:
                tokens = self._look(piece)
                there[piece] = tokens = NO_TOKENS if tokens is None else tokens
            same = num_common(tokens, chain.tokens[at:end])
            if same and (best is None or same > best.num_tokens):
                best = Found(piece, at, same)
        return best
