"""Batch jobs: their records, and each attempt to run one to its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from onestem.batch import EngineDiedError, JobInput, JobSummary, Planner, Progress, run_job
from onestem.batch.format import KIND_OF_URL, LineError, url_of
from onestem.batch.guard import ENDS, guarded
from onestem.batch.workplace import DiskFullError, is_full
from onestem.checked import check, show, without_nulls
from onestem.errors import JobError, OnestemError, RequestError, in_one_line
from onestem.jobs import schema_options
from onestem.openai.read import JsonError, read_object
from onestem.openai.schema import BatchBody
from onestem.request import Request, RequestOutput
from onestem.server.errors import ApiError, BusyError, EngineDownError, NoAnswerError
from onestem.server.link.client import EngineClient
from onestem.server.logs import log
from onestem.server.objects.files import check_room, count_lines, counts_in, keep_output
from onestem.server.objects.reading import Reading
from onestem.server.objects.schemas import Schemas
from onestem.server.objects.store import OPEN_STATUSES, Row, Store
from onestem.server.objects.tenants import Tenant

__all__ = [
    "JobAttempt",
    "JobModel",
    "Jobs",
    "StoppedError",
    "Told",
    "counts_of",
    "error_list",
    "in_thread",
    "new_batch",
    "now",
]

MOST_DEATHS = 3  # maximum deaths of the engine without an answer of the job in between
LONGEST_PAUSE = 30.0  # where the store fails
SCHEMAS, READING = "schemas.json", "reading.json"


@dataclasses.dataclass(frozen=True)
class JobModel:
    """What a job's answers depend on of the model, as in `onestem batch`."""

    tokenizer: Any
    identity: str
    name: str
    names: Collection[str]  # that lines may give
    options: Mapping[str, Any]
    planner: Planner
    max_model_len: int
    max_num_seqs: int | None


class Jobs:
    """All batches of a server.

    Args:
        check: raises `RequestError` for a request that can never be answered.
        tenant: the holder of a name.
        most_bytes: of a key's files in all.
    """

    def __init__(
        self,
        store: Store,
        client: EngineClient,
        schemas: Schemas,
        model: Callable[[], JobModel],
        check: Callable[[Request], object],
        tenant: Callable[[str], Tenant],
        most_bytes: int,
    ) -> None:
        self._tenant = tenant
        self._most_bytes = most_bytes
        self._store = store
        self._client = client
        self._schemas = schemas
        self._model = model
        self._check = check
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._active: tuple[str, JobAttempt] | None = None
        self._last_owner = ""
        self._stopping = False
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------- API

    async def create(self, tenant: Tenant, body: Mapping[str, Any]) -> Row:
        record = new_batch(body)
        file = await asyncio.to_thread(self._store.file, tenant.name, record["input_file_id"])
        if file is None:
            raise ApiError(
                404,
                f"there is no file {show(record['input_file_id'])}",
                param="input_file_id",
                code="not_found",
            )
        await asyncio.to_thread(check_room, self._store, tenant.name, self._most_bytes)
        markups = self._schemas.markups(tenant)
        await asyncio.to_thread(self._keep_new, tenant.name, record, markups)
        self._wake.set()
        return record

    def _keep_new(self, owner: str, record: Row, markups: list[str]) -> None:
        """Store a new job, with the schemas that exist now."""
        kept = self._place(record["id"]).with_name(SCHEMAS)
        kept.parent.mkdir(parents=True)
        with open(kept, "w") as file:
            json.dump(markups, file)
            file.flush()
            os.fsync(file.fileno())  # as the record is
        self._store.save_batch(record["id"], owner, record)

    async def find(self, tenant: Tenant, batch_id: str) -> Row:
        record = await asyncio.to_thread(self._store.batch, tenant.name, batch_id)
        if record is None:
            raise ApiError(404, f"there is no batch {show(batch_id)}", code="not_found")
        return record

    async def cancel(self, tenant: Tenant, batch_id: str) -> Row:
        await self.find(tenant, batch_id)
        record = await asyncio.to_thread(self._mark_cancelling, tenant.name, batch_id)
        if self._active is not None and self._active[0] == batch_id:
            self._active[1].stop(StoppedError("cancelled"))
        else:  # its turn may be far away
            await self._cancelled(tenant.name, batch_id)
            record = await self.find(tenant, batch_id)
        self._wake.set()
        return record

    async def check_unused(self, file_id: str) -> None:
        """Raise a 409 if a batch that has not ended reads a file."""
        for _, record in await asyncio.to_thread(self._store.open_batches):
            if record["input_file_id"] == file_id:
                raise ApiError(
                    409,
                    f"the file is the input of {record['id']}: cancel that batch first",
                    code="file_in_use",
                )

    def _mark_cancelling(self, owner: str, batch_id: str) -> Row:
        with self._lock:
            record = self._store.batch(owner, batch_id)
            assert record is not None
            if record["status"] not in ("validating", "in_progress", "cancelling"):
                raise ApiError(
                    409, f"the batch is {record['status']}: it cannot be cancelled any more"
                )
            return self._save(owner, record, status="cancelling", cancelling_at=now())

    def _save(self, owner: str, record: Row, **changes: Any) -> Row:
        record = {**record, **changes}
        self._store.save_batch(record["id"], owner, record)
        return record

    # ------------------------------------------------------------------------- life

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop the running job; the next start goes on with it."""
        self._stopping = True
        self._wake.set()
        if self._active is not None:
            self._active[1].stop(StoppedError("the server is stopping"))
        if self._task is not None:
            await self._task

    def wake(self) -> None:
        """Go on: an engine is ready."""
        self._wake.set()

    async def _work(self) -> None:
        deaths: dict[str, int] = {}
        pause = 0.0
        while not self._stopping:
            try:
                await self._turn(deaths)
                pause = 0.0
            except (*ENDS, asyncio.CancelledError):
                raise
            except BaseException as error:  # a full disk, say: no batch is to blame
                pause = min(2 * pause + 0.5, LONGEST_PAUSE)
                log.exception("jobs_wait", error, seconds=pause)
                await self._woken(pause)

    async def _turn(self, deaths: dict[str, int]) -> None:
        """Run the next batch, or wait for one."""
        self._wake.clear()
        chosen = await asyncio.to_thread(self._choose)
        if chosen is None or self._client.supervisor.state != "running":
            await self._wake.wait()
            return
        owner, record = chosen
        try:
            await self._attempt(owner, record["id"], deaths)
        except (DiskFullError, sqlite3.Error):
            raise
        except Exception as error:
            if isinstance(error, OSError) and is_full(error):
                raise
            log.exception("job_failed", error, job=record["id"])
            await self._failed(owner, record["id"], "internal", in_one_line(error))

    async def _woken(self, seconds: float) -> None:
        """Wait until there is news, for at most some seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    def _choose(self) -> tuple[str, Row] | None:
        """The oldest open batch of the next key after that of the last batch."""
        oldest: dict[str, Row] = {}
        for owner, record in self._store.open_batches():
            oldest.setdefault(owner, record)
        if not oldest:
            return None
        later = sorted(oldest, key=lambda owner: (owner <= self._last_owner, owner))
        return later[0], oldest[later[0]]

    async def _attempt(self, owner: str, batch_id: str, deaths: dict[str, int]) -> None:
        self._last_owner = owner
        reading = Reading(self._place(batch_id).with_name(READING))
        loop = asyncio.get_running_loop()
        run = JobAttempt(batch_id, self._client, loop, self._tenant(owner), reading)
        self._active = (batch_id, run)  # a cancel from now on stops the attempt
        try:
            if self._stopping:
                return
            record = await asyncio.to_thread(self._store.batch, owner, batch_id)
            if record is None or record["status"] not in OPEN_STATUSES:
                return  # it was cancelled before
            if record["status"] == "cancelling":
                await self._cancelled(owner, batch_id)
                return
            if record["status"] == "finalizing" and not self._place(batch_id).exists():
                # The server died after it had made the output a file.
                await self._completed(owner, batch_id, record["request_counts"])
                return
            if self._place(batch_id).exists():  # whole: it died before
                counts = await asyncio.to_thread(counts_in, self._place(batch_id))
                await self._completed(owner, batch_id, counts)
                return
            run.check()
            log.info("job_started", job=batch_id, key=owner or None)
            if record["status"] == "validating":
                reading.begin()
            summary = await in_thread(partial(self._run_job, owner, record, run, reading))
            counts = {"total": summary.total, "completed": summary.ok, "failed": summary.failed}
            await self._completed(owner, batch_id, counts)
        except StoppedError:
            if not self._stopping:
                await self._cancelled(owner, batch_id)
        except (EngineDownError, EngineDiedError) as error:
            goes_on = run.num_answered or getattr(error, "num_settled", 0)
            deaths[batch_id] = 1 if goes_on else deaths.get(batch_id, 0) + 1
            if deaths[batch_id] >= MOST_DEATHS:
                why = f"the engine died {MOST_DEATHS} times without an answer of this job"
                await self._failed(owner, batch_id, "engine_down", why)
        except DiskFullError:
            raise
        except (OnestemError, ApiError) as error:
            await self._failed(owner, batch_id, "job_error", str(error))
        finally:
            reading.end()
            self._active = None

    def _place(self, batch_id: str) -> Path:
        return self._store.work / batch_id / "output.jsonl"

    def _partial(self, batch_id: str) -> Path:
        """What is answered of a batch that has not ended."""
        place = self._place(batch_id)
        return place.with_name(place.name + ".partial")

    def _run_job(self, owner: str, record: Row, run: JobAttempt, reading: Reading) -> JobSummary:
        source = self._store.files / record["input_file_id"]
        if record["status"] == "validating":
            _check_urls(source, record["endpoint"], run)
        model = self._model()
        place = self._place(record["id"])
        markups = json.loads(place.with_name(SCHEMAS).read_text())
        told = Told(partial(self._note_progress, owner, record["id"]), reading.note)
        return run_job(
            source,
            place,
            tokenizer=model.tokenizer,
            validate=partial(run.validate, self._check),
            run=run,
            planner=model.planner,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
            model_identity=model.identity,
            model_name=model.name,
            model_names=model.names,
            options={**model.options, **schema_options(markups)},
            compile_pml=self._schemas.compiler(markups),
            token_bytes=model.tokenizer.token_bytes if model.tokenizer is not None else None,
            on_progress=told,
            on_warning=lambda what: log.warning("job_mended", job=record["id"], what=what),
            keep_going=True,
            line_by_line=reading.line_by_line,
        )

    def _note_progress(self, owner: str, batch_id: str, progress: Progress) -> None:
        """Save how far a batch is; raises `ApiError` where its key's files take too much."""
        if progress.stage == "run":
            answers = self._partial(batch_id)
            size = answers.stat().st_size if answers.exists() else 0
            check_room(self._store, owner, self._most_bytes, size)
        with self._lock:
            record = self._store.batch(owner, batch_id)
            if record is None or record["status"] not in ("validating", "in_progress"):
                return
            changes: dict[str, Any] = {"request_counts": counts_of(progress)}
            if record["status"] == "validating":
                changes |= {"status": "in_progress", "in_progress_at": now()}
            self._save(owner, record, **changes)

    # ------------------------------------------------------------------------- endings

    async def _completed(self, owner: str, batch_id: str, counts: Mapping[str, int]) -> None:
        await asyncio.to_thread(self._finalize, owner, batch_id, counts)
        log.info("job_completed", job=batch_id, **counts)

    def _finalize(self, owner: str, batch_id: str, counts: Mapping[str, int]) -> None:
        """Each step can be repeated after a crash and then changes nothing."""
        with self._lock:
            record = self._store.batch(owner, batch_id)
            assert record is not None
            record = self._save(
                owner,
                record,
                status="finalizing",
                finalizing_at=now(),
                request_counts=dict(counts),
            )
            place = self._place(batch_id)
            output, errors = keep_output(self._store, owner, batch_id, place)
            self._save(
                owner,
                record,
                status="completed",
                completed_at=now(),
                output_file_id=output,
                error_file_id=errors,
            )
            shutil.rmtree(place.parent, ignore_errors=True)

    async def _cancelled(self, owner: str, batch_id: str) -> None:
        ended = {"status": "cancelled", "cancelled_at": now()}
        await asyncio.to_thread(self._end_early, owner, batch_id, ended)
        log.info("job_cancelled", job=batch_id)

    async def _failed(self, owner: str, batch_id: str, code: str, message: str) -> None:
        errors = error_list(code, message)
        ended = {"status": "failed", "failed_at": now(), "errors": errors}
        await asyncio.to_thread(self._end_early, owner, batch_id, ended)
        log.warning("job_ended", job=batch_id, status="failed", error=message)

    def _end_early(self, owner: str, batch_id: str, changes: Mapping[str, Any]) -> None:
        """End a cancelled or failed batch; what was answered before is its output."""
        with self._lock:
            record = self._store.batch(owner, batch_id)
            assert record is not None
            if record["status"] not in OPEN_STATUSES:
                return  # it has ended
            output, errors = keep_output(self._store, owner, batch_id, self._partial(batch_id))
            num_failed = count_lines(self._store, errors)
            counts = {
                **record["request_counts"],
                "completed": count_lines(self._store, output) - num_failed,
                "failed": num_failed,
            }
            files = {"output_file_id": output, "error_file_id": errors}
            self._save(owner, record, request_counts=counts, **files, **changes)
        shutil.rmtree(self._place(batch_id).parent, ignore_errors=True)


