"""`onestem eval`: lm-eval's tasks on a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onestem.cli import options
from onestem.files import check_place
from onestem.options import EngineOptions


@options.with_options
def evaluate(
    tasks: Annotated[
        list[str], typer.Argument(metavar="TASK...", help="Names of lm-eval's tasks.")
    ],
    engine: EngineOptions,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question (default: the task's).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Questions of each task (default: all).")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put prompts through the model's chat template.")
    ] = False,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Tasks of your own, in YAML.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="All results, as lm-eval's JSON."),
    ] = None,
) -> None:
    r"""Evaluate a model with lm-eval's tasks; examples and options are computed once.

    Needs lm-eval: pip install 'onestem\[eval]'. All of its own options:
    python -m onestem.evals.lm_eval --model onestem --model_args pretrained=MODEL (docs/scores.md).
    """
    from onestem.errors import ConfigError

    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise ConfigError(
            f"onestem eval needs lm-eval ({error}): pip install 'onestem[eval]'"
        ) from error
    from onestem.evals.lm_eval import OnestemLM

    if output is not None:
        check_place(output, "another file")
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ConfigError(f"lm-eval has no task {', '.join(unknown)}: lm-eval ls tasks shows them")
    results = simple_evaluate(
        OnestemLM(llm=options.load_llm(engine)),
        tasks=manager.match_tasks(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        log_samples=False,
    )
    typer.echo(make_table(results))
    if results.get("groups"):
        typer.echo(make_table(results, "groups"))
    if output is not None:
        output.write_text(json.dumps(results, indent=2, default=handle_non_serializable) + "\n")
