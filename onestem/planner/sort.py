"""Bring prompts with a common prefix next to each other, in bounded memory.

A job's token ids may not fit in memory (100,000 prompts of 2,000 tokens are 800 MB, several times
that as Python lists). So prompts are dealt into buckets by their content, and one bucket is sorted
at a time. The splitters between buckets come from a sample of the prompts.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from onestem.tree import num_common

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

TOKEN_BYTES = 4
KEY_BYTES = 64 << 20  # keys held at once
KEY_OVERHEAD = 128  # bytes that Python takes for one
MOST_BUCKETS = 4096
SAMPLES = 32  # per bucket: one is then seldom twice as large as meant


class Prompts(Protocol):
    """Anything indexable: a list of lists, a list of arrays, a store."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sequence[int] | npt.NDArray[Any]:
        """Token ids of prompt `i`; each fits an int32."""
        ...


@runtime_checkable
class StoredPrompts(Prompts, Protocol):
    """Prompts in a file, to be read in their order."""

    @property
    def lengths(self) -> IntArray:
        """`[num_requests]` tokens of each."""
        ...

    @property
    def folder(self) -> Path:
        """A folder with room for all token ids once more."""
        ...


@dataclass(frozen=True, eq=False)
class SortedPrompts:
    """Prompts in an order in which any common prefix belongs to neighbours.

    Only a prompt's *shareable* tokens count, all but the last: the last one is always computed,
    so that there are logits to sample from.

    Attributes:
        lengths: `[num_requests]` tokens of each prompt, by request index.
        order: `[num_requests]` request indices.
        shared: `[num_requests]` length of the shareable prefix that `order[k]` and `order[k - 1]`
            have in common; `shared[0]` is 0.
    """

    lengths: IntArray
    order: IntArray
    shared: IntArray


def sort_prompts(prompts: Prompts) -> SortedPrompts:
    """Sort by content. The order is lexicographic for a fixed, unspecified order of token ids;
    equal prompts are in order of their index.

    Memory beside `prompts`: about 128 MiB of keys, and 40 bytes per request. Each prompt is fetched
    once or twice. Those of `StoredPrompts` are read in their order and written once more, bucket by
    bucket, to a temporary file: so none is looked up alone.
    """
    count = len(prompts)
    if isinstance(prompts, StoredPrompts):
        lengths = np.asarray(prompts.lengths, np.int64)
    else:
        lengths = np.fromiter((len(prompts[i]) for i in range(count)), np.int64, count)
    order, shared = np.empty(count, np.int64), np.zeros(count, np.int64)
    at, last = 0, b""
    for requests, keys in _buckets(prompts, lengths):
        end = at + len(requests)
        ranks = sorted(range(len(keys)), key=keys.__getitem__)
        order[at:end] = requests[ranks]
        ranked = [last, *(keys[rank] for rank in ranks)]
        ids = (np.frombuffer(key, np.int32) for key in ranked)
        shared[at:end] = [num_common(a, b) for a, b in pairwise(ids)]
        at, last = end, ranked[-1]
    return SortedPrompts(lengths, order, shared)


