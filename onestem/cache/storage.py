"""Keys and values of modules outside of the KV pages: host memory, and files on a disk.

A module is a flat tensor under a name. For each layer that has its own, it has the keys and then
the values, each `[num_tokens, num_kv_heads, head_dim]`. Both tiers have a budget and evict the
least recently used. A file names its model, dtype and module and carries checksums: a file that is
damaged, or of something else, is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onestem.errors import CacheError, ConfigError
from onestem.native import native

__all__ = ["DiskStore", "HostStore"]

FORMAT = "onestem module 2"
CHECKED_BYTES = 64 << 20  # for each checksum
PROBED_BYTES = 4 << 20
LEFTOVER_SECONDS = 3600.0  # no file takes so long to write
_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")


class HostStore:
    """Modules in host memory. Threads may share it.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self._modules: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def get(self, name: Hashable) -> Tensor | None:
        """A module `[num_values]`, which counts as used; None: it is not here."""
        with self._lock:
            module = self._modules.get(name)
            if module is not None:
                self._modules.move_to_end(name)
            return module

    def put(self, name: Hashable, module: Tensor) -> bool:
        """Keep a module `[num_values]`; False if it alone exceeds the budget."""
        if module.nbytes > self.budget:
            return False
        with self._lock:
            known = self._modules.pop(name, None)
            self.num_bytes += module.nbytes - (0 if known is None else known.nbytes)
            self._modules[name] = module
            while self.num_bytes > self.budget:
                _, oldest = self._modules.popitem(last=False)
                self.num_bytes -= oldest.nbytes
        return True


class DiskStore:
    """Modules in files of a folder. Several processes and models may share it.

    Args:
        folder: made if it does not exist.
        budget: bytes of all modules' files in it.
        identity: the model's weights, tokenizer and dtype; files of other models are not used.
    """

    def __init__(self, folder: Path, budget: int, identity: str) -> None:
        self.folder = folder
        self.budget = budget
        self.identity = identity
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"module_disk {folder} cannot be made: {error.strerror}") from error
        self._remove_leftovers()

    def path(self, name: Hashable) -> Path:
        """The file that holds a module, or would."""
        digest = hashlib.blake2b(f"{FORMAT}\0{self.identity}\0{name!r}".encode(), digest_size=16)
        return self.folder / f"{digest.hexdigest()}.safetensors"

    def __contains__(self, name: Hashable) -> bool:
        return self.path(name).is_file()

    def get(self, name: Hashable, num_values: int, dtype: torch.dtype) -> Tensor | None:
        """A module `[num_values]`; None: there is no file, or it is damaged or of another kind."""
        path = self.path(name)
        try:
            with native(str(path), CacheError), safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if any(metadata.get(k) != v for k, v in self._metadata(name).items()):
                    return None
                module = file.get_tensor("kv")
        except (OSError, SafetensorError, KeyError, CacheError):
            return None
        if module.shape != (num_values,) or module.dtype != dtype:
            return None
        if metadata.get("checksums") != _checksums(module):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return module

    def put(self, name: Hashable, module: Tensor) -> bool:
        """Write a module `[num_values]`: a reader finds all of it or nothing. False: no room."""
        if module.nbytes > self.budget:
            return False
        path = self.path(name)
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        metadata = {**self._metadata(name), "checksums": _checksums(module)}
        try:
            with native(str(part), CacheError):
                save_file({"kv": module}, part, metadata)
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        except (OSError, SafetensorError, CacheError):
            part.unlink(missing_ok=True)
            return False
        self._trim()
        return True

    def measure(self, name: Hashable) -> float | None:
        """Bytes per second, checksum included, of reading the first 4 MiB of a module's file; None
        if there is none."""
        started = time.perf_counter()
        try:
            with open(self.path(name), "rb") as file:
                data = file.read(PROBED_BYTES)
        except OSError:
            return None
        zlib.crc32(data)
        return len(data) / (time.perf_counter() - started)

    def _metadata(self, name: Hashable) -> dict[str, str]:
        named = hashlib.blake2b(repr(name).encode(), digest_size=16).hexdigest()
        return {"format": FORMAT, "identity": self.identity, "module": named}

    def files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of all modules' files, of any model, the oldest first."""
        found = []
        for path in self.folder.iterdir():
            if _FILE.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _remove_leftovers(self) -> None:
        """Remove files that killed processes left unfinished."""
        for part in self.folder.glob(".*.safetensors.*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > LEFTOVER_SECONDS:
                    part.unlink()

    def _trim(self) -> None:
        files = self.files()
        excess = sum(size for _, size, _ in files) - self.budget
        for _, size, path in files[:-1]:  # the newest was just written, and fits
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= size


def _checksums(module: Tensor) -> str:
    """CRC-32 of each `CHECKED_BYTES` of a module."""
    pieces = module.view(torch.uint8).split(CHECKED_BYTES)
    return " ".join(f"{zlib.crc32(piece.numpy().data):08x}" for piece in pieces)
