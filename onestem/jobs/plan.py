"""Plan a job of lines: what its prompts share, and what it will take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onestem.advice import Advice, Advisor
from onestem.batch import (
    ASSUMED_TOKENS,
    JobInput,
    OpenEnded,
    Progress,
    Rules,
    SpooledPrompts,
    expected_outputs,
)
from onestem.batch.first_lines import FirstLines
from onestem.batch.first_pass import write_spool
from onestem.batch.ordered import OrderedLines
from onestem.batch.spool import Spool
from onestem.batch.workplace import Workplace, file_errors
from onestem.cost import Work
from onestem.errors import ConfigError
from onestem.jobs.run import bounded
from onestem.options import EngineOptions
from onestem.planner import Group, JobPlan, planner_of
from onestem.planner.sort import IntArray
from onestem.pml import Library
from onestem.report import MODES, DrawnTree, Price, check_page, savings_by_level, write_page
from onestem.report.tree import first_words

if TYPE_CHECKING:
    from onestem.engine.text.tokenizer import Tokenizer
    from onestem.forecasts import Target

# What is shown of a group's prefix. A token has a byte or more, a character at most four.
WORDS_CHARACTERS = 60
WORDS_TOKENS = 256


def plan_file(
    source: str | os.PathLike[str] | JobInput,
    folder: Path,
    *,
    options: EngineOptions,
    schemas: Sequence[Path] = (),
    keep_going: bool = False,
    predicts: bool = True,
    replicas: int | None = None,
    advises: bool = True,
    price: Price | None = None,
    html: Path | None = None,
    write: Path | None = None,
    force: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
    on_first_error: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Tokenise a job into `folder` and plan it; no weights are loaded. Prompts in PML count as
    sharing only the tokens that they begin with.

    Args:
        options: of the engine that is to answer: model, device, dtype, kv_memory, max_model_len,
            max_step_tokens, max_num_seqs, levels, order. The device may be one of
            `onestem.cost.named_devices`.
        predicts: also what the job will take. Where this device's rates are not known, they are
            measured first, which takes some seconds.
        replicas: also what it will take on this number of engines of this kind.
        schemas: files of the PML schemas that lines may name.
        write: where the job's lines go, byte for byte, in the order of the plan. Those that cannot
            be answered and blank ones are the last.
        force: replace what is at `write`.
        keep_going, on_progress, on_first_error: as in `onestem.batch.run_job`.

    Returns:
        the plan's report (`PlanReport`), with `failed_lines`. Each of `largest_groups` is
        an object: requests, prefix_tokens, kv_bytes of the prefix, and text: its first words.
        `forecast` (None where nothing is predicted) names the device and its rates, and holds a
        `Forecast` for each of full, storage, off. `open_ended` are the requests without
        `max_tokens` (`OpenEnded`), of whose answers `assumed_tokens` are predicted.
        With `replicas`, `dealt` has a `ReplicasForecast` for each way to deal the job.
        `written` is None, or has `path`, and `lines`: the number of lines in the file.

    Raises:
        ConfigError: replicas are asked for, and nothing is to be predicted; or `force`, and nothing
            is to be written.
    """
    if force and write is None:
        raise ConfigError("--force is for the file of --write: give both, or leave it out")
    for name, given in (("replicas", replicas), ("price_per_hour", price)):
        if given is not None and not predicts:
            raise ConfigError(f"{name} needs a prediction: leave --no-predict out")
    if not isinstance(source, JobInput):
        source = JobInput(source)
    if html is not None:
        check_page(html, source.path)
    ordered = None
    if write is not None:
        read = {f"schema {one}": one for one in schemas}
        page = {} if html is None else {"the page of --html": html}
        ordered = OrderedLines(source, write, force=force, others=read | page)
    place = Workplace(folder / "plan.jsonl")
    with place.locked(), file_errors(folder):
        target, tokenizer, most = _write_spool(
            source, place, options, schemas, predicts, on_progress,
            FirstLines(source, keep_going=keep_going, tell=on_first_error),
        )  # fmt: skip
        planner = planner_of(options, target.kv_tokens)
        with contextlib.closing(Spool(place, "plan")) as spool:
            planned = _Planned(source, spool, planner, tokenizer, target, most)
            report = planned.report(replicas, folder if advises else None, price)
            if html is not None:
                write_page(
                    html,
                    report,
                    planned.drawn,
                    title=source.path.name,
                    model=str(options.model),
                    price=price,
                )
            if ordered is not None:
                lines = ordered.write(planned.line_numbers)
                report["written"] = {"path": str(write), "lines": lines}
            return report


