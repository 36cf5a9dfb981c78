"""The first pass over a job's input: stream it, check it, tokenise it, write the spool.

Memory: one chunk (at most `CHUNK_LINES` lines, and `CHUNK_BYTES` without its last line), a line of
at most `lines.MAX_LINE_BYTES`, and 16 to 32 bytes per line to detect equal `custom_id`s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onestem.batch.first_lines import FirstLines
from onestem.batch.format import BatchLine, BatchRequest, LineError, parse_line
from onestem.batch.guard import guarded
from onestem.batch.inputs import JobInput, Numbered
from onestem.batch.lines import Seen
from onestem.batch.results import result_id
from onestem.batch.spool import NO_REQUEST, CompilePml, spool_facts
from onestem.batch.workplace import Workplace
from onestem.engine.grammar.held import held_schema
from onestem.errors import OnestemError, RequestError
from onestem.openai.read import Prompt, unknown_model
from onestem.planner import Prompts
from onestem.pml import CompiledPrompt
from onestem.request import Documents, Request, SamplingParams
from onestem.scores import ScoreTask

if TYPE_CHECKING:
    from onestem.engine.text.bounded import BoundedTokenizer
    from onestem.engine.text.tokenizer import ChatIds

CHUNK_LINES = 256
CHUNK_BYTES = 4 << 20
HASH_BYTES = 16

NO_TOKENIZER = "the model has no tokenizer: give /v1/completions a prompt of token ids"
NO_SCHEMAS = "pml needs the schema that it names: give its file with --schema"

Validate = Callable[[Request], object]  # raises RequestError if no answer is possible


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a job's lines are read with.

    Attributes:
        tokenizer: None: the model has none; then lines need token ids and results carry them.
        validate: raises `RequestError` for a request that can never be answered.
        max_model_len: at which answers end, whatever `max_tokens` says.
        max_num_seqs: what `validate` allows of answers to a prompt.
        model_names: lines that name another model get an error. None: lines may name any.
        compile_pml: None: lines with `pml` get an error.
    """

    tokenizer: BoundedTokenizer | None
    validate: Validate
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    model_names: Collection[str] | None = None
    compile_pml: CompilePml | None = None

    @property
    def checked(self) -> dict[str, int | None]:
        """Limits of `validate`: where one changes, lines without an answer are checked again."""
        return {"max_num_seqs": self.max_num_seqs, "max_model_len": self.max_model_len}


@dataclass
class _Line:
    """A line during the first pass, which parses, tokenises and checks it."""

    number: int
    custom_id: str | None
    request: BatchRequest | None = None
    error: LineError | None = None
    ids: Sequence[int] = ()
    pml: CompiledPrompt | None = None
    documents: Documents | None = None
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
    rules: Rules,
    *,
    on_chunk: Callable[[int], object],
    first_lines: FirstLines,
    chunk_lines: int = CHUNK_LINES,
) -> tuple[str, dict[str, int]]:
    """Do the first pass.

    Args:
        on_chunk: called before and after each chunk with the number of bytes read.
        first_lines: sees all lines; it may refuse the job.
        chunk_lines: at most, of a chunk.

    Returns:
        The input's sha256 as read now, and the spool's facts (`spool_facts`).
    """
    seen = Seen()
    with (
        open(place.ids, "wb") as ids,
        open(place.requests, "wb") as requests,
        open(place.lines, "wb") as table,
    ):
        writer = _Writer(ids, requests, table, rules.max_model_len)
        first_pass = _FirstPass(job, rules, source.parse_special)
        on_chunk(0)
        for chunk in _chunks(source.read(seen), chunk_lines):
            lines = first_pass.read(chunk)
            first_lines.see([(line.number, line.error) for line in lines])
            writer.write(lines)
            on_chunk(seen.num_bytes)
        first_lines.end()
        for file in (ids, requests, table):
            file.flush()
            os.fsync(file.fileno())
    return seen.digest.hexdigest(), spool_facts(place)


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

    def __init__(self, job: str, rules: Rules, parse_special: bool | None) -> None:
        self._job, self._rules, self._parse_special = job, rules, parse_special
        self._tokenizer = rules.tokenizer
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
            held, chat = self._held(request)
            ids, documents = chat or ((), None)
            return _Line(number, request.custom_id, request=held, ids=ids, documents=documents)
        except LineError as error:
            return _Line(number, error.custom_id, error=error)

    def _check_model(self, request: BatchRequest) -> None:
        name, names = request.asked.model, self._rules.model_names
        if name is not None and names is not None and name not in names:
            message = unknown_model(name, names)
            raise LineError("model_not_found", message, request.custom_id)

    def _refuse_duplicates(self, named: list[_Line]) -> None:
        for line, seen in zip(named, self._seen.add([str(one.custom_id) for one in named])):
            if seen:
                message = "an earlier line has the same custom_id"
                line.refuse(LineError("duplicate_custom_id", message, line.custom_id))

    def _held(self, request: BatchRequest) -> tuple[BatchRequest, ChatIds | None]:
        """The request with tools in the model's form, and its ids where it had to be tokenised for
        that."""
        tokenizer = self._tokenizer
        if not request.asked.has_messages or tokenizer is None:
            return request, None
        try:
            ids = partial(_chat, tokenizer, request.prompt)
            asked, chat = guarded(tokenizer.held)(request.asked, held_schema, ids)
        except RequestError as error:
            raise LineError("invalid_request", str(error), request.custom_id) from error
        return dataclasses.replace(request, asked=asked), chat

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
            if line.ids:
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
        elif prompt.messages is not None:
            line.ids, line.documents = _chat(self._tokenizer, prompt)
        else:
            line.ids = self._ids(prompt)

    def _compiled(self, markup: str, isolation: str) -> CompiledPrompt:
        if self._rules.compile_pml is None:
            raise RequestError(NO_SCHEMAS)
        try:
            return self._rules.compile_pml(markup, isolation)
        except RequestError:
            raise
        except OnestemError as error:
            raise RequestError(str(error)) from error

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if self._tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        assert prompt.raw is not None
        return self._tokenizer.encode_batch([prompt.raw])[0]

    def _check(self, line: _Line, request: BatchRequest) -> None:
        try:
            if len(line.ids) == 0:
                raise RequestError("prompt has no tokens")
            self._rules.validate(
                Request(
                    request_id=result_id(self._job, line.number),
                    prompt_token_ids=line.ids,
                    params=request.asked.params,
                    pml=line.pml,
                    documents=line.documents,
                    paths=line.task.paths if line.task is not None else (),
                )
            )
        except RequestError as error:
            line.refuse(error)


def _chat(tokenizer: BoundedTokenizer | None, prompt: Prompt) -> ChatIds:
    """The ids of a conversation."""
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    assert prompt.messages is not None
    return tokenizer.chat(prompt.messages, **dataclasses.asdict(prompt.template))


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

    def write(self, lines: list[_Line]) -> None:
        rows = np.array([self._row(line) for line in lines], np.int64)
        self._table.write(rows.tobytes())

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
        record["texts"] = asked.tools.texts
    if not asked.is_free:
        record["is_free"] = False
    if prompt.pml is not None:
        record |= {"pml": prompt.pml, "isolation": prompt.isolation}
    if line.documents is not None:
        record["documents"] = dataclasses.asdict(line.documents)
    if line.task is not None:
        record |= {"completions": line.task.completions, "whole": line.task.whole}
    return record | {"sampling": dict(asked.sampling)}
