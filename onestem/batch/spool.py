"""The spool: what the first pass over a job's input keeps for the run.

It is three files of records, so that no part of the job is held in memory:
* `ids`: int32, the token ids of all prompts, one after the other.
* `requests`: a line of JSON per input line: how to answer it, or why it cannot be answered.
* `lines`: eight int64 per input line (`LINE`).

What a disk has changed in them is found: each line's ids and record have a checksum (CRC-32) in
`lines`, and that file has one in the manifest. The first pass makes them again.

Blank lines have no record. A record's place in `lines` is its *index*, which counts from 0 and
orders the results. Its line number, for people, counts from 1 and includes blank lines.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from onestem.batch.results import derived_seed, result_id
from onestem.batch.workplace import Workplace
from onestem.errors import JobError
from onestem.openai.schema import Kind
from onestem.pml import CompiledPrompt
from onestem.request import Documents, Request, SamplingParams
from onestem.scores import ScoreTask

PIECE_BYTES = 1 << 20

LINE = np.dtype(
    [
        (name, np.int64)
        for name in ("line_number", "first_id", "num_ids", "record_start", "record_bytes",
                     "max_output", "ids_crc32", "record_crc32")
    ]
)  # fmt: skip
ID_BYTES = 4
NO_REQUEST = -1  # in `num_ids`: a line that gets an error object


CompilePml = Callable[[str, str], CompiledPrompt]  # markup and isolation to segments


@dataclass(frozen=True, kw_only=True)
class SpooledRequest:
    """A good line, without its token ids."""

    index: int
    line_number: int
    custom_id: str
    kind: Kind
    sampling: Mapping[str, Any]
    model: str | None = None
    return_token_ids: bool = False
    pml: str | None = None
    isolation: str = "anchored"
    documents: Mapping[str, Any] | None = None
    has_tools: bool = False
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_free: bool = True
    completions: Sequence[Sequence[int]] = ()
    whole: bool = False

    def task(self, prompt: Sequence[int]) -> ScoreTask | None:
        """The score task of a line that asks for scores, else None; `prompt`: its token ids."""
        return ScoreTask(prompt, self.completions, self.whole) if self.completions else None


@dataclass(frozen=True, kw_only=True)
class SpooledError:
    """A line that gets an error object."""

    index: int
    line_number: int
    custom_id: str | None
    code: str
    message: str


class DamagedSpoolError(JobError):
    """A file of the spool is not as it was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is not as it was written, twice: check the disk, or choose another output"
        )
        self.path = path


class Spool:
    """A finished spool, read by index. It stays on the disk, except for 8 bytes per line.

    What is read raises `DamagedSpoolError` where it is not as it was written.

    Attributes:
        line_numbers: `[num_lines]` line numbers in the input, rising.
        folder: of its files.
    """

    def __init__(self, place: Workplace, job: str, compile_pml: CompilePml | None = None) -> None:
        self.job, self.folder = job, place.folder
        self._compile_pml = compile_pml
        # An empty file cannot be mapped.
        is_empty = place.lines.stat().st_size == 0
        self._table: npt.NDArray[np.void] = (
            np.empty(0, LINE) if is_empty else np.asarray(np.memmap(place.lines, LINE, "r"))
        )
        self.line_numbers = np.ascontiguousarray(self._table["line_number"])
        self._requests = open(place.requests, "rb")  # noqa: SIM115 - closed by `close`
        self._ids = open(place.ids, "rb")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        """Close its files."""
        self._requests.close()
        self._ids.close()

    def __len__(self) -> int:
        return len(self._table)

    def index_of(self, line_number: int) -> int:
        """Index of a line that has a record."""
        return int(np.searchsorted(self.line_numbers, line_number))

    @property
    def num_ids(self) -> npt.NDArray[np.int64]:
        """`[num_lines]` prompt tokens of each request."""
        return self._table["num_ids"]

    @property
    def is_request(self) -> npt.NDArray[np.bool_]:
        """`[num_lines]` whether a line holds a request."""
        flags: npt.NDArray[np.bool_] = self.num_ids != NO_REQUEST
        return flags

    @property
    def max_output(self) -> npt.NDArray[np.int64]:
        """`[num_lines]` maximum tokens of all answers to a line together; 0: not given."""
        return self._table["max_output"]

    def output_lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """`max_output` of some lines for a planner, at least 1; None if no line gives it."""
        lengths = self.max_output[indices]
        return np.maximum(lengths, 1) if lengths.any() else None

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """`[num_prompt_tokens]` ids of a request."""
        line = self._table[index]
        first, count = ID_BYTES * int(line["first_id"]), ID_BYTES * int(line["num_ids"])
        return np.frombuffer(_checked(self._ids, first, count, line["ids_crc32"]), np.int32)

    def _record(self, index: int) -> dict[str, Any]:
        line = self._table[index]
        start, size = int(line["record_start"]), int(line["record_bytes"])
        raw = _checked(self._requests, start, size, line["record_crc32"])
        record: dict[str, Any] = json.loads(raw)
        return record | {"index": index, "line_number": int(line["line_number"])}

    def spooled_error(self, index: int) -> SpooledError:
        """The record of a line that gets an error object."""
        return SpooledError(**self._record(index))

    def spooled_request(self, index: int) -> SpooledRequest:
        """The record of a good line."""
        return SpooledRequest(**self._record(index))

    def request(self, index: int) -> Request:
        """The request of a good line."""
        spooled = self.spooled_request(index)
        compiled = None
        if spooled.pml is not None:
            assert self._compile_pml is not None  # else the line would have been refused
            compiled = self._compile_pml(spooled.pml, spooled.isolation)
        ids, documents = self.prompt(index), spooled.documents
        prompt = ids.tolist()
        task = spooled.task(prompt)
        return Request(
            request_id=result_id(self.job, spooled.line_number),
            prompt_token_ids=prompt,
            prompt_array=ids,
            params=self._params(spooled),
            pml=compiled,
            documents=None if documents is None else Documents.from_json(documents),
            paths=task.paths if task is not None else (),
        )

    def _params(self, line: SpooledRequest) -> SamplingParams:
        fields = dict(line.sampling)
        if fields.get("seed") is None:
            fields["seed"] = derived_seed(self.job, line.custom_id)
        return SamplingParams(**fields)


def _checked(file: IO[bytes], start: int, size: int, checksum: int) -> bytes:
    """Bytes of a spool's file."""
    raw = os.pread(file.fileno(), size, start)
    if len(raw) != size or zlib.crc32(raw) != checksum:
        raise DamagedSpoolError(Path(file.name))
    return raw


def spool_facts(place: Workplace) -> dict[str, int]:
    """Bytes of each of the spool's files, 0 for one that is missing; and the checksum of `lines`,
    which has those of the others. Reads that file."""
    paths = (place.ids, place.requests, place.lines)
    sizes = {path.name: path.stat().st_size if path.exists() else 0 for path in paths}
    return {**sizes, "lines_crc32": _crc32(place.lines) if sizes[place.lines.name] else 0}


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum
