"""Batch jobs: all of a server, run one after the other to their ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from onestem.batch import EngineDiedError, JobInput, JobSummary, Progress, Rules, run_job
from onestem.batch.format import KIND_OF_URL, LineError, url_of
from onestem.batch.guard import ENDS
from onestem.batch.workplace import DiskFullError, is_full
from onestem.checked import show
from onestem.errors import JobError, OnestemError, in_one_line
from onestem.jobs import schema_options
from onestem.openai.read import JsonError, read_object
from onestem.server.errors import ApiError, EngineDownError
from onestem.server.link.client import EngineClient
from onestem.server.logs import log
from onestem.server.objects.batch_records import new_batch
from onestem.server.objects.files import check_room, find_file
from onestem.server.objects.job_attempt import JobAttempt, StoppedError, in_thread
from onestem.server.objects.job_files import count_lines, counts_in, keep_output
from onestem.server.objects.reading import Reading
from onestem.server.objects.schemas import Schemas
from onestem.server.objects.store import OPEN_STATUSES, Row, Store, now
from onestem.server.objects.tenants import Tenant

MOST_DEATHS = 3  # maximum deaths of the engine without an answer of the job in between
PROGRESS_SECONDS = 1.0
LONGEST_PAUSE = 30.0  # where the store fails
SCHEMAS, READING = "schemas.json", "reading.json"


class Jobs:
    """All batches of a server.

    Args:
        model: makes the rules and the arguments of `run_job` that describe the model.
        tenant: the holder of a name.
        most_bytes: of a key's files in all.

    Attributes:
        active: the batch that is attempted, and its attempt; None: there is none.
    """

    def __init__(
        self,
        store: Store,
        client: EngineClient,
        schemas: Schemas,
        model: Callable[[], tuple[Rules, dict[str, Any]]],
        tenant: Callable[[str], Tenant],
        most_bytes: int,
    ) -> None:
        self.tenant = tenant
        self._most_bytes = most_bytes
        self._store = store
        self._client = client
        self._schemas = schemas
        self._model = model
        self._wake = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self.active: tuple[str, JobAttempt] | None = None
        self._last_owner = ""
        self._stopping = False
        self._noted_at = 0.0  # when the progress of the job that runs was saved
        self._lock = threading.Lock()

    async def create(self, tenant: Tenant, body: Mapping[str, Any]) -> Row:
        """Queue a batch; its record.

        Raises:
            RequestError: the body is bad; ApiError: there is no such file, or no room.
        """
        record = new_batch(body)
        await find_file(self._store, tenant, record["input_file_id"], "input_file_id")
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
        """The record of a key's batch; raises a 404 if it has none of that id."""
        record = await asyncio.to_thread(self._store.batch, tenant.name, batch_id)
        if record is None:
            raise ApiError(404, f"there is no batch {show(batch_id)}", code="not_found")
        return record

    async def cancel(self, tenant: Tenant, batch_id: str) -> Row:
        """End a batch, at once or when its attempt has stopped; its record. Raises a 404 if there
        is none, a 409 if it has ended."""
        await self.find(tenant, batch_id)
        record = await asyncio.to_thread(self._mark_cancelling, tenant.name, batch_id)
        if self.active is not None and self.active[0] == batch_id:
            self.active[1].stop(StoppedError("cancelled"))
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

    def start(self) -> None:
        """Begin to run batches, those of earlier servers too."""
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop the running job; the next start goes on with it."""
        self._stopping = True
        self._wake.set()
        if self.active is not None:
            self.active[1].stop(StoppedError("the server is stopping"))
        if self._working is not None:
            await self._working

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
                await self.woken(pause)

    async def woken(self, seconds: float) -> None:
        """Wait until there is news, for at most some seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

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
        run = JobAttempt(batch_id, self._client, loop, self.tenant(owner), reading)
        self.active = (batch_id, run)  # a cancel from now on stops the attempt
        try:
            if self._stopping:
                return
            record = await asyncio.to_thread(self._store.batch, owner, batch_id)
            if record is None or record["status"] not in OPEN_STATUSES:
                return  # it was cancelled before
            if record["status"] == "cancelling":
                await self._cancelled(owner, batch_id)
                return
            place, counts = self._place(batch_id), record["request_counts"]
            if place.exists():  # whole: the server died before it had made the output a file
                counts = await asyncio.to_thread(counts_in, place)
            if place.exists() or record["status"] == "finalizing":
                await self._completed(owner, batch_id, counts)
                return
            run.check()
            log.info("job_started", job=batch_id, key=owner or None)
            self._noted_at = 0.0
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
            self.active = None

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
        rules, model = self._model()
        place = self._place(record["id"])
        markups = json.loads(place.with_name(SCHEMAS).read_text())
        model["options"] |= schema_options(markups)
        rules = dataclasses.replace(
            rules,
            validate=partial(run.validate, rules.validate),
            compile_pml=self._schemas.compiler(markups),
        )
        return run_job(
            source,
            place,
            rules,
            **model,
            run=run,
            on_progress=partial(self._note_progress, owner, record["id"], reading),
            on_warning=lambda what: log.warning("job_mended", job=record["id"], what=what),
            keep_going=True,
            line_by_line=reading.line_by_line,
        )

    def _note_progress(
        self, owner: str, batch_id: str, reading: Reading, progress: Progress
    ) -> None:
        """Save how far a batch is, once a second and when it writes its output; raises `ApiError`
        where its key's files take too much."""
        reading.note(progress)
        at = time.monotonic()
        is_soon = progress.stage == "run" and at - self._noted_at < PROGRESS_SECONDS
        if progress.stage == "read" or is_soon:
            return
        self._noted_at = at
        if progress.stage == "run":
            answers = self._partial(batch_id)
            size = answers.stat().st_size if answers.exists() else 0
            check_room(self._store, owner, self._most_bytes, size)
        with self._lock:
            record = self._store.batch(owner, batch_id)
            if record is None or record["status"] not in ("validating", "in_progress"):
                return
            counts = {
                "total": progress.total,
                "completed": progress.done - progress.failed,
                "failed": progress.failed,
            }
            changes: dict[str, Any] = {"request_counts": counts}
            if record["status"] == "validating":
                changes |= {"status": "in_progress", "in_progress_at": now()}
            self._save(owner, record, **changes)

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
        error = {"code": code, "message": message, "param": None, "line": None}
        errors = {"object": "list", "data": [error]}
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
