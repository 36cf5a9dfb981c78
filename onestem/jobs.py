"""Offline jobs on a model: what `onestem batch` and `onestem plan` run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onestem.batch import JobSummary, Progress, SpooledPrompts, model_identity, run_job
from onestem.batch.spool import Spool, write_spool
from onestem.batch.workplace import Workplace, file_errors
from onestem.errors import JobError
from onestem.planner import plan_job
from onestem.pml import Library, to_markup

if TYPE_CHECKING:
    from onestem.llm import LLM

__all__ = ["plan_file", "run_file", "schema_options"]


def run_file(
    llm: LLM,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    schemas: Sequence[Path] = (),
    force: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
) -> JobSummary:
    """Run or continue a job (see `onestem.batch.run_job`) on a model.

    Args:
        schemas: files of the PML schemas that lines may name.
    """
    for path in schemas:
        llm.add_schema(path)
    if llm.engine.share == "no-attention":
        raise JobError("share is no-attention, whose answers mean nothing: use it with bench batch")
    return run_job(
        source,
        output,
        tokenizer=llm.tokenizer,
        validate=llm.engine.validate,
        run=llm.engine.run,
        planner=partial(plan_job, kv_budget_tokens=llm.kv_tokens),
        model_identity=model_identity(llm.path),
        model_name=llm.name,
        options={
            "dtype": str(llm.dtype).removeprefix("torch."),
            "device": llm.device.type,
            "max_model_len": llm.engine.max_model_len,
            "random_weights": llm.random_weights,
            **_schema_options(llm),
        },
        compile_pml=llm.schemas.compile if llm.tokenizer is not None else None,
        token_bytes=llm.tokenizer.token_bytes if llm.tokenizer is not None else None,
        force=force,
        on_progress=on_progress,
    )


def _schema_options(llm: LLM) -> dict[str, str]:
    """What answers to prompts in PML depend on besides; nothing where there is no schema."""
    if llm.tokenizer is None or not llm.schemas.layouts:
        return {}
    return schema_options([to_markup(layout.schema) for layout in llm.schemas.layouts.values()])


def schema_options(markups: Sequence[str]) -> dict[str, str]:
    """The option of a job that its schemas make; none where there are none."""
    if not markups:
        return {}
    return {"schemas": hashlib.sha256("".join(markups).encode()).hexdigest()[:16]}


def plan_file(
    source: Path,
    folder: Path,
    *,
    model: str,
    levels: str,
    kv_memory: str | int,
    schemas: Sequence[Path] = (),
) -> dict[str, Any]:
    """Tokenise a job into `folder` and plan it; no weights are loaded. Of prompts in PML only what
    they have in common at their beginning counts as shared.

    Args:
        schemas: files of the PML schemas that lines may name.

    Returns:
        the plan's report (`PlanReport.to_dict`), with `failed_lines`.
    """
    from onestem.engine.admission import check_request
    from onestem.engine.tokenizer import Tokenizer
    from onestem.llm import find_model, kv_memory_bytes, pick_device, pick_dtype
    from onestem.models.config import ModelConfig

    path = find_model(model)
    config = ModelConfig.from_directory(path)
    device = pick_device("auto")
    bytes_per_token = config.kv_values_per_token * pick_dtype("auto", config, device).itemsize
    tokenizer = Tokenizer.from_directory(path)
    validate = partial(
        check_request,
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
    )
    library = None
    if tokenizer is not None:
        library = Library(tokenizer, max_positions=config.max_position_embeddings)
        for file in schemas:
            library.add(file)
    place = Workplace(folder / "plan.jsonl")
    with place.locked(), file_errors(folder):
        write_spool(
            source,
            place,
            "plan",
            tokenizer=tokenizer,
            validate=validate,
            on_chunk=lambda lines, size: None,
            compile_pml=library.compile if library is not None else None,
        )
        spool = Spool(place, "plan")
        try:
            indices = spool.is_request.nonzero()[0]
            plan = plan_job(
                SpooledPrompts(spool, indices),
                output_lengths=spool.output_lengths(indices),
                levels=levels,  # type: ignore[arg-type]
                kv_budget_tokens=kv_memory_bytes(kv_memory, device) // bytes_per_token,
            )
            return {**plan.report.to_dict(), "failed_lines": len(spool) - len(indices)}
        finally:
            spool.close()