def _check_urls(source: Path, endpoint: str, run: JobAttempt) -> None:
    """Check that all lines name the batch's endpoint. Other bad lines get their errors later."""
    for number, line in JobInput(source).read(lambda _: run.check()):
        if isinstance(line, LineError):
            continue  # it is too long to be read
        try:
            url = url_of(read_object(line.raw))
        except JsonError:
            continue
        if url in KIND_OF_URL and url != endpoint:
            raise JobError(f"line {number}: url is {url}, the batch's endpoint is {endpoint}")


# ----------------------------------------------------------------------------- batch records
# A batch as OpenAI's API shows it.


def counts_of(progress: Progress) -> dict[str, int]:
    return {
        "total": progress.total,
        "completed": progress.done - progress.failed,
        "failed": progress.failed,
    }


def error_list(code: str, message: str) -> Row:
    entry = {"code": code, "message": message, "param": None, "line": None}
    return {"object": "list", "data": [entry]}


def now() -> int:
    return int(time.time())


TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def new_batch(body: Mapping[str, Any]) -> Row:
    asked = check(BatchBody, without_nulls(body))
    return {
        "id": f"batch_{os.urandom(12).hex()}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now(),
        **dict.fromkeys(TIMES),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked.metadata,
    }


# ----------------------------------------------------------------------------- job attempt
# One attempt at a job: `run_job` in a thread of its own, answered by the engine process.

