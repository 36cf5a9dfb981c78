"""Two stores below KV memory for one engine: host memory and a folder, with threads that read and
write files while steps go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.tiers.copies import KvCopies, num_bytes
from onestem.engine.tiers.rates import CopyRates
from onestem.request import RequestMetrics
from onestem.threads import usable_cores

log = logging.getLogger(__name__)

MOST_READERS = 16  # threads; each reads and checks a file
QUICK_SECONDS = 0.25  # nobody waits longer for a rate of reading, nor are more files read for it
PROBED_SECONDS = 1.0  # after which a file is read to see whether reading pays now
MOST_READ_AHEAD = 64  # read and not used, where the host's store has no room for them
MOST_UNWRITTEN = 1 << 30  # bytes that wait to be written; what comes beyond is not written
MOST_FRESH = 1 << 12  # names of what was read and is not used yet; then all count as used
LISTED_SECONDS = 5.0  # after which others may have written files that are looked for


def most_readers() -> int:
    """Threads that read for an engine, or for each of its ranks."""
    return min(MOST_READERS, usable_cores())


@dataclass
class TierStats:
    """Tokens copied so far; what was damaged, or not written."""

    saved_tokens: int = 0
    from_host_tokens: int = 0
    from_disk_tokens: int = 0
    damaged: int = 0
    not_written: int = 0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class TierStores:
    """Keys and values by name, in host memory and on a disk. Where tokens are counted, a recurrent
    state has 0.

    Args:
        copies: of the engine's pages.
        host, disk: None: there is no such tier.

    Attributes:
        stats: what was copied.
        reading: what is read, or was read and not used.
        rates: of reading and of computing.
        on_files: called with the names of all files, now and then, in any thread.
        until: when writing has to end, by `time.monotonic`.
    """

    def __init__(self, copies: KvCopies, *, host: HostStore | None, disk: DiskStore | None) -> None:
        self.copies = copies
        self.host = host
        self.disk = disk
        self.stats = TierStats()
        self.reading: dict[str, Future[Tensor | None]] = {}
        self.rates = CopyRates(most_readers())
        self.on_files: Callable[[list[str]], object] = lambda names: None
        self._readers = ThreadPoolExecutor(self.rates.num_readers, "onestem-kv-read")
        self._writer = ThreadPoolExecutor(1, "onestem-kv-write")
        self._writing: dict[str, tuple[Future[None], int]] = {}  # and bytes
        self.until = float("inf")
        self._now_read: set[str] = set()
        self._damaged: set[str] = set()
        self._probe: tuple[float, Future[Tensor | None] | None] = float("-inf"), None
        self._listed = float("-inf")
        self._fresh: set[str] = set()  # read, and not taken yet

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values; of several ranks, of each."""
        return self.copies.width * self.copies.dtype.itemsize

    def on_host(self, name: str) -> bool:
        """Whether it can be copied at once, or as soon as it is read."""
        return name in self.reading or (self.host is not None and name in self.host)

    def is_ready(self, name: str) -> bool:
        """Whether it can be copied now."""
        future = self.reading.get(name)
        if future is not None and future.done():
            return not future.cancelled() and future.exception() is None
        return self.host is not None and name in self.host

    def on_disk(self, name: str) -> bool:
        """Whether it has a file that was not found damaged."""
        return self.disk is not None and name not in self._damaged and name in self.disk

    def disk_pays(
        self, name: str, num_tokens: int, beside: int = 1, token_bytes: float | None = None
    ) -> bool:
        """Whether reading beats computing: on a GPU only if both measured rates say so. Where they
        do not, the disk's is measured on the side, now and then. `beside`: pieces that are read at
        once. `token_bytes`: read for each token that is not computed; None: its own."""
        token_bytes = token_bytes or self.bytes_per_token
        if not self.copies.is_aside or self.rates.reading_pays(token_bytes, beside):
            return True
        at, probe = self._probe
        if time.monotonic() > at + PROBED_SECONDS and (probe is None or probe.done()):
            probe = self._readers.submit(self._timed_read, name, num_tokens)
            self._probe = time.monotonic(), probe
        return False

    def read(
        self,
        wanted: Sequence[tuple[str, int]],
        *,
        least: int = 1,
        token_bytes: float | None = None,
    ) -> list[Future[Tensor | None]]:
        """Begin to read what is on the disk alone (names, tokens) if that pays (see `disk_pays`);
        `least`: pieces that will be read at once, with others' to come."""
        now = {name for name, one in list(self.reading.items()) if not one.done()}
        beside = max(least, len(now.union(name for name, _ in wanted)))
        for name, _ in wanted:
            if self.host is not None:
                self.host.expect(name)
        return [
            self._read(name, num_tokens)
            for name, num_tokens in wanted
            if name in self.reading
            or (
                not self.on_host(name)
                and self.on_disk(name)
                and self.disk_pays(name, num_tokens, beside, token_bytes)
            )
        ]

    def measure(self, files: Iterable[tuple[str, int]]) -> None:
        """Learn how fast some of these files (names, tokens) are read: one, and then as many as
        there are readers at once, unless that one took long; for what reading has to beat computing
        and no rate is known. Waits for a quick disk alone."""
        left, most, began = iter(files), self.rates.num_readers, time.monotonic()

        def read() -> None:
            for one in islice(left, most):  # some are of other models
                if self._timed_read(*one) is not None:
                    break
            if time.monotonic() < began + QUICK_SECONDS:
                for one in islice(left, most):
                    self._readers.submit(self._timed_read, *one)

        if self.copies.is_aside and self.rates.reader(1) is None:
            wait([self._readers.submit(read)], QUICK_SECONDS)

    def _read(self, name: str, num_tokens: int) -> Future[Tensor | None]:
        """Begin to read. What was read ahead and not used is dropped, oldest first."""
        future = self.reading.get(name)
        if future is None:
            future = self._readers.submit(self._timed_read, name, num_tokens, is_awaited=True)
            self.reading[name] = future
        while len(self.reading) > MOST_READ_AHEAD:
            # Readers take out what goes to the host.
            done = next((name for name, one in list(self.reading.items()) if one.done()), None)
            if done is None:
                break
            self.reading.pop(done, None)
        return future

    def _timed_read(self, name: str, num_tokens: int, *, is_awaited: bool = False) -> Tensor | None:
        host, disk = self.host, self.disk  # in this order: after `forget` none gets what is old
        if disk is None:
            return None
        if host is not None:
            host.make_room(num_bytes(self.copies, num_tokens))
        kv = self.copies.host_rows(num_tokens)
        started = time.perf_counter()
        self._now_read.add(name)
        beside = len(self._now_read)
        try:
            if not disk.read(name, kv):
                return None
        finally:
            beside = max(beside, len(self._now_read))
            self._now_read.discard(name)
        if len(self._fresh) >= MOST_FRESH:
            self._fresh.clear()
        self._fresh.add(name)
        self.rates.note_read(kv.nbytes, time.perf_counter() - started, beside)
        if host is not None and host.put(name, kv, is_awaited=is_awaited):
            self.reading.pop(name, None)
        return kv

    def take(self, name: str, num_tokens: int) -> Tensor | None:
        """Rows of a name, for its tokens; they are read if they are on the disk alone. None: no
        tier has them whole."""
        kv = self.host.get(name) if self.host is not None else None
        if kv is not None:
            return kv
        if name not in self.reading and not self.on_disk(name):
            return None
        try:
            kv = self._read(name, num_tokens).result()
        except (OSError, MemoryError, RuntimeError):
            kv = None  # it is computed
        self.reading.pop(name, None)
        if kv is None and self.on_disk(name):  # else others have removed it
            if not self._damaged and self.disk is not None:  # once
                log.warning("%s in %s cannot be read: it is computed", name, self.disk.folder)
            self._damaged.add(name)
            self.stats.damaged += 1
        return kv

    def note_use(self, name: str, num_tokens: int, metrics: RequestMetrics) -> None:
        """Count what was taken for a request, by where it was when the request came."""
        if name in self._fresh:
            self._fresh.discard(name)
            self.stats.from_disk_tokens += num_tokens
            metrics.num_disk_tokens += num_tokens
        else:
            self.stats.from_host_tokens += num_tokens
            metrics.num_host_tokens += num_tokens

    def keeps(self, name: str) -> bool:
        """Whether nothing is to be done to keep it in each tier."""
        on_host = self.host is None or name in self.host
        return on_host and (self.disk is None or self.is_written(name))

    @property
    def is_writing(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._writing)

    def is_written(self, name: str) -> bool:
        """Whether it has a file, or will have."""
        return name in self._writing or self.on_disk(name)

    def save(self, parts: Iterable[tuple[str, np.ndarray, np.ndarray, int]]) -> None:
        """Keep what is in KV memory: names, tokens (int32 `[n]`), slots (int64 `[n]`), kinds."""
        wanted = [part for part in parts if not self.keeps(part[0])]
        if not wanted:
            return
        if self.host is not None:
            sizes = (num_bytes(self.copies, len(tokens)) for _, tokens, _, _ in wanted)
            self.host.make_room(sum(sizes))
        every, wait = self.copies.out([slots for _, _, slots, _ in wanted])
        for (name, tokens, _, kind), kv in zip(wanted, every, strict=True):
            if self.host is not None and name not in self.host:
                self.host.put(name, kv, kind)
            self._put(name, tokens, kv, wait)

    def _put(self, name: str, tokens: np.ndarray, kv: Tensor, wait: Callable[[], object]) -> None:
        self.stats.saved_tokens += len(tokens)
        if self.disk is None or self.is_written(name):
            return
        unwritten = sum(size for _, size in list(self._writing.values()))
        rows: Tensor | None = kv
        if unwritten and unwritten + kv.nbytes > MOST_UNWRITTEN:
            if self.host is None or len(self._writing) > len(self.host):
                self.stats.not_written += 1
                return
            rows = None  # what the host has of it then
        ids = torch.tensor(tokens.tolist(), dtype=torch.int32)  # `from_numpy`'s empty ones fail
        future = self._writer.submit(self._write, name, ids, rows, wait)
        self._writing[name] = future, 0 if rows is None else kv.nbytes
        future.add_done_callback(lambda _: self._writing.pop(name, None))

    def _write(
        self, name: str, tokens: Tensor, kv: Tensor | None, wait: Callable[[], object]
    ) -> None:
        assert self.disk is not None
        if kv is None and self.host is not None:
            kv = self.host.get(name)
        if kv is None or time.monotonic() > self.until:
            self.stats.not_written += 1
            return
        wait()
        written = self.disk.put(name, kv, tokens)
        self.stats.not_written += not written  # not in one: others count while it is written
        self._damaged.discard(name)

    def aside(self, function: Callable[[], object]) -> None:
        """Have a thread call something that asks for files."""
        self._readers.submit(function)

    def list_files(self) -> Future[object] | None:
        """Look for files of others; None: that was done shortly before."""
        disk = self.disk
        if disk is None or time.monotonic() < self._listed + LISTED_SECONDS:
            return None
        self._listed = time.monotonic()
        return self._readers.submit(lambda: self.on_files(disk.names()))

    def forget(self) -> None:
        """Drop what is kept: the model has other weights. Files are for the checkpoint's weights,
        so the disk is not used any more."""
        self.flush()
        self.disk = None
        self.clear_host()

    def clear_host(self) -> None:
        """Drop what is in host memory."""
        self.reading.clear()
        if self.host is not None:
            self.host = HostStore(self.host.budget)

    def flush(self) -> None:
        """Wait until all that was saved is written."""
        for future, _ in list(self._writing.values()):
            future.result()

    def discard(self, name: str) -> None:
        """Drop what has a name."""
        if self.host is not None:
            self.host.discard(name)
        if self.disk is not None:
            self.disk.discard(name)

    def close(self) -> None:
        """Write what was saved, as long as there is time, and end the threads."""
        self.flush()
        for threads in (self._writer, self._readers):
            threads.shutdown()
        self.copies.close()
