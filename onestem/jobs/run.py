"""Run a job of lines on a model, or on replicas of it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onestem.batch import (
    EngineDiedError,
    JobInput,
    JobSummary,
    OpenEnded,
    Progress,
    Rules,
    model_identity,
    run_job,
)
from onestem.batch.guard import ENDS, guarded
from onestem.batch.interface import Run
from onestem.batch.workplace import Workplace
from onestem.errors import JobError, OnestemError, RankError, in_one_line
from onestem.files import check_apart
from onestem.options import EngineOptions
from onestem.planner import planner_of
from onestem.pml import to_markup
from onestem.replicas import Replicas
from onestem.request import Request, RequestOutput

if TYPE_CHECKING:
    from onestem.engine.text.bounded import BoundedTokenizer
    from onestem.engine.text.tokenizer import Tokenizer
    from onestem.forecasts import JobWatch
    from onestem.llm import LLM

log = logging.getLogger(__name__)


def run_file(
    llm: LLM | Replicas,
    source: str | os.PathLike[str] | JobInput,
    output: str | os.PathLike[str],
    *,
    schemas: Sequence[Path] = (),
    force: bool = False,
    keep_going: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
    on_first_error: Callable[[str], object] | None = None,
    on_warning: Callable[[str], object] = log.warning,
    on_open_ended: Callable[[OpenEnded], object] | None = None,
    watch: JobWatch | None = None,
) -> JobSummary:
    """Run or continue a job (see `onestem.batch.run_job`) on a model, or on replicas of it.

    Args:
        schemas: files of the PML schemas that lines may name.
        watch: of the same model; it can compare the job with its prediction afterwards.
    """
    check_trace(llm.options, source, output)
    run: Run
    if isinstance(llm, Replicas):
        run, validate = llm.run, llm.validate
    else:
        run, validate = partial(_run, llm), llm.engine.requests.validate
    planner = planner_of(llm.options, llm.kv_tokens)
    for path in schemas:
        llm.add_schema(path)
    if llm.options.share == "no-attention":
        raise JobError("share is no-attention, whose answers mean nothing: use it with bench batch")
    return run_job(
        source,
        output,
        Rules(
            tokenizer=bounded(llm.tokenizer, llm.options.max_model_len),
            validate=guarded(validate),
            max_model_len=llm.options.max_model_len,
            max_num_seqs=llm.options.max_num_seqs,
            compile_pml=llm.schemas.compile if llm.tokenizer is not None else None,
        ),
        run=run if watch is None else watch.run(run),
        planner=planner if watch is None else watch.planner(planner),
        model_identity=model_identity(llm.path),
        model_name=llm.name,
        options={**llm.options.job_identity(llm.asked), **_schema_options(llm)},
        token_bytes=llm.tokenizer.token_bytes if llm.tokenizer is not None else None,
        force=force,
        keep_going=keep_going,
        on_progress=on_progress,
        on_first_error=on_first_error,
        on_warning=on_warning,
        on_open_ended=on_open_ended,
    )


def bounded(tokenizer: Tokenizer | None, max_model_len: int | None) -> BoundedTokenizer | None:
    """The tokenizer, with the bounds of a model's length."""
    from onestem.engine.text.bounded import BoundedTokenizer

    assert max_model_len is not None  # settled by the engine
    return None if tokenizer is None else BoundedTokenizer(tokenizer, max_model_len)


def check_trace(
    options: EngineOptions,
    source: str | os.PathLike[str] | JobInput,
    output: str | os.PathLike[str],
) -> None:
    """Raise `JobError` where a job's trace would be written over a file of the job."""
    if options.trace is None:
        return
    trace, workplace = Path(options.trace), Workplace(Path(output))
    given = Path(source.path if isinstance(source, JobInput) else source)
    files = {
        "input": given,
        "output": workplace.output,
        "unfinished output": workplace.partial,
        "work folder": workplace.folder,
    }
    for what, path in files.items():
        check_apart("trace", trace, {f"the job's {what}": path})
        if path.is_dir() and path.resolve() in trace.resolve().parents:
            raise JobError(f"trace {trace} is inside of the job's {what}: choose another file")


def _run(llm: LLM, requests: Iterable[Request]) -> Iterator[RequestOutput]:
    """The engine's own `run`. Any error but a caller's mistake is the engine's death."""
    there: set[str] = set()

    def noted() -> Iterator[Request]:
        for request in requests:
            there.add(request.request_id)
            yield request

    try:
        for output in llm.engine.run(noted()):
            there.discard(output.request_id)
            yield output
    except RankError as error:
        raise EngineDiedError(str(error), there) from error
    except (*ENDS, OnestemError):
        raise
    except BaseException as error:
        log.error("the engine died", exc_info=error)
        raise EngineDiedError(in_one_line(error), there) from error


def _schema_options(llm: LLM | Replicas) -> dict[str, str]:
    """What answers to prompts in PML also depend on; empty where there is no schema."""
    if llm.tokenizer is None or not llm.schemas.layouts:
        return {}
    return schema_options([to_markup(layout.schema) for layout in llm.schemas.layouts.values()])


def schema_options(markups: Sequence[str]) -> dict[str, str]:
    """The job option that stands for its schemas; empty where there are none."""
    if not markups:
        return {}
    return {"schemas": hashlib.sha256("".join(markups).encode()).hexdigest()[:16]}