WINDOW = 512  # requests of a job that the engine process holds and has not taken
PROGRESS_SECONDS = 1.0
PREPARE_SECONDS = 600.0  # for a line's grammar, behind those of others
PAUSES = (10.0, 60.0)  # before each further try to have it compiled, where the machine is busy

T = TypeVar("T")


class StoppedError(Exception):
    """The server is stopping, or the job was cancelled."""


class _Sink:
    """Carries a job's outputs from the event loop to its thread."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[RequestOutput | Exception | int] = queue.SimpleQueue()

    def on_output(self, output: RequestOutput) -> None:
        self.inbox.put(output)

    def on_pulled(self, count: int) -> None:
        self.inbox.put(count)

    def on_down(self) -> None:
        self.inbox.put(EngineDiedError("the engine process ended"))


class JobAttempt:
    """One attempt at a job, in its thread."""

    def __init__(
        self,
        batch_id: str,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,
        owner: Tenant,
        reading: Reading,
    ) -> None:
        self._name = batch_id
        self._client = client
        self._loop = loop
        self._owner = owner
        self._reading = reading
        self._waits: Future[Any] | None = None
        self._sink = _Sink()
        self._stop: Exception | None = None
        self.num_answered = 0

    def stop(self, reason: Exception) -> None:
        self._stop = reason
        self._sink.inbox.put(reason)
        waits = self._waits
        if waits is not None:
            waits.cancel()

    def check(self) -> None:
        if self._stop is not None:
            raise self._stop

    def _on_loop(self, call: Callable[..., T], *arguments: Any) -> T:
        async def run() -> T:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _result(self, waited_for: Coroutine[Any, Any, T]) -> T:
        """What the loop comes to, however long that takes; `stop` ends it."""
        self._waits = asyncio.run_coroutine_threadsafe(waited_for, self._loop)
        try:
            self.check()
            return self._waits.result()
        except CancelledError:
            self.check()
            raise
        finally:
            self._waits.cancel()
            self._waits = None

    def validate(self, check: Callable[[Request], object], request: Request) -> None:
        """Have the engine validate a request and compile its grammar. A failure to do so is the
        line's error, unless the engine is gone. One of a busy machine is tried again.

        Raises:
            RequestError: the line cannot be answered; EngineDownError: the engine is not there.
        """
        self.check()
        guarded(check)(request)
        if request.params.response_format is None and request.pml is None:
            return
        with self._reading.elsewhere():
            for pause in (*PAUSES, None):
                try:
                    self._prepare(request)
                    return
                except (BusyError, NoAnswerError) as error:
                    if pause is None:
                        tries = len(PAUSES) + 1
                        raise RequestError(f"{error.message} (tried {tries} times)") from error
                    log.warning("line_waits", job=self._name, error=error.message, seconds=pause)
                    self._result(asyncio.sleep(pause))

    def _prepare(self, request: Request) -> None:
        owner, most = self._owner, PREPARE_SECONDS
        asked = self._client.ask("validate", request, most, key=owner.name, weight=owner.weight)
        try:
            self._result(asked)
        except (EngineDownError, BusyError, NoAnswerError):
            raise
        except ApiError as error:
            raise RequestError(error.message) from error

    def __call__(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Hand requests over as there is room for them, yield outputs as they come."""
        source = iter(requests)
        names: dict[str, str] = {}
        self._sink = _Sink()  # news of an earlier call concern nobody
        sent = pulled = 0
        exhausted = False
        self._on_loop(self._client.jobs.open, self._name, self._sink)
        try:
            while not exhausted or names:
                if not exhausted and sent - pulled <= WINDOW // 2:
                    more = list(islice(source, WINDOW - (sent - pulled)))
                    exhausted = not more
                    sent += len(more)
                    self._hand_over(more, names)
                    continue
                news = self._sink.inbox.get()
                self.check()
                if isinstance(news, EngineDiedError):
                    raise EngineDiedError(str(news), list(names.values()))
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, int):
                    pulled = news
                elif news.finished:
                    self.num_answered += 1
                    yield dataclasses.replace(news, request_id=names.pop(news.request_id))
        finally:
            self._on_loop(self._client.jobs.close, self._name)

    def _hand_over(self, requests: list[Request], names: dict[str, str]) -> None:
        self.check()
        renamed = []
        for request in requests:
            name = f"{self._name}/{request.request_id}"
            names[name] = request.request_id
            renamed.append(
                dataclasses.replace(
                    request, request_id=name, cache_salt=self._owner.salt(), priority="job"
                )
            )
        if renamed:
            self._on_loop(self._client.jobs.send, self._name, renamed)


class Told:
    """Passes progress on, once a second and where it matters.

    Args:
        reading: gets all progress of the first pass, and the first after it.
    """

    def __init__(
        self, tell: Callable[[Progress], object], reading: Callable[[Progress], object]
    ) -> None:
        self._tell, self._reading = tell, reading
        self._at = 0.0
        self._reads = True

    def __call__(self, progress: Progress) -> None:
        if self._reads:
            self._reading(progress)
            self._reads = progress.stage == "read"
        if progress.stage == "read":
            return
        now = time.monotonic()
        if progress.stage == "write" or now - self._at >= PROGRESS_SECONDS:
            self._at = now
            self._tell(progress)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a job in a thread of its own: it takes none of the loop's pool. Whatever ends it is an
    `Exception` here."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, future, None, _failure(error))
        else:
            loop.call_soon_threadsafe(_settle, future, result, None)

    threading.Thread(target=run, name="job", daemon=True).start()
    return await future


def _failure(error: BaseException) -> Exception:
    """A job's failure. What would pass through the event loop or cannot (a library's panic, an
    exit) is the job's alone."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    log.exception("job_failed", error)
    return JobError(f"the batch cannot be read or answered: {in_one_line(error)}")


def _settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
