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
come from the job and `custom_id`. So the file equals that of a run without interruption, but for
log-probabilities, which agree to float32 rounding where steps were composed otherwise. Lines that
ended in an error are not tried again.

Memory, beside that of tokenizer, planner and engine: about 100 bytes per line of the job, and tens
of MiB for a chunk of lines. Disk: 4 bytes per prompt token, as much again while a job is planned,
and twice the size of the output at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onestem.batch.claim import Claim
from onestem.batch.first_lines import FirstLines
from onestem.batch.first_pass import CHUNK_LINES, Rules, write_spool
from onestem.batch.inputs import InputSurvey, JobInput
from onestem.batch.interface import (
    DIED_TWICE,
    EngineDiedError,
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
from onestem.batch.results import answer_line, error_line, line_number_of
from onestem.batch.spool import (
    DamagedSpoolError,
    Spool,
    SpooledError,
    SpooledRequest,
    spool_facts,
)
from onestem.batch.workplace import JobIdentity, Workplace, file_errors
from onestem.errors import JobError
from onestem.openai.forms import Reading
from onestem.openai.write import NotANumberError, ResponseFormat, answer_body, scores_body
from onestem.planner.sort import IntArray
from onestem.request import RequestOutput, is_masked

log = logging.getLogger(__name__)


def run_job(
    source: str | os.PathLike[str] | JobInput,
    output_path: str | os.PathLike[str],
    rules: Rules,
    *,
    run: Run,
    planner: Planner | None,
    model_identity: str,
    model_name: str,
    options: Mapping[str, Any],
    token_bytes: Callable[[int], bytes] | None = None,
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
        run: the engine; planned lines are passed as `PlannedLines`. An output with finish_reason
            "error" becomes an error object, whose message is the `stop_reason` if that is text. An
            output with "abort" counts as not answered.
        planner: None: input order.
        model_identity: differs whenever weights, config or tokenizer do.
        model_name: `model` in results of lines that name none, or where they may name any.
        options: all other options that change answers, by the names that users know; nothing that
            another start would draw or measure again. The schemas of `rules.compile_pml` are among
            them.
        token_bytes: the bytes of a token, for log-probabilities.
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
        source,
        place,
        survey,
        identity,
        rules,
        run,
        planner,
        token_bytes,
        FirstLines(source, keep_going=keep_going, tell=on_first_error),
        1 if line_by_line else CHUNK_LINES,
        on_progress or (lambda progress: None),
        on_warning,
        on_open_ended,
        JobSummary(output=place.output, total=survey.num_lines),
    )
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


@dataclass(eq=False)
class _Job:
    """The steps of `run_job`, under the lock.

    Attributes:
        counts: of the journal.
        num_written: results of this run.
    """

    source: JobInput
    place: Workplace
    survey: InputSurvey
    identity: JobIdentity
    rules: Rules
    run: Run
    planner: Planner | None
    token_bytes: Callable[[int], bytes] | None
    first_lines: FirstLines
    chunk_lines: int
    tell: Callable[[Progress], object]
    warn: Callable[[str], object]
    on_open_ended: Callable[[OpenEnded], object] | None
    summary: JobSummary
    counts: ResultCounts = field(default_factory=ResultCounts)
    num_written: int = 0

    def go(self, force: bool) -> JobSummary:
        """Run it, alone in its place, to its end."""
        with self.place.locked():
            try:
                return self._go(force)
            except KeyboardInterrupt as error:
                raise JobInterrupted(
                    f"interrupted: {self.counts.done} of {self.summary.total} lines are done and "
                    f"kept beside {self.place.output}: the same command goes on from there"
                ) from error

    def _go(self, force: bool) -> JobSummary:
        with file_errors(self.place.output):
            claim = Claim(self.place, self.identity, self.rules.max_model_len, self.warn)
            complete = claim.complete(self.survey.num_lines, force)
            if complete is not None:
                self.summary.resumed, self.summary.failed = complete.done, complete.failed
                self.summary.already_complete = True
                return self.summary
            claim.take(force)
            self.identity = claim.identity
        try:
            self._answer_all()
        except DamagedSpoolError as error:
            self.warn(f"{error.path} was damaged: the input is read again, answers are kept")
            with file_errors(self.place.output):
                self.place.write_manifest(self.identity.record())  # of no spool
            self._answer_all()
        with file_errors(self.place.output):
            self.place.publish()
            self.place.discard()
        return self.summary

    def _answer_all(self) -> None:
        """Read the input, where no earlier run has, and answer what has no answer."""
        began = time.perf_counter()
        with file_errors(self.place.output):
            self._read()
            spool = Spool(self.place, self.identity.job, self.rules.compile_pml)
        self.summary.read_seconds += time.perf_counter() - began
        with contextlib.closing(spool):
            self._tell_open_ended(spool)
            self._compute(spool)

    def _read(self) -> None:
        """Do the first pass, unless its complete result exists."""
        manifest = self.place.read_manifest()
        known = spool_facts(self.place) | self.rules.checked
        if manifest is not None and manifest.get("spool") == known:
            return
        try:
            sha256, facts = write_spool(
                self.source,
                self.place,
                self.identity.job,
                self.rules,
                on_chunk=self._tell_read,
                chunk_lines=self.chunk_lines,
                first_lines=self.first_lines,
            )
            if sha256 != self.identity.input_sha256:
                raise JobError(
                    f"{self.source.path} changed while it was read: give the command again"
                )
        except BaseException:
            if manifest is None:  # else it names the job of the answers
                self.place.discard_spool()
            raise
        self.place.write_manifest(self.identity.record() | {"spool": facts | self.rules.checked})

    def _tell_read(self, num_bytes: int) -> None:
        self.tell(Progress(stage="read", done=num_bytes, total=self.survey.num_bytes))

    def _tell_open_ended(self, spool: Spool) -> None:
        most = self.rules.max_model_len
        if self.on_open_ended is None or most is None:
            return
        prompts = SpooledPrompts(spool, spool.is_request.nonzero()[0])
        found = OpenEnded.of(prompts, most)
        if found.requests:
            self.on_open_ended(found)

    def _compute(self, spool: Spool) -> None:
        journal = Journal(self.place, self.identity.job, spool.line_numbers)
        self.counts = journal.counts
        self.summary.resumed = journal.counts.done - self.num_written
        try:
            self._tell_damaged(journal)
            self._write_errors(spool, journal)
            self._write_answers(spool, journal)
            self._write_final(journal)
        finally:
            self.summary.failed = journal.counts.failed
            journal.close()

    def _tell_damaged(self, journal: Journal) -> None:
        self.summary.damaged += journal.num_damaged
        if journal.num_damaged:
            named = ", ".join(map(str, journal.damaged))
            more = ", ..." if journal.num_damaged > len(journal.damaged) else ""
            self.warn(
                f"{journal.path}: {journal.num_damaged} damaged lines (line {named}{more}) are "
                "dropped, and answered again"
            )

    def _write_errors(self, spool: Spool, journal: Journal) -> None:
        missing = journal.missing
        for index in missing[~spool.is_request[missing]]:
            bad = spool.spooled_error(int(index))
            journal.write(bad.index, self._error(bad, bad.code, bad.message), failed=True)
            self.num_written += 1
        self._tell_run(None)

    def _error(self, line: SpooledRequest | SpooledError, code: str, message: str) -> bytes:
        job = self.identity.job
        return error_line(job, line.line_number, line.custom_id, code, message)

    def _write_answers(self, spool: Spool, journal: Journal) -> None:
        """Answer all lines. Those that an engine had when it died come last, each alone."""
        missing = journal.missing
        is_suspect = np.isin(spool.line_numbers[missing], list(self.place.read_suspects()))
        parts = [missing[~is_suspect], *missing[is_suspect].reshape(-1, 1)]
        for part in parts:
            if len(part):
                self._write_answers_of(part, spool, journal)
        if len(journal.missing):
            raise JobError(
                f"the engine left {len(journal.missing)} of {len(spool)} lines of "
                f"{self.source.path} unanswered: the same command goes on with them"
            )

    def _write_answers_of(self, indices: IntArray, spool: Spool, journal: Journal) -> None:
        planned = self._plan(spool, indices, journal)
        outputs = self.run(map(spool.request, indices.tolist()) if planned is None else planned)
        try:
            for output in outputs:
                if output.finished and not _ended(output, "abort"):
                    self._write_answer(spool, journal, output, planned)
        except EngineDiedError as error:
            raise self._note_death(spool, journal, error) from error
        finally:
            close = getattr(outputs, "close", None)
            if close is not None:
                close()

    def _note_death(
        self, spool: Spool, journal: Journal, error: EngineDiedError
    ) -> EngineDiedError:
        """Save the lines that the engine had when it died; those of an earlier death too get an
        error."""
        there = frozenset(map(line_number_of, error.there))
        suspects = self.place.read_suspects()
        for line_number in sorted(there & suspects):
            line = spool.spooled_request(spool.index_of(line_number))
            message = f"{DIED_TWICE}: {error}"
            journal.write(line.index, self._error(line, "engine_died", message), failed=True)
        self.place.write_suspects(suspects | there)
        return EngineDiedError(
            f"the engine died while it answered {len(there)} lines of {self.source.path}: "
            f"{error}: the same command goes on, with these lines one at a time",
            error.there,
            num_settled=len(there & suspects),
        )

    def _plan(self, spool: Spool, indices: IntArray, journal: Journal) -> PlannedLines | None:
        if self.planner is None or len(indices) < 2:
            return None
        began = time.perf_counter()
        planned = PlannedLines(spool, indices, journal, self.planner)
        self.summary.plan = planned.order.plan
        self.summary.plan_seconds = time.perf_counter() - began
        return planned

    def _write_answer(
        self, spool: Spool, journal: Journal, output: RequestOutput, planned: PlannedLines | None
    ) -> None:
        asked = spool.spooled_request(spool.index_of(line_number_of(output.request_id)))
        line, failed = self._answer(asked, output)
        tokens = UNKNOWN if failed else output.metrics.num_output_tokens
        journal.write(asked.index, line, failed=failed, output_tokens=tokens)
        self.num_written += 1
        if planned is not None and not failed:
            planned.note(asked.index, tokens)
        self.summary.add(output)
        self._tell_run(output)

    def _answer(self, asked: SpooledRequest, output: RequestOutput) -> tuple[bytes, bool]:
        """The result line of an output, and whether it is an error."""
        if _ended(output, "error"):
            message = _engine_message(output)
            return self._error(asked, _error_code(message), message), True
        job = self.identity.job
        body = partial(self._body, asked=asked, output=output)
        try:
            return answer_line(job, asked.line_number, asked.custom_id, body), False
        except NotANumberError as error:
            return self._error(asked, "engine_error", str(error)), True

    def _body(self, name: str, asked: SpooledRequest, output: RequestOutput) -> dict[str, Any]:
        model = self.identity.model_name
        if self.rules.model_names is not None and asked.model is not None:
            model = asked.model
        task = asked.task(output.prompt_token_ids)
        if task is not None:
            return scores_body(name, model, [(task, output.scores)])
        tokenizer = self.rules.tokenizer
        form = ResponseFormat(
            kind=asked.kind,
            model=model,
            logprobs=asked.sampling.get("logprobs"),
            return_token_ids=asked.return_token_ids or tokenizer is None,
            token_bytes=self.token_bytes,
            reading=self._reading(asked, output),
            special_ids=tokenizer.special_ids if tokenizer else (),
            skips_special=asked.sampling.get("skip_special_tokens", True),
        )
        return answer_body(name, output, form)

    def _reading(self, asked: SpooledRequest, output: RequestOutput) -> Reading | None:
        """How the answers of a line are read."""
        tokenizer = self.rules.tokenizer
        if asked.kind != "chat" or tokenizer is None or asked.pml is not None:
            return None
        texts = asked.texts if asked.has_tools else None
        return tokenizer.reading(output.prompt_token_ids, texts, is_free=asked.is_free)

    def _tell_run(self, last: RequestOutput | None) -> None:
        counts, total = self.counts, self.summary.total
        self.tell(
            Progress(stage="run", done=counts.done, total=total, failed=counts.failed, last=last)
        )

    def _write_final(self, journal: Journal) -> None:
        with file_errors(self.place.final), open(self.place.final, "wb") as file:
            journal.copy_in_order(file)
            file.flush()
            os.fsync(file.fileno())
        counts = journal.counts
        self.tell(
            Progress(stage="write", done=counts.done, total=counts.done, failed=counts.failed)
        )


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
