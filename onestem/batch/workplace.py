"""The files that a job keeps beside its output, their lock, and the job that they belong to.

For `-o OUT.jsonl`:

    OUT.jsonl.partial               one line per finished answer, in the order they finished
    OUT.jsonl.work/lock             held (flock) by the one process that works on OUT.jsonl
    OUT.jsonl.work/manifest.json    which job this is; written when the spool is complete
    OUT.jsonl.work/{ids,lines,requests}   the spool (see `spool`)
    OUT.jsonl.work/sums             a checksum of each answer (see `sums`)
    OUT.jsonl.work/suspects         lines that an engine had when it died; they are tried alone
    OUT.jsonl.work/journal          the answers without damaged ones, renamed to OUT.jsonl.partial
    OUT.jsonl.work/final            the answers in input order, renamed to OUT.jsonl

All of them are gone once OUT.jsonl is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from onestem.errors import JobError
from onestem.files import check_place
from onestem.request import WHITESPACE
from onestem.seeds import SAMPLER_VERSION

FORMAT = 1

# Options under which a job goes on whatever they were: answers that it has stay, and lines that it
# has not answered are checked again.
MAY_CHANGE = ("max_model_len",)


class DiskFullError(JobError):
    """A job's disk is full; nothing is wrong with the job."""


def is_full(error: OSError) -> bool:
    """Whether a disk, or somebody's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system (disk full, no permission) into one line with the file."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else path
        reason = error.strerror or str(error)
        kind = DiskFullError if is_full(error) else JobError
        raise kind(f"{name}: {reason}: mend that and give the same command again") from error


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """All that answers depend on. Runs with equal identities write equal bytes.

    Attributes:
        options: those that change answers (dtype, seed, ...), as JSON values.
    """

    input_sha256: str
    model: str
    model_name: str
    options: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """What a manifest says of the job, as JSON values."""
        return {
            "whitespace": WHITESPACE,
            "format": FORMAT,
            "input_sha256": self.input_sha256,
            "model": self.model,
            "model_name": self.model_name,
            "sampler": SAMPLER_VERSION,
            "options": dict(self.options),
        }

    @cached_property
    def job(self) -> str:
        """The job's name in ids: 16 hexadecimal digits of the identity's hash."""
        text = json.dumps(self.record(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What keeps this job from going on with work of the manifest `other`, in words.

        The model's name may differ, since it is in no answer; and the seed that the job began with
        stays where none is asked for (see `as_begun`).
        """
        mine = json.loads(json.dumps(self.record()))
        if any(mine[name] != other.get(name) for name in ("format", "whitespace")):
            return ["another version of the program wrote it"]
        found = []
        if mine["input_sha256"] != other.get("input_sha256"):
            found.append("the input has other content")
        if mine["model"] != other.get("model"):
            found.append(f"the model was {other.get('model')}, now {mine['model']}")
        if mine["sampler"] != other.get("sampler"):
            found.append("another version of the program, which draws other tokens, began it")
        theirs = other.get("options") or {}
        for name in sorted(mine["options"].keys() | theirs.keys()):
            was, now = theirs.get(name), mine["options"].get(name)
            may_change = name in MAY_CHANGE or (name == "seed" and now is None)
            if was != now and not may_change:
                found.append(f"{name} was {was}, now {now}")
        return found

    def as_begun(self, manifest: Mapping[str, Any]) -> JobIdentity:
        """This job as its manifest, without differences, has it: results that come go with those
        that are there."""
        return replace(self, model_name=manifest["model_name"], options=manifest["options"])


