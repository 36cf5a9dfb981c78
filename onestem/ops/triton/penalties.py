"""Penalties in Triton: the tokens that rows have seen stay, and are updated, on the device."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from onestem.arrays import before, ragged
from onestem.ops.copies import on_device
from onestem.ops.sampling import Penalties
from onestem.ops.sampling.rows import RowTable
from onestem.ops.triton.sizes import cdiv, power_of_2
from onestem.ops.triton.words import ROW_WORDS, R

_Ids = NDArray[np.int64]

_BLOCK = 1024
_PLACES, _ENTRIES = 8, 256  # minimum capacity: states, and sampled ids of each


@triton.jit
def _repeat(logits, stride, index, rows, seen, num_words, vocab, BLOCK: tl.constexpr):
    """Program (i, part): the repetition penalty on BLOCK logits of row index[i]."""
    row = tl.load(index + tl.program_id(0))
    asked = rows + row * ROW_WORDS
    penalty = tl.load(asked + R.repetition).to(tl.float32, bitcast=True)
    if penalty != 1.0:
        state = seen + tl.load(asked + R.penalty).to(tl.int64) * num_words
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = ids < vocab
        bits = tl.load(state + ids // 32, mask=there, other=0)
        met = there & (((bits >> (ids % 32)) & 1) == 1)
        at = logits + row * stride + ids
        x = tl.load(at, mask=met, other=0.0)
        tl.store(at, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), mask=met)


@triton.jit
def _spend(logits, stride, index, rows, ids, counts, starts, lengths, BLOCK: tl.constexpr):
    """Program (i): presence and frequency penalties on row index[i]."""
    row = tl.load(index + tl.program_id(0))
    asked = rows + row * ROW_WORDS
    presence = tl.load(asked + R.presence).to(tl.float32, bitcast=True)
    frequency = tl.load(asked + R.frequency).to(tl.float32, bitcast=True)
    place = tl.load(asked + R.penalty).to(tl.int64)
    first, length = tl.load(starts + place), tl.load(lengths + place)
    if (presence != 0) | (frequency != 0):
        for start in range(0, length, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            there = entry < length
            token = tl.load(ids + first + entry, mask=there, other=0)
            count = tl.load(counts + first + entry, mask=there, other=0)
            at = logits + row * stride + token
            x = tl.load(at, mask=there, other=0.0)
            tl.store(at, x - (frequency * count.to(tl.float32) + presence), mask=there)


@triton.jit
def _note(index, rows, sampled, seen, num_words, ids, counts, starts, lengths, BLOCK: tl.constexpr):
    """Program (i): row index[i] has sampled a token."""
    row = tl.load(index + tl.program_id(0))
    place = tl.load(rows + row * ROW_WORDS + R.penalty).to(tl.int64)
    token = tl.load(sampled + row).to(tl.int32)
    word = seen + place * num_words + token // 32
    tl.store(word, tl.load(word) | (1 << (token % 32)))
    first, length = tl.load(starts + place), tl.load(lengths + place)
    known = 0
    for start in range(0, length, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        at = first + entry
        same = (tl.load(ids + at, mask=entry < length, other=-1) == token) & (entry < length)
        tl.store(counts + at, tl.load(counts + at, mask=same, other=0) + 1, mask=same)
        known += tl.sum(same.to(tl.int32), 0)
    if known == 0:
        tl.store(ids + first + length, token)
        tl.store(counts + first + length, 1)
        tl.store(lengths + place, length + 1)


@triton.jit(do_not_specialize=["count"])
def _set_bits(places, tokens, count, seen, num_words, BLOCK: tl.constexpr):
    """Note that places have seen tokens."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    place = tl.load(places + at, mask=there, other=0).to(tl.int64)
    token = tl.load(tokens + at, mask=there, other=0)
    tl.atomic_or(seen + place * num_words + token // 32, 1 << (token % 32), mask=there)


class TritonPenalties(Penalties):
    """`Penalties` on a GPU. A row has a bit for each token that it has seen (16 KB for a vocabulary
    of 128,256), and a list of its distinct sampled ids with their counts. Both grow as needed: all
    lists together take at most 32 bytes per sampled token, and 2 KB per row.

    Args:
        vocab_size: columns of the logits; other ids are ignored.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size)
        self._device = device
        self._num_words = -(-vocab_size // 32)
        self._seen = self._zeros(0, self._num_words)
        self._lengths = self._zeros(0)
        # Lists of ids and counts: start of each, its capacity, and its maximum length by now.
        self._ids, self._counts = self._zeros(0), self._zeros(0)
        self._starts, self._rooms = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._most = np.zeros(0, np.int64)
        self._starts_there = on_device(self._starts, device)
        self._new: dict[int, tuple[_Ids, _Ids, _Ids]] = {}
        self._released: set[int] = set()

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def assign(
        self, place: int, prompt: NDArray[np.integer] | None, output: NDArray[np.integer]
    ) -> None:
        ids, counts = np.unique(self._inside(output), return_counts=True)
        # The prompt's ids may repeat: a bit may be set twice.
        seen = ids if prompt is None else np.concatenate((self._inside(prompt), ids))
        self._new[place] = (seen, ids, counts)
        self._released.discard(place)

    def release(self, place: int) -> None:
        self._released.add(place)

    def apply(self, logits: Tensor, rows: RowTable) -> None:
        if not len(rows.penalised):
            return
        self._take_new()
        index, count = rows.penalised_there, len(rows.penalised)
        told = (logits, logits.stride(0), index, rows.words)
        vocab = self._vocab_size
        if bool((rows.rows["repetition"][rows.penalised] != 1).any()):
            _repeat[(count, cdiv(vocab, _BLOCK))](
                *told, self._seen, self._num_words, vocab, BLOCK=_BLOCK
            )
        _spend[(count,)](
            *told, self._ids, self._counts, self._starts_there, self._lengths, BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip

    def note(self, rows: RowTable, ids: Tensor) -> None:
        if not len(rows.penalised):
            return
        places = rows.rows["penalty"][rows.penalised]
        self._most[places] += 1
        if (self._most[places] > self._rooms[places]).any():
            self._lay_out()
        _note[(len(places),)](
            rows.penalised_there, rows.words, ids, self._seen, self._num_words,
            self._ids, self._counts, self._starts_there, self._lengths, BLOCK=_BLOCK,
        )  # fmt: skip

    def _take_new(self) -> None:
        """Set up all newly assigned states at once."""
        if not self._new:
            return
        places = np.fromiter(self._new, np.int64, len(self._new))
        new, self._new = list(self._new.values()), {}
        self._add_places(int(places.max()) + 1)
        there = on_device(places, self._device)
        self._seen.index_fill_(0, there, 0)
        lengths = np.array([len(ids) for _, ids, _ in new])
        self._most[places] = lengths
        if (lengths > self._rooms[places]).any():
            self._lay_out()
        self._lengths[there] = on_device(lengths.astype(np.int32), self._device)
        self._set(places, [seen for seen, _, _ in new])
        if lengths.any():
            self._put(places, lengths, [ids for _, ids, _ in new], [c for _, _, c in new])

    def _set(self, places: _Ids, seen: list[_Ids]) -> None:
        repeated = np.repeat(places, [len(ids) for ids in seen]).astype(np.int32)
        count = len(repeated)
        if count:
            tokens = on_device(np.concatenate(seen).astype(np.int32), self._device)
            _set_bits[(cdiv(count, _BLOCK),)](
                on_device(repeated, self._device), tokens, count, self._seen, self._num_words,
                BLOCK=_BLOCK,
            )  # fmt: skip

    def _put(self, places: _Ids, lengths: _Ids, ids: list[_Ids], counts: list[_Ids]) -> None:
        where = on_device(ragged(self._starts[places], lengths), self._device)
        for target, values in ((self._ids, ids), (self._counts, counts)):
            target[where] = on_device(np.concatenate(values).astype(np.int32), self._device)

    def _add_places(self, count: int) -> None:
        missing = power_of_2(max(_PLACES, count)) - len(self._most)
        if missing <= 0:
            return
        self._seen = torch.cat((self._seen, self._zeros(missing, self._num_words)))
        self._lengths = torch.cat((self._lengths, self._zeros(missing)))
        for name in ("_starts", "_rooms", "_most"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(missing, np.int64)))
        self._lay_out()

    def _lay_out(self) -> None:
        """Move lists to twice the room that they may need now, so that this is rare."""
        gone = np.array([place for place in self._released if place < len(self._most)], np.int64)
        self._lengths.index_fill_(0, on_device(gone, self._device), 0)
        self._most[gone] = 0
        self._released.clear()
        rooms = np.maximum(2 * self._most, _ENTRIES)
        starts = before(rooms)
        kept = np.minimum(self._most, self._rooms)
        # Places of entries, one list after the other.
        old = on_device(ragged(self._starts, kept), self._device)
        new = on_device(ragged(starts, kept), self._device)
        for name in ("_ids", "_counts"):
            grown = self._zeros(int(rooms.sum()))
            grown[new] = getattr(self, name)[old]
            setattr(self, name, grown)
        self._starts, self._rooms = starts, rooms
        self._starts_there = on_device(starts, self._device)
