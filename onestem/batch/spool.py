"""The first pass over a job's input: stream it, check it, tokenise it, keep what the run needs.

The spool is three files of records, so that no part of the job is held in memory:
* `ids`: int32, the token ids of all prompts, one after the other.
* `requests`: a line of JSON per input line: how to answer it, or why it cannot be answered.
* `lines`: eight int64 per input line (`COLUMNS`).

What a disk has changed in them is found: each line's ids and record have a checksum (CRC-32) in
`lines`, and that file has one in the manifest. The first pass makes them again.

Blank lines have no record. A record's place in `lines` is its *index*, which counts from 0 and
orders the results. Its line number, for people, counts from 1 and includes blank lines.

Memory of the pass: one chunk (at most `CHUNK_LINES` lines, and `CHUNK_BYTES` without its last
line), a line of at most `lines.MAX_LINE_BYTES`, and 16 to 32 bytes per line to detect equal
`custom_id`s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from onestem.batch.first_lines import FirstLines
from onestem.batch.format import BatchLine, BatchRequest, LineError, parse_line
from onestem.batch.guard import guarded
from onestem.batch.inputs import JobInput, Numbered
from onestem.batch.results import derived_seed, result_id
from onestem.batch.workplace import Workplace
from onestem.engine.grammar.earlier import as_earlier
from onestem.engine.grammar.schema import check_schema
from onestem.errors import JobError, OnestemError, RequestError
from onestem.openai.read import Prompt, unknown_model
from onestem.openai.schema import Kind
from onestem.openai.tools import ToolForm
from onestem.planner import Prompts
from onestem.pml import CompiledPrompt
from onestem.request import WHITESPACE, Request, SamplingParams, Whitespace
from onestem.scores import Encoder, ScoreTask

__all__ = [
    "CHUNK_LINES",
    "COLUMNS",
    "CompilePml",
    "DamagedSpoolError",
    "Spool",
    "SpooledError",
    "SpooledRequest",
    "Tokenizer",
    "Validate",
    "as_begun",
    "output_lengths",
    "spool_facts",
    "write_spool",
]

CHUNK_LINES = 256
CHUNK_BYTES = 4 << 20
PIECE_BYTES = 1 << 20

COLUMNS = (
    "line_number",
    "first_id",
    "num_ids",
    "record_start",
    "record_bytes",
    "max_output",
    "ids_crc32",
    "record_crc32",
)
LINE_NUMBER, FIRST_ID, NUM_IDS, RECORD_START, RECORD_BYTES, MAX_OUTPUT, IDS_CRC, RECORD_CRC = range(
    len(COLUMNS)
)
ID_BYTES = 4
HASH_BYTES = 16
NO_REQUEST = -1  # in `num_ids`: a line that gets an error object

NO_TOKENIZER = "the model has no tokenizer: give /v1/completions a prompt of token ids"


class Tokenizer(Encoder, Protocol):
    """The tokenizer that a job needs. Refused texts raise `RequestError`."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        fields: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a chat, up to where the answer begins."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of control tokens."""
        ...

    @property
    def tool_form(self) -> ToolForm | None:
        """The form in which the model writes tool calls."""
        ...

    def control_token(self, name: str, /) -> int | None:
        """The id of a control token."""
        ...


Validate = Callable[[Request], object]  # raises RequestError if no answer is possible
CompilePml = Callable[[str, str], CompiledPrompt]  # markup and isolation to segments
NO_SCHEMAS = "pml needs the schema that it names: give its file with --schema"


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
    has_tools: bool = False
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

    Args:
        whitespace: of the job's `JobIdentity`.

    Attributes:
        line_numbers: `[num_lines]` line numbers in the input, rising.
        folder: of its files.
    """

    def __init__(
        self,
        place: Workplace,
        job: str,
        compile_pml: CompilePml | None = None,
        whitespace: Whitespace | None = WHITESPACE,
    ) -> None:
        self.job, self.folder = job, place.folder
        self._whitespace = whitespace
        self._compile_pml = compile_pml
        self._table: npt.NDArray[np.int64] = _mapped(place.lines).reshape(-1, len(COLUMNS))
        self.line_numbers = np.ascontiguousarray(self._table[:, LINE_NUMBER])
        self._requests = open(place.requests, "rb")  # noqa: SIM115 - closed by `close`
        self._ids = open(place.ids, "rb")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
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
        return self._table[:, NUM_IDS]

    @property
    def is_request(self) -> npt.NDArray[np.bool_]:
        """`[num_lines]` whether a line holds a request."""
        flags: npt.NDArray[np.bool_] = self.num_ids != NO_REQUEST
        return flags

    @property
    def max_output(self) -> npt.NDArray[np.int64]:
        """`[num_lines]` maximum tokens of all answers to a line together; 0: not given."""
        return self._table[:, MAX_OUTPUT]

    def output_lengths(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """`max_output` of some lines for a planner, at least 1; None if no line gives it."""
        lengths = self.max_output[indices]
        return np.maximum(lengths, 1) if lengths.any() else None

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """`[num_prompt_tokens]` ids of a request."""
        first, count = ID_BYTES * self._table[index, FIRST_ID : NUM_IDS + 1]
        raw = _checked(self._ids, int(first), int(count), self._table[index, IDS_CRC])
        return np.frombuffer(raw, np.int32)

    def _record(self, index: int) -> dict[str, Any]:
        start, size = self._table[index, RECORD_START], self._table[index, RECORD_BYTES]
        raw = _checked(self._requests, int(start), int(size), self._table[index, RECORD_CRC])
        record: dict[str, Any] = json.loads(raw)
        return record | {"index": index, "line_number": int(self._table[index, LINE_NUMBER])}

    def spooled_error(self, index: int) -> SpooledError:
        return SpooledError(**self._record(index))

    def spooled_request(self, index: int) -> SpooledRequest:
        return SpooledRequest(**self._record(index))

    def request(
        self,
        index: int,
        *,
        group: int | None = None,
        group_prefix_tokens: int = 0,
        group_only: bool = False,
    ) -> Request:
        spooled = self.spooled_request(index)
        compiled = None
        if spooled.pml is not None:
            assert self._compile_pml is not None  # else the line would have been refused
            compiled = self._compile_pml(spooled.pml, spooled.isolation)
        plain = compiled is None  # a group shares a prefix, and modules are no prefixes
        ids = self.prompt(index)
        prompt = ids.tolist()
        task = spooled.task(prompt)
        return Request(
            request_id=result_id(self.job, spooled.line_number),
            prompt_token_ids=prompt,
            prompt_array=ids,
            params=self._params(spooled),
            pml=compiled,
            paths=task.paths if task is not None else (),
            group=group if plain else None,
            group_prefix_tokens=group_prefix_tokens if plain else 0,
            group_only=group_only and plain,
        )

    def _params(self, line: SpooledRequest) -> SamplingParams:
        fields = dict(line.sampling)
        if fields.get("seed") is None:
            fields["seed"] = derived_seed(self.job, line.custom_id)
        return as_begun(SamplingParams(**fields), self._whitespace)


def as_begun(params: SamplingParams, whitespace: Whitespace | None) -> SamplingParams:
    """Parameters of a line as the version reads them that began its job. `whitespace`: of the job's
    `JobIdentity`."""
    if whitespace is not None or params.response_format is None:
        return params
    return params.replace(response_format=as_earlier(params.response_format))


def _checked(file: IO[bytes], start: int, size: int, checksum: int) -> bytes:
    """Bytes of a spool's file."""
    raw = os.pread(file.fileno(), size, start)
    if len(raw) != size or zlib.crc32(raw) != checksum:
        raise DamagedSpoolError(Path(file.name))
    return raw


def _mapped(path: Path) -> npt.NDArray[np.int64]:
    """A file of int64; an empty one cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, np.int64)
    return np.asarray(np.memmap(path, np.int64, "r"))


@dataclass
class _Line:
    """A line during the first pass, which parses, tokenises and checks it."""

    number: int
    custom_id: str | None
    request: BatchRequest | None = None
    error: LineError | None = None
    ids: Sequence[int] = ()
    pml: CompiledPrompt | None = None
    task: ScoreTask | None = None

    def refuse(self, error: RequestError) -> None:
        if not isinstance(error, LineError):
            error = LineError("invalid_request", str(error), self.custom_id)
        self.error = error
        self.request = None


def write_spool(
    source: JobInput,
    place: Workplace,
    job: str,
    *,
    tokenizer: Tokenizer | None,
    validate: Validate,
    on_chunk: Callable[[int, int], object],
    first_lines: FirstLines,
    chunk_lines: int = CHUNK_LINES,
    max_model_len: int | None = None,
    model_names: Collection[str] | None = None,
    compile_pml: CompilePml | None = None,
    parse_special: bool | None = None,
) -> tuple[str, dict[str, int]]:
    """Do the first pass.

    Args:
        tokenizer: None: only prompts of token ids are accepted.
        validate: raises `RequestError` for a request that can never be answered.
        on_chunk: called before and after each chunk with the numbers of lines and bytes read.
        chunk_lines: at most, of a chunk.
        first_lines: sees all lines; it may refuse the job.
        max_model_len: at which answers end, whatever `max_tokens` says.
        model_names: of models that lines may name; None: any.
        compile_pml: None: lines with `pml` are refused.
        parse_special: of lines that do not say it; None: as `JobInput` has it.

    Returns:
        The input's sha256 as read now, and the spool's facts (`spool_facts`).
    """
    digest, num_bytes = hashlib.sha256(), 0

    def see(raw: bytes) -> None:
        nonlocal num_bytes
        digest.update(raw)
        num_bytes += len(raw)

    with (
        open(place.ids, "wb") as ids,
        open(place.requests, "wb") as requests,
        open(place.lines, "wb") as table,
    ):
        writer = _Writer(ids, requests, table, max_model_len)
        first_pass = _FirstPass(job, tokenizer, validate, compile_pml, model_names, parse_special)
        on_chunk(0, 0)
        for chunk in _chunks(source.read(see), chunk_lines):
            lines = first_pass.read(chunk)
            first_lines.see([(line.number, line.error) for line in lines])
            writer.write(lines)
            on_chunk(writer.num_lines, num_bytes)
        first_lines.end()
        for file in (ids, requests, table):
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest(), spool_facts(place)


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


def _chunks(lines: Iterator[Numbered], most: int) -> Iterator[list[Numbered]]:
    chunk: list[Numbered] = []
    num_bytes = 0
    for number, line in lines:
        chunk.append((number, line))
        num_bytes += len(line.raw) if isinstance(line, BatchLine) else 0
        if len(chunk) == most or num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


class _FirstPass:
    """Turns chunks of raw lines into requests with token ids, or errors."""

    def __init__(
        self,
        job: str,
        tokenizer: Tokenizer | None,
        validate: Validate,
        compile_pml: CompilePml | None,
        model_names: Collection[str] | None,
        parse_special: bool | None,
    ) -> None:
        self._job = job
        self._parse_special = parse_special
        self._model_names = model_names
        self._compile_pml = compile_pml
        self._tokenizer = tokenizer
        self._validate = validate
        self._seen = _Seen()

    def read(self, chunk: list[Numbered]) -> list[_Line]:
        lines = [self._parse(number, line) for number, line in chunk]
        self._refuse_duplicates([line for line in lines if line.custom_id is not None])
        self._tokenize([line for line in lines if line.request is not None])
        for line in lines:
            if line.request is not None:
                self._check(line, line.request)
        return lines

    def _parse(self, number: int, line: BatchLine | LineError) -> _Line:
        try:
            if isinstance(line, LineError):
                raise line
            request = parse_line(line, self._parse_special)
            self._check_model(request)
            return _Line(number, request.custom_id, request=self._held(request))
        except LineError as error:
            return _Line(number, error.custom_id, error=error)

    def _check_model(self, request: BatchRequest) -> None:
        name, names = request.asked.model, self._model_names
        if name is not None and names is not None and name not in names:
            message = unknown_model(name, names)
            raise LineError("model_not_found", message, request.custom_id)

    def _refuse_duplicates(self, named: list[_Line]) -> None:
        for line, seen in zip(named, self._seen.add([str(one.custom_id) for one in named])):
            if seen:
                message = "an earlier line has the same custom_id"
                line.refuse(LineError("duplicate_custom_id", message, line.custom_id))

    def _held(self, request: BatchRequest) -> BatchRequest:
        """The request with tools in the model's form."""
        tokenizer = self._tokenizer
        if request.asked.tools is None or tokenizer is None:
            return request
        try:
            held = guarded(request.asked.held)
            asked = held(tokenizer.tool_form, tokenizer.control_token, check_schema)
        except RequestError as error:
            raise LineError("invalid_request", str(error), request.custom_id) from error
        return dataclasses.replace(request, asked=asked)

    def _tokenize(self, lines: list[_Line]) -> None:
        """Tokenise texts of a chunk at once; if one is refused, each alone, to find out which."""
        texts = {}
        for line in lines:
            assert line.request is not None
            raw = line.request.prompt.raw
            if raw is not None and self._tokenizer is not None and not line.request.is_scored:
                texts[line.number] = raw
        encoded: Sequence[Sequence[int]] = []
        try:
            if self._tokenizer is not None:
                encoded = guarded(self._tokenizer.encode_batch)([*texts.values()])
        except RequestError:
            encoded, texts = [], {}
        ids = dict(zip(texts, encoded, strict=True))
        for line in lines:
            if line.number in ids:
                line.ids = ids[line.number]
                continue
            try:
                guarded(self._tokenize_one)(line)
            except RequestError as error:
                line.refuse(error)

    def _tokenize_one(self, line: _Line) -> None:
        assert line.request is not None
        prompt = line.request.prompt
        if line.request.is_scored:
            line.task = line.request.asked.task(0, self._tokenizer)
            line.ids = line.task.prompt
        elif prompt.pml is not None:
            line.pml = self._compiled(prompt.pml, prompt.isolation)
            line.ids = line.pml.ordered_token_ids.tolist()
        else:
            line.ids = self._ids(prompt)

    def _compiled(self, markup: str, isolation: str) -> CompiledPrompt:
        if self._compile_pml is None:
            raise RequestError(NO_SCHEMAS)
        try:
            return self._compile_pml(markup, isolation)
        except RequestError:
            raise
        except OnestemError as error:
            raise RequestError(str(error)) from error

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if self._tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        if prompt.messages is not None:
            return self._tokenizer.apply_chat_template(
                prompt.messages, **dataclasses.asdict(prompt.template)
            )
        assert prompt.raw is not None
        return self._tokenizer.encode_batch([prompt.raw])[0]

    def _check(self, line: _Line, request: BatchRequest) -> None:
        try:
            if len(line.ids) == 0:
                raise RequestError("prompt has no tokens")
            self._validate(
                Request(
                    request_id=result_id(self._job, line.number),
                    prompt_token_ids=line.ids,
                    params=request.asked.params,
                    pml=line.pml,
                    paths=line.task.paths if line.task is not None else (),
                )
            )
        except RequestError as error:
            line.refuse(error)


class _Seen:
    """Names that were seen before, of any length, as 16 bytes of a hash each. They are in sorted
    arrays, each more than twice as long as the next."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.bytes_]] = []

    def add(self, names: Sequence[str]) -> list[bool]:
        """Whether each name was seen before, in an earlier call or in this one."""
        hashes = [hashlib.sha256(name.encode()).digest()[:HASH_BYTES] for name in names]
        added = np.array(hashes, f"S{HASH_BYTES}")
        seen = np.ones(len(added), np.bool_)
        seen[np.unique(added, return_index=True)[1]] = False
        for known in self._arrays:
            at = np.minimum(np.searchsorted(known, added), len(known) - 1)
            seen |= known[at] == added
        fresh = np.sort(added[~seen])
        while self._arrays and len(self._arrays[-1]) <= 2 * len(fresh):
            fresh = np.sort(np.concatenate((self._arrays.pop(), fresh)), kind="stable")
        if len(fresh):
            self._arrays.append(fresh)
        found: list[bool] = seen.tolist()
        return found


class _Writer:
    """Appends lines to the three files of a spool."""

    def __init__(
        self, ids: IO[bytes], requests: IO[bytes], table: IO[bytes], max_model_len: int | None
    ) -> None:
        self._ids, self._requests, self._table = ids, requests, table
        self._max_model_len = max_model_len
        self._next_id = 0
        self._next_byte = 0
        self.num_lines = 0

    def write(self, lines: list[_Line]) -> None:
        rows = np.array([self._row(line) for line in lines], np.int64)
        self._table.write(rows.tobytes())
        self.num_lines += len(lines)

    def _row(self, line: _Line) -> list[int]:
        record = json.dumps(_record(line)).encode()
        self._requests.write(record + b"\n")
        num_ids, max_output, ids_crc = NO_REQUEST, 0, 0
        first_id, record_start = self._next_id, self._next_byte
        if line.request is not None:
            raw = np.asarray(line.ids, np.int32).tobytes()
            self._ids.write(raw)
            ids_crc = zlib.crc32(raw)
            num_ids = len(line.ids)
            room = None if self._max_model_len is None else self._max_model_len - num_ids
            max_output = _max_output(line.request.asked.params, room)
            self._next_id += num_ids
        self._next_byte += len(record) + 1
        place = [line.number, first_id, num_ids, record_start, len(record), max_output]
        return [*place, ids_crc, zlib.crc32(record)]


def _max_output(params: SamplingParams, room: int | None) -> int:
    """Maximum tokens of all answers to a request together; 0: not given. `room`: of each, in the
    model. It is capped beyond what any model can sample, so that sums over a job fit 64 bits."""
    if params.max_tokens is None:
        return 0
    longest = params.max_tokens if room is None else max(1, min(params.max_tokens, room))
    return min(params.n * longest, 2**31 - 1)


def output_lengths(
    prompts: Prompts, params: Iterable[SamplingParams], max_model_len: int
) -> list[int]:
    """Maximum tokens of all answers to each prompt, at least 1, for a planner."""
    return [
        max(1, _max_output(each, max_model_len - len(prompts[i]))) for i, each in enumerate(params)
    ]


def _record(line: _Line) -> dict[str, Any]:
    if line.request is None:
        assert line.error is not None
        error = line.error
        return {"custom_id": line.custom_id, "code": error.code, "message": str(error)}
    request = line.request
    asked, prompt = request.asked, request.prompt
    record: dict[str, Any] = {"custom_id": request.custom_id, "kind": asked.kind}
    if asked.model is not None:
        record["model"] = asked.model
    if asked.return_token_ids:
        record["return_token_ids"] = True
    if asked.tools is not None:
        record["has_tools"] = True
    if prompt.pml is not None:
        record |= {"pml": prompt.pml, "isolation": prompt.isolation}
    if line.task is not None:
        record |= {"completions": line.task.completions, "whole": line.task.whole}
    return record | {"sampling": dict(asked.sampling)}