class Workplace:
    """Paths of the files of one output. Creating it makes no files."""

    def __init__(self, output: Path) -> None:
        # A symbolic link stays: the file that it points to is replaced.
        self.output = Path(os.path.realpath(output))
        self.partial = self.output.with_name(self.output.name + ".partial")
        self.folder = self.output.with_name(self.output.name + ".work")
        self.lock_file = self.folder / "lock"
        self.manifest = self.folder / "manifest.json"
        self.ids = self.folder / "ids"
        self.lines = self.folder / "lines"
        self.requests = self.folder / "requests"
        self.sums = self.folder / "sums"
        self.suspects = self.folder / "suspects"
        self.journal = self.folder / "journal"
        self.final = self.folder / "final"

    def check_output(self) -> None:
        """Raise `JobError` where no output can be."""
        check_place(self.output, "another output")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the output's lock; the kernel releases it however the process ends."""
        with file_errors(self.folder):
            lock = self._take_lock()
        try:
            yield
        finally:
            self._remove_if_unused()  # under the lock, so that no other process holds it
            os.close(lock)

    def _remove_if_unused(self) -> None:
        """Remove the folder if it holds nothing but the lock. Files of others stay."""
        with contextlib.suppress(OSError):
            if os.listdir(self.folder) == [self.lock_file.name]:
                self.lock_file.unlink()
                self.folder.rmdir()

    def _take_lock(self) -> int:
        while True:
            self.folder.mkdir(exist_ok=True)
            try:
                lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # a run that just finished has removed the folder
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise JobError(
                    f"another process is writing {self.output}: wait for it, "
                    "or choose another output"
                ) from error
            except OSError:
                os.close(lock)
                raise
            if self._is_current(lock):
                return lock
            os.close(lock)

    def _is_current(self, lock: int) -> bool:
        """Whether the locked file is still the one in the folder, not one removed meanwhile."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.lock_file))
        except FileNotFoundError:
            return False

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest; None: no first pass has been completed, or it is damaged."""
        return _unsealed(_read_json(self.manifest))

    def write_manifest(self, record: Mapping[str, Any]) -> None:
        """Write the manifest, whole or not at all. Its files must be on the disk already."""
        self._write_sealed(self.manifest, record)

    def read_suspects(self) -> frozenset[int]:
        """Line numbers that an engine had when it died. None are known where the file is damaged:
        lines are tried alone after the next death then."""
        found = (_unsealed(_read_json(self.suspects)) or {}).get("line_numbers", ())
        return frozenset(number for number in found if isinstance(number, int))

    def write_suspects(self, line_numbers: frozenset[int]) -> None:
        """Replace what `read_suspects` reads."""
        self._write_sealed(self.suspects, {"line_numbers": sorted(line_numbers)})

    def _write_sealed(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write a record with its checksum."""
        draft = path.with_suffix(".draft")
        sealed = {**record, SEAL: _checksum(record)}
        with open(draft, "wb") as file:
            file.write(json.dumps(sealed, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(self.folder)

    def publish(self) -> None:
        """Rename `final` to the output: readers see the old file or the whole new one."""
        os.replace(self.final, self.output)
        sync_folder(self.output.parent)

    def discard(self) -> None:
        """Remove answers and spool. The manifest goes last: it names the job as long as there are
        answers."""
        self.partial.unlink(missing_ok=True)
        self.discard_spool()

    def discard_spool(self) -> None:
        """Remove all but the lock, the answers, and what is known of them and of their job's
        lines."""
        known = () if self.partial.exists() else (self.sums, self.suspects)
        spool = (self.ids, self.lines, self.requests, self.journal)
        drafts = (self.suspects.with_suffix(".draft"), self.manifest.with_suffix(".draft"))
        for path in (self.final, *known, *spool, *drafts, self.manifest):
            path.unlink(missing_ok=True)


SEAL = "crc32"


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(dict(record), sort_keys=True).encode())


def _read_json(path: Path) -> Any:
    """What is in a file; None: no JSON, or there is no file."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _unsealed(record: Any) -> dict[str, Any] | None:
    """A record; None: it is damaged, or there is none."""
    if not isinstance(record, dict):
        return None
    seal = record.pop(SEAL, None)
    return record if seal == _checksum(record) else None


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