def _buckets(prompts: Prompts, lengths: IntArray) -> Iterator[tuple[IntArray, list[bytes]]]:
    """Of each bucket, in order of content: its requests, by index, and their keys."""
    count = len(lengths)
    total = int((TOKEN_BYTES * lengths + KEY_OVERHEAD).sum())
    if total <= KEY_BYTES:
        yield np.arange(count), [_key(prompts[i]) for i in range(count)]
        return
    splitters = _splitters(prompts, lengths, min(MOST_BUCKETS, -(-total // KEY_BYTES)))
    if isinstance(prompts, StoredPrompts):
        with tempfile.TemporaryFile(dir=prompts.folder) as file:
            shelves = _Shelves(file, lengths)
            bucket_of = _dealt(prompts, lengths, splitters, shelves)
            for bucket, requests in _members(bucket_of):
                yield requests, shelves.keys(bucket, requests)
    else:
        for _, requests in _members(_dealt(prompts, lengths, splitters, None)):
            yield requests, [_key(prompts[i]) for i in requests.tolist()]


def _splitters(prompts: Prompts, lengths: IntArray, buckets: int) -> list[bytes]:
    """Ascending keys that cut the prompts into buckets of about the same total size."""
    drawn = np.random.default_rng(0).integers(0, len(lengths), SAMPLES * buckets)
    keys = sorted(_key(prompts[i]) for i in np.sort(drawn).tolist())
    before = np.cumsum([len(key) + KEY_OVERHEAD for key in keys])
    wanted = before[-1] * np.arange(1, buckets) / buckets
    return sorted({keys[at] for at in np.searchsorted(before, wanted).tolist()})


def _dealt(
    prompts: Prompts, lengths: IntArray, splitters: list[bytes], shelves: _Shelves | None
) -> npt.NDArray[np.uint16]:
    """`[num_requests]` bucket of each. Prompts equal to a splitter have one of their own."""
    bucket_of = np.empty(len(lengths), np.uint16)
    sizes = np.cumsum(TOKEN_BYTES * lengths + KEY_OVERHEAD)
    first = 0
    while first < len(lengths):
        most = KEY_BYTES + (int(sizes[first - 1]) if first else 0)
        end = max(first + 1, int(np.searchsorted(sizes, most, "right")))
        keys = [_key(prompts[i]) for i in range(first, end)]
        for i, key in enumerate(keys, first):
            at = bisect_left(splitters, key)
            bucket_of[i] = 2 * at + (at < len(splitters) and splitters[at] == key)
        if shelves is not None:
            shelves.put(keys, bucket_of[first:end])
        first = end
    return bucket_of


def _members(bucket_of: npt.NDArray[np.uint16]) -> Iterator[tuple[int, IntArray]]:
    """Buckets that are not empty and their requests, both ascending."""
    order = np.argsort(bucket_of, kind="stable")
    end = 0
    for bucket, count in enumerate(np.bincount(bucket_of).tolist()):
        end += count
        if count:
            yield bucket, order[end - count : end]


class _Shelves:
    """Keys in a file. Within each `put`, those of a bucket are contiguous."""

    def __init__(self, file: IO[bytes], lengths: IntArray) -> None:
        self._file = file
        self._sizes = TOKEN_BYTES * np.maximum(lengths - 1, 0)
        self._ends: list[IntArray] = []  # of each put, by bucket

    def put(self, keys: list[bytes], bucket_of: npt.NDArray[np.uint16]) -> None:
        """Append some keys."""
        sizes = np.array([len(key) for key in keys])
        begin = int(self._ends[-1][-1]) if self._ends else 0
        self._ends.append(begin + np.cumsum(np.bincount(bucket_of, sizes)).astype(np.int64))
        self._file.write(b"".join(keys[i] for i in np.argsort(bucket_of, kind="stable").tolist()))

    def keys(self, bucket: int, requests: IntArray) -> list[bytes]:
        """Keys of a bucket; `requests`: all of its requests."""
        self._file.flush()
        parts, begin = [], 0
        for ends in self._ends:
            if bucket < len(ends):
                start = int(ends[bucket - 1]) if bucket else begin
                parts.append(os.pread(self._file.fileno(), int(ends[bucket]) - start, start))
            begin = int(ends[-1])
        whole, bounds = b"".join(parts), [0, *np.cumsum(self._sizes[requests]).tolist()]
        return [whole[start:end] for start, end in pairwise(bounds)]


def _key(prompt: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """The shareable tokens as int32 bytes, compared by memcmp when sorted.

    The bytes are in native order: that sorts token ids oddly, but alike in every prompt, and
    nothing more is needed to bring equal prefixes together.
    """
    part = prompt[: max(0, len(prompt) - 1)]
    if isinstance(part, np.ndarray):
        return part.astype(np.int32, copy=False, casting="same_kind").tobytes()
    return array("i", part).tobytes()
