"""`onestem batch`: a file of requests in, a file of results out, resumable at any moment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onestem.cli import options
from onestem.errors import ConfigError, JobError
from onestem.options import EngineOptions, InputOptions

if TYPE_CHECKING:
    from rich.progress import TaskID

    from onestem.batch import JobInput, JobSummary, Progress
    from onestem.forecasts import JobWatch
    from onestem.llm import LLM
    from onestem.replicas import Replicas

Input = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        help="OpenAI batch file; or rows: JSON lines, .csv, .tsv, .parquet, a data set's folder.",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where results go.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite output or unfinished work of a different job.")
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Go on if the first 256 lines all fail.")
]
NumReplicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        min=1,
        help="Engines that share the job, each an actor of Ray (docs/replicas.md).",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The Ray cluster of the replicas (default: one is started on this machine).",
    ),
]
Schemas = Annotated[
    list[Path] | None,
    typer.Option(
        "--schema", metavar="FILE", help="PML schema that lines may name (may be repeated)."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


@options.with_options
def batch(
    input_file: Input,
    output: Output,
    engine: EngineOptions,
    rows: InputOptions,
    schemas: Schemas = None,
    replicas: NumReplicas = None,
    ray_address: RayAddress = None,
    force: Force = False,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Answer OpenAI batch lines. If killed at any moment, the same command goes on.

    With --prompt or --messages the input is rows of JSON lines, CSV, Parquet or a data set, and
    each makes a request (docs/inputs.md).

    Lines that cannot be answered get an error object and the job goes on; the same command does
    not try them again. If none of the first 256 lines can be answered, the job is refused and
    leaves no files (see --keep-going).

    While it runs, finished answers are in OUT.jsonl.partial and the rest of its work in
    OUT.jsonl.work; both are gone when OUT.jsonl is complete. At the end a line says what was
    computed, and two more compare it with the prediction, if there is one (docs/cost-model.md).

    Exit code: 0 if every line was answered, 1 if some failed, 2 if the job could not run or was
    refused, 130 after Ctrl-C.
    """
    load = partial(_load, engine, replicas, ray_address)
    source = open_input(input_file, rows)
    _run(source, output, engine, load, schemas or [], force, keep_going, quiet)


@options.with_options
def score(
    input_file: Input,
    output: Output,
    engine: EngineOptions,
    rows: InputOptions,
    replicas: NumReplicas = None,
    ray_address: RayAddress = None,
    force: Force = False,
    keep_going: KeepGoing = False,
    quiet: Quiet = False,
) -> None:
    """Score completions of prompts, or whole texts. If killed, the same command goes on.

    A line is {"custom_id": ..., "prompt": ..., "completions": [...]} or {"custom_id": ..., "text":
    ...}, with text or token ids. Its result has logprob, token_ids, token_logprobs and is_greedy of
    each completion, or of the text (docs/scores.md). Rows of a table make lines with --prompt and
    --completions, or with --text (docs/inputs.md).

    Errors, files, continuation and exit codes are those of `onestem batch`. Each command takes the
    other's lines too.
    """
    load = partial(_load, engine, replicas, ray_address)
    source = open_input(input_file, rows)
    if source.recipe is not None and source.recipe.kind != "score":
        raise ConfigError("nothing says what is scored: give --completions or --text")
    _run(source, output, engine, load, [], force, keep_going, quiet)


def open_input(path: Path, rows: InputOptions) -> JobInput:
    """A job's input; raises `OnestemError` where it is missing, or not as the options say."""
    from onestem.batch import JobInput

    if not path.exists():
        raise JobError(f"{path} is no file")
    return JobInput(path, rows)


def _run(
    source: JobInput,
    output: Path,
    engine: EngineOptions,
    load: Callable[[], LLM | Replicas],
    schemas: list[Path],
    force: bool,
    keep_going: bool,
    quiet: bool,
) -> None:
    """Run a job to its end and report it; raises `typer.Exit` with its exit code."""
    from onestem.batch import JobInterrupted
    from onestem.batch.workplace import Workplace
    from onestem.jobs import check_trace, run_file

    # Before a model is loaded.
    Workplace(output).check_output()
    check_trace(engine, source, output)

    # Ray prints deaths of its actors to stdout.
    with (
        contextlib.redirect_stdout(sys.stderr),
        contextlib.closing(load()) as llm,
    ):
        watch = _watch(llm)
        try:
            with JobProgress(quiet) as progress:
                summary = run_file(
                    llm,
                    source,
                    output,
                    schemas=schemas,
                    force=force,
                    keep_going=keep_going,
                    on_progress=progress,
                    on_first_error=lambda error: _say(
                        f"{error} (each such line has its reason in {output})"
                    ),
                    on_warning=_say,
                    on_open_ended=lambda found: _say(
                        found.line(has_template=source.recipe is not None)
                    ),
                    watch=watch,
                )
        except JobInterrupted as interrupted:
            _say(interrupted)
            raise typer.Exit(130) from None
        _report(summary, watch)
    print(summary.last_line(), file=sys.stderr)
    raise typer.Exit(summary.exit_code)


def _load(engine: EngineOptions, replicas: int | None, address: str | None) -> LLM | Replicas:
    if replicas is not None:
        from onestem.replicas import Replicas

        return Replicas(replicas, engine, address=address)
    if address is not None:
        raise ConfigError("ray_address is of a cluster for replicas: give --replicas too")
    return options.load_llm(engine)


def _watch(llm: LLM | Replicas) -> JobWatch:
    from onestem.forecasts import JobWatch
    from onestem.llm import LLM

    return JobWatch.of_llm(llm) if isinstance(llm, LLM) else llm.watch()


def _say(text: object) -> None:
    print(f"onestem: {text}", file=sys.stderr)


def _report(summary: JobSummary, watch: JobWatch) -> None:
    if summary.num_prompt_tokens == 0:
        return
    stats = watch.stats()
    each = stats.logical_prompt_tokens > summary.num_prompt_tokens and not summary.resumed
    prompts = "prompt tokens (a prompt for each answer)" if each else "prompt tokens"
    resumed = f", {summary.resumed} lines were done before" if summary.resumed else ""
    print(
        f"{stats.logical_prompt_tokens} {prompts}, {stats.processed_prompt_tokens} computed "
        f"({100 * stats.saving:.1f}% saved), {summary.num_output_tokens} sampled, "
        f"{summary.seconds:.1f} s"
        f" ({summary.read_seconds:.1f} reading, {summary.plan_seconds:.2f} planning){resumed}",
        file=sys.stderr,
    )
    if summary.resumed:
        return  # the plan was of all lines
    verdict = watch.verdict(summary.seconds - summary.read_seconds - summary.plan_seconds)
    for line in verdict.lines() if verdict is not None else ():
        print(line, file=sys.stderr)


class JobProgress(AbstractContextManager["JobProgress"]):
    """A progress bar on stderr, fed by `run_job` or `plan_file`."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __exit__(self, *error: object) -> None:
        if self._stage is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        if self._bar.disable or (progress.stage == "read" and not progress.done):
            return  # a file whose first lines are refused gets no bar
        name = {"read": "reading (bytes)", "run": "answering", "write": "writing"}[progress.stage]
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._bar.start()
            self._task = self._bar.add_task(name, total=progress.total)
        assert self._task is not None
        failed = f", {progress.failed} failed" if progress.failed else ""
        self._bar.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            description=name + failed,
        )