def _write_spool(
    source: JobInput,
    place: Workplace,
    options: EngineOptions,
    schemas: Sequence[Path],
    predicts: bool,
    on_progress: Callable[[Progress], object] | None,
    first_lines: FirstLines,
) -> tuple[Target, Tokenizer | None, int]:
    """Tokenise a job into the spool "plan"; returns where it is to run, the model's tokenizer, and
    the maximum tokens of a sequence."""
    from onestem.engine.schedule.admission import check_for, model_len
    from onestem.engine.text.tokenizer import Tokenizer
    from onestem.forecasts import Target
    from onestem.models.config import ModelConfig
    from onestem.models.find import find_model

    path = find_model(options.model)
    config = ModelConfig.from_directory(path)
    target = Target.of(options, config, predicts=predicts)
    tokenizer = Tokenizer.from_directory(path, options.template_text)
    most = model_len(config.max_position_embeddings, target.kv_tokens, options.max_model_len)
    library = None
    if tokenizer is not None:
        library = Library(tokenizer, max_positions=config.max_position_embeddings)
        for file in schemas:
            library.add(file)
    total = source.num_bytes

    def tell_read(num_bytes: int) -> None:
        if on_progress is not None:
            on_progress(Progress(stage="read", done=num_bytes, total=total))

    rules = Rules(
        tokenizer=bounded(tokenizer, most),
        validate=partial(
            check_for,
            options,
            config=config,
            tokenizer=tokenizer,
            max_model_len=most,
            kv_tokens=target.kv_tokens,
        ),
        max_model_len=most,
        compile_pml=None if library is None else library.compile,
    )
    write_spool(
        source,
        place,
        "plan",
        rules,
        on_chunk=tell_read,
        first_lines=first_lines,
    )
    return target, tokenizer, most


class _Planned:
    """The good lines of a spool, planned."""

    def __init__(
        self,
        source: JobInput,
        spool: Spool,
        planner: Callable[..., JobPlan],
        tokenizer: Tokenizer | None,
        target: Target,
        max_model_len: int,
    ) -> None:
        self._source, self._spool, self._planner = source, spool, planner
        self._tokenizer, self._target = tokenizer, target
        self._indices = spool.is_request.nonzero()[0]
        self._prompts = SpooledPrompts(spool, self._indices)
        self._max_model_len = max_model_len
        self._advice: Advice | None = None
        self._plan = planner(self._prompts, output_lengths=spool.output_lengths(self._indices))

    def report(
        self, replicas: int | None, scratch: Path | None, price: Price | None
    ) -> dict[str, Any]:
        """The report of `plan_file`; where `scratch` is None nothing is advised."""
        spool, plan, prompts, target = self._spool, self._plan, self._prompts, self._target
        outputs = expected_outputs(prompts, self._max_model_len)
        answers = None if target.rates is None else prompts.answers()
        work = Work.of(plan, outputs, answers)
        advice = None
        if scratch is not None and self._tokenizer is not None and len(plan.order):
            advisor = Advisor(self._source, spool, self._indices, self._tokenizer, self._planner)
            self._advice = advice = advisor.advise(plan, scratch)
        found = {
            **asdict(plan.report),
            "largest_groups": [
                _described(group, prompts, self._tokenizer, target.shape.token_bytes)
                for group in plan.largest_groups
            ],
            "savings_by_level": savings_by_level(plan.tree),
            "kv_memory_tokens": target.kv_tokens,
            "kv_bytes_per_token": target.shape.token_bytes,
            "failed_lines": len(spool) - len(self._indices),
            "open_ended": asdict(OpenEnded.of(prompts, self._max_model_len)),
            "assumed_tokens": ASSUMED_TOKENS,
            "forecast": target.report(work),
            "dealt": None,
            "advice": None if advice is None else advice.to_dict(),
            "forecast_reordered": None,
            "costs": None,
            "written": None,
        }
        if replicas is not None:
            found["dealt"] = target.report_dealt(plan, work, replicas)
        if advice is not None and advice.plan is not None:
            found["forecast_reordered"] = target.report(Work.of(advice.plan, outputs, answers))
        if price is not None and found["forecast"] is not None:
            found["costs"] = _costs(found, price)
        return found

    @property
    def line_numbers(self) -> IntArray:
        """`[num_requests]` numbers of the good lines, in the plan's order."""
        return self._spool.line_numbers[self._indices[self._plan.order]]

    def drawn(self, most: int) -> dict[str, DrawnTree]:
        """Trees of what is shared, now and in a better order, of at most `most` nodes."""
        decode = self._tokenizer.decode if self._tokenizer is not None else lambda ids: ""
        trees = {"now": DrawnTree.of(self._plan, self._prompts, decode, most)}
        advice = self._advice
        if advice is not None and advice.plan is not None and advice.reordered is not None:
            trees["reordered"] = DrawnTree.of(advice.plan, advice.reordered, decode, most)
        return trees


def _costs(report: dict[str, Any], price: Price) -> dict[str, float]:
    """The job's price by mode, and in the better order."""
    costs = {mode: price.of(report["forecast"][mode]["seconds"]) for mode in MODES}
    if report["forecast_reordered"] is not None:
        costs["reordered"] = price.of(report["forecast_reordered"]["full"]["seconds"])
    return costs


def _described(
    group: Group, prompts: SpooledPrompts, tokenizer: Tokenizer | None, bytes_per_token: int
) -> dict[str, Any]:
    """A group for the report; without a tokenizer its text is None."""
    first_ids = prompts[int(group.members[0])][: min(group.prefix_tokens, WORDS_TOKENS)].tolist()
    return {
        "requests": len(group.members),
        "prefix_tokens": group.prefix_tokens,
        "kv_bytes": group.prefix_tokens * bytes_per_token,
        "text": None
        if tokenizer is None
        else first_words(first_ids, tokenizer.decode, WORDS_CHARACTERS),
    }
