"""Modules outside the KV pages: copied out when they are computed, copied back instead of computed.

On a GPU copies go over pinned memory on a stream of their own. Copies out wait for the step that
computed the module; the next step waits for copies in. Files are read and written by a thread.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from onestem.cache import ModuleRun
from onestem.cache.storage import DiskStore, HostStore
from onestem.ops.kv import read_kv, slot_index, write_kv

__all__ = ["ModuleTiers", "TierStats"]

Name = Hashable
KvPages = Sequence[tuple[Tensor, Tensor]]
MOST_READ_AHEAD = 32  # modules
FEW_STRETCHES = 4  # this many copies straight into the pages are no slower than one and a scatter


@dataclass
class TierStats:
    """Tokens of modules copied so far; modules whose files were damaged, or not written."""

    saved_tokens: int = 0
    from_host_tokens: int = 0
    from_disk_tokens: int = 0
    damaged: int = 0
    not_written: int = 0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class ModuleTiers:
    """Host memory and disk for the modules of one engine.

    Args:
        pages: K and V pages of each layer that has its own.
        host, disk: None: there is no such tier.

    Attributes:
        stats: what was copied.
        device: where the pages are.
        reading: modules that are read ahead.
        bytes_per_second: of the disk, with checksums; None: not measured.
        row_seconds: of computing a token; None: not measured.
    """

    def __init__(
        self,
        pages: KvPages,
        *,
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.stats = TierStats()
        self._pages = pages
        self.device, self._dtype = pages[0][0].device, pages[0][0].dtype
        self.reading: dict[Name, Future[Tensor | None]] = {}
        self.bytes_per_second: float | None = None
        self.row_seconds: float | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "onestem-modules")
        self._writing: dict[Name, Future[bool]] = {}
        self._damaged: set[Name] = set()
        self._probe: Future[None] | None = None

    def note_step(self, prompt_rows: int, seconds: float) -> None:
        """Note that a step with `prompt_rows` rows of prompts took `seconds`. The best rate counts:
        small steps wait for the weights, and a module would be computed in large ones."""
        if prompt_rows > 0:
            row = seconds / prompt_rows
            self.row_seconds = min(row, self.row_seconds or row)

    def has(self, run: ModuleRun) -> bool:
        """Whether a module is kept, and copying it beats computing it."""
        name = _name(run)
        if not run.kept:
            return False
        if name in self.reading or (self.host is not None and name in self.host):
            return True
        return self._on_disk(name) and self.disk_pays(name, len(run.tokens))

    def _on_disk(self, name: Name) -> bool:
        return self.disk is not None and name not in self._damaged and name in self.disk

    def disk_pays(self, name: Name, num_tokens: int) -> bool:
        """Whether reading beats computing: on a GPU only if both measured rates say so. The disk's
        is measured on the side, with the beginning of the first file that is asked for."""
        if self.device.type == "cpu":
            return True
        row = self.row_seconds
        if self.bytes_per_second is None:
            self._probe = self._probe or self._thread.submit(self._measure, name)
            return False
        copy = num_tokens * self.bytes_per_token / self.bytes_per_second
        return row is not None and copy < num_tokens * row

    def _measure(self, name: Name) -> None:
        assert self.disk is not None
        rate = self.disk.measure(name)
        self.bytes_per_second = self.bytes_per_second or rate
        self._probe = None

    @property
    def bytes_per_token(self) -> int:
        """Of a module."""
        return self._num_values(1) * self._dtype.itemsize

    def _num_values(self, num_tokens: int) -> int:
        return num_tokens * sum(pages[0, 0].numel() for pair in self._pages for pages in pair)

    def _parts(self, module: Tensor, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each pages tensor with what a module holds of it, `[num_tokens, num_kv_heads,
        head_dim]`."""
        every = [pages for pair in self._pages for pages in pair]
        sizes = [num_tokens * pages[0, 0].numel() for pages in every]
        for pages, values in zip(every, module.split(sizes), strict=True):
            yield pages, values.view(num_tokens, *pages.shape[2:])

    def prefetch(self, modules: Iterable[tuple[Name, int]]) -> None:
        """Begin to read modules (name, tokens) from the disk that will be wanted."""
        for name, num_tokens in modules:
            here = name in self.reading or (self.host is not None and name in self.host)
            if not here and self._on_disk(name) and self.disk_pays(name, num_tokens):
                self._read(name, num_tokens)

    def _read(self, name: Name, num_tokens: int) -> Future[Tensor | None]:
        """Begin to read a module. What was read ahead and not used is dropped, oldest first."""
        future = self.reading.get(name)
        if future is None:
            future = self._thread.submit(self._timed_read, name, num_tokens)
            self.reading[name] = future
        while len(self.reading) > MOST_READ_AHEAD:
            self.reading.pop(next(iter(self.reading)))
        return future

    def _timed_read(self, name: Name, num_tokens: int) -> Tensor | None:
        assert self.disk is not None
        started = time.perf_counter()
        module = self.disk.get(name, self._num_values(num_tokens), self._dtype)
        if module is not None:
            module = module.pin_memory() if self._stream is not None else module
            self.bytes_per_second = module.nbytes / (time.perf_counter() - started)
            if self.host is not None and self.host.put(name, module):
                self.reading.pop(name, None)
        return module

    def load(self, run: ModuleRun) -> bool:
        """Copy a module to its run's pages before the next step; False if no tier has it whole."""
        name, num_tokens = _name(run), len(run.tokens)
        module = self.host.get(name) if self.host is not None else None
        if module is not None:
            self.reading.pop(name, None)
            self.stats.from_host_tokens += num_tokens
        else:
            module = self._from_disk(name, num_tokens)
            if module is None:
                return False
            self.stats.from_disk_tokens += num_tokens
        self._copy_in(run, module)
        return True

    def _from_disk(self, name: Name, num_tokens: int) -> Tensor | None:
        try:
            module = self._read(name, num_tokens).result()
        except (OSError, MemoryError, RuntimeError):
            module = None  # it is computed
        self.reading.pop(name, None)
        if module is None:
            self._damaged.add(name)
            self.stats.damaged += 1
        return module

    def _copy_in(self, run: ModuleRun, module: Tensor) -> None:
        slots = run.slots(0, len(run.tokens))
        if self._stream is None:
            where = slot_index(slots, self.device)
            for pages, values in self._parts(module, len(slots)):
                write_kv(pages, where, values)
            return
        self._copy_in_aside(slots, module)

    @torch.inference_mode()
    def _copy_in_aside(self, slots: np.ndarray, module: Tensor) -> None:
        """Copy after the steps that may still read these pages, and before the next step."""
        assert self._stream is not None
        main = torch.cuda.current_stream(self.device)
        cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        in_order = all(pages.is_contiguous() for pair in self._pages for pages in pair)
        scattered = len(cuts) - 1 > FEW_STRETCHES or not in_order
        where = torch.from_numpy(slots).pin_memory() if scattered else None
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            index = None if where is None else where.to(self.device, non_blocking=True)
            for pages, values in self._parts(module, len(slots)):
                if index is not None:
                    write_kv(pages, index, values.to(self.device, non_blocking=True))
                    continue
                flat = pages.view(-1, *pages.shape[2:])
                for a, b in pairwise(cuts):
                    first = int(slots[a])
                    flat[first : first + b - a].copy_(values[a:b], non_blocking=True)
        main.wait_stream(self._stream)

    def save_complete(self, modules: Iterable[ModuleRun | None]) -> None:
        """Keep those modules of a step's chunks that are complete with it."""
        for run in modules:
            if run is not None and run.complete and run.pages:
                self._save(run)

    def _save(self, run: ModuleRun) -> None:
        name = _name(run)
        to_host = self.host is not None and name not in self.host
        to_disk = self.disk is not None and not self._on_disk(name) and name not in self._writing
        if not run.kept or not (to_host or to_disk):
            return
        module, copied = self._copy_out(run)
        self.stats.saved_tokens += len(run.tokens)
        if to_host:
            assert self.host is not None
            self.host.put(name, module)
        if to_disk:
            self._writing[name] = self._thread.submit(self._write, name, module, copied)

    def _copy_out(self, run: ModuleRun) -> tuple[Tensor, torch.cuda.Event | None]:
        num_tokens = len(run.tokens)
        aside = self._stream is not None
        module = torch.empty(self._num_values(num_tokens), dtype=self._dtype, pin_memory=aside)
        slots = torch.from_numpy(run.slots(0, num_tokens)).to(self.device)
        for pages, values in self._parts(module, num_tokens):
            found = read_kv(pages, slots)
            if self._stream is None:
                values.copy_(found)
                continue
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                values.copy_(found, non_blocking=True)
            found.record_stream(self._stream)
        if self._stream is None:
            return module, None
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return module, copied

    def _write(self, name: Name, module: Tensor, copied: torch.cuda.Event | None) -> bool:
        assert self.disk is not None
        if copied is not None:
            copied.synchronize()
        written = self.disk.put(name, module)
        self.stats.not_written += not written
        self._damaged.discard(name)
        self._writing.pop(name, None)
        return written

    def forget(self) -> None:
        """Drop what is kept: the model has other weights. Files are for the checkpoint's weights,
        so the disk is not used any more."""
        self.flush()
        self.disk = None
        for future in self.reading.values():
            future.cancel()
        self._thread.submit(lambda: None).result()  # a file that is being read goes to the host
        self.reading.clear()
        if self.host is not None:
            self.host = HostStore(self.host.budget)

    def flush(self) -> None:
        """Wait until all that was saved is written."""
        for future in list(self._writing.values()):
            future.result()

    def close(self) -> None:
        """Write what was saved, and end the thread."""
        self.flush()
        self._thread.shutdown()


def _name(run: ModuleRun) -> Name:
    """Salt and key; the rest of a run's name is of one process."""
    return run.name[:2] if isinstance(run.name, tuple) else run.name
