"""Keys and values in files on a disk.

What is stored under a name are rows `[num_tokens, width]`: of each token the keys and then the
values in each layer that has its own; or one row that is a recurrent state. The folder has a
budget; the least recently used file goes first. A file tells its name and its model and carries
checksums: a file that is damaged, or of something else, is never used. Where ranks hold a model
together, each has a file of its own heads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT = "onestem kv 4"
PLACES = 509  # words of a checksum: a prime, since files and disks are damaged by pages
MOST_HEADER = 1 << 16  # bytes
WRITERS = 16  # stores that may fill what one of them has seen free
FREED = 32  # a full folder gets so much of its budget free again: a part
PARTS = ("kv", "tokens")
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
}  # as files name them
# What a killed process left unfinished counts as well, and goes in its turn.
_FILE = re.compile(
    r"\.?[0-9a-f]{32}(-[0-9a-f]{32}-\d+(-state)?)?(\.\d+-of-\d+)?\.safetensors(\.[0-9a-f-]+\.part)?"
)


class DiskStore:
    """Rows in files of a folder, for the user alone. Several processes and models may share it.

    Args:
        folder: made if it does not exist.
        budget: bytes of all files in it that stores have written.
        identity: what keys and values depend on besides what a name says; files of other models
            are not used.
        rank, size: of the ranks that hold the model together, whose part this is.

    Attributes:
        others: has other ranks do what is called ("read" or "put") with their part of rows of a
            name; returns what waits, and says whether all of them did it.
    """

    def __init__(
        self, folder: Path, budget: int, identity: str, rank: int = 0, size: int = 1
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.identity = identity
        self.rank = rank
        self.size = size
        self.others: Callable[[str, str, Tensor], Callable[[], bool]] = lambda *_: lambda: True
        self._has_failed = False
        self._unseen = 0  # bytes that are written before the folder is listed
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # a NUL byte is no error of the system's
            why = getattr(error, "strerror", error)
            raise ConfigError(f"disk_kv {str(folder)!r} cannot be made: {why}") from error

    @property
    def share(self) -> int:
        """Bytes of the budget for a rank's files."""
        return self.budget // self.size

    def path(self, name: str) -> Path:
        """The file of a name, if there is one."""
        return self.folder / (name + self._ending(self.rank))

    def _ending(self, rank: int) -> str:
        part = f".{rank}-of-{self.size}" if self.size > 1 else ""
        return f"{part}.safetensors"

    def _paths(self, name: str) -> list[Path]:
        """Of all ranks, which are on one machine."""
        return [self.folder / (name + self._ending(rank)) for rank in range(self.size)]

    def __contains__(self, name: str) -> bool:
        return all(map(os.path.isfile, self._paths(name)))  # no error where rights lack

    def read(self, name: str, kv: Tensor) -> bool:
        """Read what has a name into rows of that many tokens. False: a rank has no file, or it is
        damaged or of another kind; what is in the rows is not to be used."""
        others_read = self.others("read", name, kv)
        is_read = self._read(name, "kv", kv)
        if not others_read() or not is_read:
            return False
        with contextlib.suppress(OSError):
            os.utime(self.path(name))
        return True

    def tokens(self, name: str, count: int) -> Tensor | None:
        """The token ids, int32 `[count]`, that a file's keys and values are of."""
        tokens = torch.empty(count, dtype=torch.int32)
        return tokens if self._read(name, "tokens", tokens) else None

    def _read(self, name: str, part: str, into: Tensor) -> bool:
        """Read a part of a file to where it is wanted. Not from a mapped file: one that is cut
        meanwhile, or a sector that cannot be read, would end the process."""
        if name not in self:
            return False  # nor opened: what is no file may never answer
        try:
            with open(self.path(name), "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, MOST_HEADER)))
                metadata, here = header["__metadata__"], header[part]
                if any(metadata.get(k) != v for k, v in self._metadata(name).items()):
                    return False
                if (here["shape"], here["dtype"]) != (list(into.shape), DTYPES[into.dtype]):
                    return False
                ends = (header[name]["data_offsets"][1] for name in PARTS)
                if os.fstat(file.fileno()).st_size != 8 + length + max(ends):
                    return False
                file.seek(8 + length + here["data_offsets"][0])
                # In one call, and summed in one: between two the thread waits for the interpreter.
                if file.readinto(_bytes(into).data) != into.nbytes:
                    return False
        except (
            OSError, ValueError, LookupError, TypeError, AttributeError, struct.error,
            RecursionError,
        ):  # fmt: skip
            return False
        return bool(metadata.get(part) == _checksum(into))

    def put(self, name: str, kv: Tensor, tokens: Tensor) -> bool:
        """Write rows of tokens (int32 `[n]`): readers find all or nothing. False: no room."""
        if kv.nbytes > self.share:
            return False
        others_put = self.others("put", name, kv)
        is_written = self._write(name, kv, tokens)
        return others_put() and is_written

    def _write(self, name: str, kv: Tensor, tokens: Tensor) -> bool:
        """Write this rank's file; False: it is not there."""
        path = self.path(name)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        header: dict[str, object] = {}
        metadata, end = self._metadata(name), 0
        for one, tensor in zip(PARTS, (kv, tokens), strict=True):
            metadata[one] = _checksum(tensor)
            offsets = [end, end := end + tensor.nbytes]
            shape = list(tensor.shape)
            header[one] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        text += b" " * (-len(text) % 8)
        if self.rank == 0:
            self._make_room((8 + len(text) + end) * self.size)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # removed meanwhile
            with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for tensor in (kv, tokens):
                    file.write(_bytes(tensor).data)
            os.replace(part, path)  # without fsync: what a power failure damages is a miss
        except OSError as error:
            if not self._has_failed:  # once: what is not kept is computed
                log.warning("disk_kv %s cannot be written: %s", self.folder, error.strerror)
            self._has_failed = True
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        return True

    def discard(self, name: str) -> None:
        """Remove the files of a name, if they are there."""
        for path in self._paths(name):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _metadata(self, name: str) -> dict[str, str]:
        own = self.path(name).stem
        return {"format": FORMAT, "identity": self.identity, "name": own}

    def names(self) -> list[str]:
        """Of all files of this rank, of any model."""
        ending = self._ending(self.rank)
        every = (path.name for _, _, path in self.files())
        return [name.removesuffix(ending) for name in every if name.endswith(ending)]

    def files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of all stores' files, of any model and rank, the oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if _FILE.fullmatch(path.name):
                    with contextlib.suppress(OSError):
                        status = path.stat()
                        found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _make_room(self, coming: int) -> None:
        """Remove what would exceed the budget with the bytes that are written next. The folder,
        which may have very many files, is listed when this store's part of what was free is
        written."""
        self._unseen -= coming
        if self._unseen >= 0:
            return
        files = self.files()
        total = coming + sum(size for _, size, _ in files)
        most = self.budget if total <= self.budget else self.budget - self.budget // FREED
        for _, size, path in files:
            if total <= most:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        self._unseen = (self.budget - total) // WRITERS


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()


def _checksum(tensor: Tensor) -> str:
    """CRC-32 of the sums of all words by their place in rows of `PLACES`: as fast as memory is
    read. Any flipped bit changes one; so do words that change places, unless whole rows apart."""
    data = _bytes(tensor)
    whole = len(data) // (8 * PLACES) * 8 * PLACES
    sums = data[:whole].view(np.uint64).reshape(-1, PLACES).sum(0)
    return f"{zlib.crc32(sums.data, zlib.crc32(data[whole:].data)):08x}"
