"""Runs a job: an OpenAI batch file in, a result file out, whatever happens in between.

    OUT.jsonl is there, whole and in input order, or it is not there.

1. Hash the input, take the lock, and check for an existing OUT.jsonl or work on it, and its job.
2. First pass (`spool`): check and tokenise each line. Skipped where an earlier run has done it.
   A job whose first lines are all bad ends here and leaves nothing (`first_lines`).
3. Plan the lines without a result, pass them to the engine in that order, and append each result
   to OUT.jsonl.partial as it comes (`journal`).
4. Write the results in input order, rename that file to OUT.jsonl, remove the rest.

A process killed at any point continues with the same command. 1 and 2 depend on the input alone and
are repeated where incomplete, 3 goes on after the last whole line, 4 is repeated. Ids and seeds
come from the job and `custom_id`. So the file equals that of a run without interruption, as far as
the engine's answer to a request does not depend on what else is in its steps. (Other batches sum in
another order, so log-probabilities agree only to float32 rounding.) Lines that ended in an error
are not tried again.

Memory, beside that of tokenizer, planner and engine: about 100 bytes per line of the job, and tens
of MiB for a chunk of 256 lines or one line of 16 MiB. Token ids are read for planning, and again
when the engine pulls a request.
Disk: 4 bytes per prompt token, as much again while a job is planned, and twice the size of the
output at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onestem.batch.claim import Claim
from onestem.batch.first_lines import FirstLines
from onestem.batch.inputs import InputSurvey, JobInput
from onestem.batch.interface import (
    DIED_TWICE,
    EngineDiedError,
    IntArray,
    JobInterrupted,
    JobSummary,
    Planner,
    Progress,
    Run,
    SpooledPrompts,
)
from onestem.batch.journal import UNKNOWN, Journal, ResultCounts
from onestem.batch.lengths import OpenEnded
from onestem.batch.planned import PlannedLines
from onestem.batch.results import answer_line, error_line, split_result_id
from onestem.batch.spool import (
    CHUNK_LINES,
    CompilePml,
    DamagedSpoolError,
    Spool,
    SpooledError,
    SpooledRequest,
    Tokenizer,
    Validate,
    as_begun,
    spool_facts,
    write_spool,
)
from onestem.batch.workplace import JobIdentity, Workplace, file_errors
from onestem.errors import JobError
from onestem.openai.write import NotANumberError, ResponseFormat, answer_body, scores_body
from onestem.request import Request, RequestOutput, is_masked

__all__ = ["run_job"]

log = logging.getLogger(__name__)


def run_job(
    source: str | os.PathLike[str] | JobInput,
    output_path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None,
    validate: Validate,
    run: Run,
    planner: Planner | None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    model_identity: str,
    model_name: str,
    model_names: Collection[str] | None = None,
    options: Mapping[str, Any],
    token_bytes: Callable[[int], bytes] | None = None,
    compile_pml: CompilePml | None = None,
    force: bool = False,
    keep_going: bool = False,
    line_by_line: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
    on_first_error: Callable[[str], object] | None = None,
    on_warning: Callable[[str], object] = log.warning,
    on_open_ended: Callable[[OpenEnded], object] | None = None,
) -> JobSummary:
    """Run a job, or continue it, to its end.

    Args:
        source: a file of batch lines, or an input of another form.
        tokenizer: None: the model has none; then lines need token ids and results carry them.
        validate: raises `RequestError` for a request that can never be answered.
        run: the engine; planned lines are passed as `PlannedLines`. An output with finish_reason
            "error" becomes an error object, whose message is the `stop_reason` if that is text. An
            output with "abort" counts as not answered.
        planner: None: input order.
        max_model_len: at which answers end, whatever `max_tokens` says.
        max_num_seqs: what `validate` allows of answers to a prompt. Where this or `max_model_len`
            was another before, lines that have no answer are checked again.
        model_identity: differs whenever weights, config or tokenizer do.
        model_name: `model` in results.
        model_names: lines that name another model get an error. None: lines may name any, and
            results have `model_name`.
        options: all other options that change answers, by the names that users know; nothing that
            another start would draw or measure again.
        token_bytes: the bytes of a token, for log-probabilities.
        compile_pml: markup and isolation to segments; None: lines with `pml` get an error. Put its
            schemas in `options`.
        force: delete an output, or unfinished work on it, of another job. This job's own work is
            always continued.
        keep_going: continue even if none of the first 256 lines can be answered.
        line_by_line: read so in the first pass, not in chunks: progress says which line.
        on_progress: called before and after each chunk read, and for each line written.
        on_first_error: called in the first pass, at most once, with the first line that cannot be
            answered and the reason, in one line.
        on_warning: called with what was found damaged and is mended, in one line.
        on_open_ended: called after the first pass if there are requests without `max_tokens`.

    Raises:
        JobError: the job cannot start or go on; one line that says what to do.
        EngineDiedError: the engine died. The next run tries the engine's lines one at a time; a
            line with which the engine dies again gets an error object.
        JobInterrupted: Ctrl-C.
    """
    began = time.perf_counter()
    place = Workplace(Path(output_path))
    place.check_output()
    if not isinstance(source, JobInput):
        source = JobInput(source)
    _check_apart(source.path, place)
    with file_errors(source.path):
        survey = source.survey()
    identity = JobIdentity(
        input_sha256=survey.sha256,
        model=model_identity,
        model_name=model_name,
        options={**options, **source.identity},
    )
    job = _Job(
        source, place, survey, identity,
        tokenizer=tokenizer, validate=validate, run=run, planner=planner,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, model_names=model_names,
        token_bytes=token_bytes, compile_pml=compile_pml,
        tell=on_progress or (lambda progress: None), warn=on_warning,
        first_lines=FirstLines(source, keep_going=keep_going, tell=on_first_error),
        line_by_line=line_by_line,
        on_open_ended=on_open_ended,
    )  # fmt: skip
    summary = job.go(force)
    summary.seconds = time.perf_counter() - began
    return summary


def _check_apart(source: Path, place: Workplace) -> None:
    taken = (place.output, place.partial)
    real = Path(os.path.realpath(source))
    if real in taken or place.folder in real.parents:
        raise JobError(f"{source} is both input and output: choose another output")
    if real in place.output.parents and real.is_dir():
        raise JobError(f"{place.output} is inside of the input {source}: choose another output")


class _Job:
    """The steps of `run_job`, under the lock."""

    def __init__(
        self,
        source: JobInput,
        place: Workplace,
        survey: InputSurvey,
        identity: JobIdentity,
        *,
        tokenizer: Tokenizer | None,
        validate: Validate,
        run: Run,
        planner: Planner | None,
        max_model_len: int | None,
        max_num_seqs: int | None,
        model_names: Collection[str] | None,
        token_bytes: Callable[[int], bytes] | None,
        compile_pml: CompilePml | None,
        tell: Callable[[Progress], object],
        warn: Callable[[str], object],
        first_lines: FirstLines,
        line_by_line: bool,
        on_open_ended: Callable[[OpenEnded], object] | None,
    ) -> None:
        self._source, self._place = source, place
        self._survey, self._identity = survey, identity
        self._tokenizer, self._validate = tokenizer, validate
        self._run, self._planner = run, planner
        self._model_names = model_names
        self._checked = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        self._token_bytes, self._tell, self._warn = token_bytes, tell, warn
        self._compile_pml = compile_pml
        self._first_lines, self._on_open_ended = first_lines, on_open_ended
        self._chunk_lines = 1 if line_by_line else CHUNK_LINES
        self._summary = JobSummary(output=place.output, total=survey.num_lines)
        self._counts = ResultCounts()
        self._num_written = 0  # results of this run

    def go(self, force: bool) -> JobSummary:
        """Run it, alone in its place, to its end."""
        with self._place.locked():
            try:
                return self._go(force)
            except KeyboardInterrupt as error:
                raise JobInterrupted(self._how_to_go_on()) from error

    def _how_to_go_on(self) -> str:
        done, total = self._counts.done, self._summary.total
        return (
            f"interrupted: {done} of {total} lines are done and kept beside {self._place.output}: "
            "the same command goes on from there"
        )

    def _go(self, force: bool) -> JobSummary:
        with file_errors(self._place.output):
            claim = Claim(self._place, self._identity, self._checked["max_model_len"], self._warn)
            complete = claim.complete(self._survey.num_lines, force)
            if complete is not None:
                self._summary.resumed, self._summary.failed = complete.done, complete.failed
                self._summary.already_complete = True
                return self._summary
            claim.take(force)
            self._identity = claim.identity
        try:
            self._answer_all()
        except DamagedSpoolError as error:
            self._warn(f"{error.path} was damaged: the input is read again, answers are kept")
            with file_errors(self._place.output):
                self._place.write_manifest(self._identity.record())  # of no spool
            self._answer_all()
        with file_errors(self._place.output):
            self._place.publish()
            self._place.discard()
        return self._summary

    def _answer_all(self) -> None:
        """Read the input, where no earlier run has, and answer what has no answer."""
        began = time.perf_counter()
        with file_errors(self._place.output):
            self._read()
            identity = self._identity
            spool = Spool(self._place, identity.job, self._compile_pml, identity.whitespace)
        self._summary.read_seconds += time.perf_counter() - began
        with contextlib.closing(spool):
            self._tell_open_ended(spool)
            self._compute(spool)

    # -- first pass

    def _read(self) -> None:
        """Do the first pass, unless its complete result exists."""
        manifest = self._place.read_manifest()
        known = spool_facts(self._place) | self._checked
        if manifest is not None and manifest.get("spool") == known:
            return
        try:
            sha256, facts = write_spool(
                self._source,
                self._place,
                self._identity.job,
                tokenizer=self._tokenizer,
                validate=self._check,
                on_chunk=self._tell_read,
                chunk_lines=self._chunk_lines,
                first_lines=self._first_lines,
                max_model_len=self._checked["max_model_len"],
                model_names=self._model_names,
                compile_pml=self._compile_pml,
                parse_special=self._identity.parse_special,
            )
            if sha256 != self._identity.input_sha256:
                raise JobError(
                    f"{self._source.path} changed while it was read: give the command again"
                )
        except BaseException:
            if manifest is None:  # else it names the job of the answers
                self._place.discard_spool()
            raise
        self._place.write_manifest(self._identity.record() | {"spool": facts | self._checked})

    def _check(self, request: Request) -> None:
        """Refuse what can never be answered, read as the job began."""
        params = as_begun(request.params, self._identity.whitespace)
        if params is not request.params:
            request = replace(request, params=params)
        self._validate(request)

    def _tell_read(self, num_lines: int, num_bytes: int) -> None:
        self._tell(Progress(stage="read", done=num_bytes, total=self._survey.num_bytes))

    def _tell_open_ended(self, spool: Spool) -> None:
        most = self._checked["max_model_len"]
        if self._on_open_ended is None or most is None:
            return
        prompts = SpooledPrompts(spool, spool.is_request.nonzero()[0])
        found = OpenEnded.of(prompts, most)
        if found.requests:
            self._on_open_ended(found)

    # -- second pass

    def _compute(self, spool: Spool) -> None:
        journal = Journal(self._place, self._identity.job, spool.line_numbers)
        self._counts = journal.counts
        self._summary.resumed = journal.counts.done - self._num_written
        try:
            self._tell_damaged(journal)
            self._write_errors(spool, journal)
            self._write_answers(spool, journal)
            self._write_final(journal)
        finally:
            self._summary.failed = journal.counts.failed
            journal.close()

    def _tell_damaged(self, journal: Journal) -> None:
        self._summary.damaged += journal.num_damaged
        if journal.num_damaged:
            named = ", ".join(map(str, journal.damaged))
            more = ", ..." if journal.num_damaged > len(journal.damaged) else ""
            self._warn(
                f"{journal.path}: {journal.num_damaged} damaged lines (line {named}{more}) are "
                "dropped, and answered again"
            )

    def _write_errors(self, spool: Spool, journal: Journal) -> None:
        missing = journal.missing
        for index in missing[~spool.is_request[missing]]:
            bad = spool.spooled_error(int(index))
            journal.write(bad.index, self._error(bad, bad.code, bad.message), failed=True)
            self._num_written += 1
        self._tell_run(None)

    def _error(self, line: SpooledRequest | SpooledError, code: str, message: str) -> bytes:
        job = self._identity.job
        return error_line(job, line.line_number, line.custom_id, code, message)

    def _write_answers(self, spool: Spool, journal: Journal) -> None:
        """Answer all lines. Those that an engine had when it died come last, each alone."""
        missing = journal.missing
        is_suspect = np.isin(spool.line_numbers[missing], list(self._place.read_suspects()))
        parts = [missing[~is_suspect], *missing[is_suspect].reshape(-1, 1)]
        for part in parts:
            if len(part):
                self._write_answers_of(part, spool, journal)
        if len(journal.missing):
            raise JobError(
                f"the engine left {len(journal.missing)} of {len(spool)} lines of "
                f"{self._source.path} unanswered: the same command goes on with them"
            )

    def _write_answers_of(self, indices: IntArray, spool: Spool, journal: Journal) -> None:
        order = self._plan(spool, indices, journal)
        outputs = self._run(self._requests(spool, indices) if order is None else order)
        try:
            for output in outputs:
                if output.finished and not _ended(output, "abort"):
                    self._write_answer(spool, journal, output, order)
        except EngineDiedError as error:
            there = [_line_number(request_id) for request_id in error.there]
            raise self._note_death(spool, journal, frozenset(there), error) from error
        finally:
            close = getattr(outputs, "close", None)
            if close is not None:
                close()

    def _note_death(
        self, spool: Spool, journal: Journal, there: frozenset[int], error: EngineDiedError
    ) -> EngineDiedError:
        """Save the lines that the engine had when it died; those of an earlier death too get an
        error."""
        suspects = self._place.read_suspects()
        for line_number in sorted(there & suspects):
            line = spool.spooled_request(spool.index_of(line_number))
            message = f"{DIED_TWICE}: {error}"
            journal.write(line.index, self._error(line, "engine_died", message), failed=True)
        self._place.write_suspects(suspects | there)
        return EngineDiedError(
            f"the engine died while it answered {len(there)} lines of {self._source.path}: "
            f"{error}: the same command goes on, with these lines one at a time",
            error.there,
            num_settled=len(there & suspects),
        )

    def _requests(self, spool: Spool, indices: IntArray) -> Iterator[Request]:
        """The requests at `indices` in input order, made when they are pulled."""
        return (spool.request(int(index)) for index in indices)

    def _plan(self, spool: Spool, indices: IntArray, journal: Journal) -> PlannedLines | None:
        if self._planner is None or len(indices) < 2:
            return None
        began = time.perf_counter()
        order = PlannedLines(spool, indices, journal, self._planner)
        self._summary.plan = order.plan
        self._summary.plan_seconds = time.perf_counter() - began
        return order

    def _write_answer(
        self, spool: Spool, journal: Journal, output: RequestOutput, order: PlannedLines | None
    ) -> None:
        asked = spool.spooled_request(spool.index_of(_line_number(output.request_id)))
        line, failed = self._answer(asked, output)
        tokens = UNKNOWN if failed else output.metrics.num_output_tokens
        journal.write(asked.index, line, failed=failed, output_tokens=tokens)
        self._num_written += 1
        if order is not None and not failed:
            order.note(asked.index, tokens)
        self._summary.add(output)
        self._tell_run(output)

    def _answer(self, asked: SpooledRequest, output: RequestOutput) -> tuple[bytes, bool]:
        """The result line of an output, and whether it is an error."""
        if _ended(output, "error"):
            message = _engine_message(output)
            return self._error(asked, _error_code(message), message), True
        job = self._identity.job
        body = partial(self._body, asked=asked, output=output)
        try:
            return answer_line(job, asked.line_number, asked.custom_id, body), False
        except NotANumberError as error:
            return self._error(asked, "engine_error", str(error)), True

    def _body(self, name: str, asked: SpooledRequest, output: RequestOutput) -> dict[str, Any]:
        model = self._identity.model_name
        if self._model_names is not None and asked.model is not None:
            model = asked.model
        task = asked.task(output.prompt_token_ids)
        if task is not None:
            return scores_body(name, model, [(task, output.scores)])
        form = ResponseFormat(
            kind=asked.kind,
            model=model,
            logprobs=asked.sampling.get("logprobs"),
            return_token_ids=asked.return_token_ids or self._tokenizer is None,
            token_bytes=self._token_bytes,
            tools=self._tokenizer.tool_form if asked.has_tools and self._tokenizer else None,
            special_ids=self._tokenizer.special_ids if self._tokenizer else (),
            skips_special=asked.sampling.get("skip_special_tokens", True),
        )
        return answer_body(name, output, form)

    def _tell_run(self, last: RequestOutput | None) -> None:
        counts, total = self._counts, self._summary.total
        self._tell(
            Progress(stage="run", done=counts.done, total=total, failed=counts.failed, last=last)
        )

    # -- the end

    def _write_final(self, journal: Journal) -> None:
        with file_errors(self._place.final), open(self._place.final, "wb") as file:
            journal.copy_in_order(file)
            file.flush()
            os.fsync(file.fileno())
        counts = journal.counts
        self._tell(
            Progress(stage="write", done=counts.done, total=counts.done, failed=counts.failed)
        )


def _line_number(request_id: str) -> int:
    name = split_result_id(request_id)
    assert name is not None, f"a request of nobody: {request_id}"
    return name[1]


def _ended(output: RequestOutput, reason: str) -> bool:
    return any(sequence.finish_reason == reason for sequence in output.outputs)


def _error_code(message: str) -> str:
    if is_masked(message):
        return "invalid_request"
    return "engine_died" if message.startswith(DIED_TWICE) else "engine_error"


def _engine_message(output: RequestOutput) -> str:
    for sequence in output.outputs:
        if sequence.finish_reason == "error" and isinstance(sequence.stop_reason, str):
            return sequence.stop_reason
    return "the engine could not answer this request"
