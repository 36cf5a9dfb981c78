"""`onestem pml`: check schemas and prompts, show where their tokens are, answer prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onestem.cli import options
from onestem.options import EngineOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Prompts of modules: check, show and run PML files.",
)


Isolation = Annotated[
    str, typer.Option(help="What cached tokens attend to: anchored, isolated or off.")
]
Schemas = Annotated[
    list[Path] | None,
    typer.Option(
        "--schema", metavar="FILE", help="Its schema (default: the *.xml beside it that holds it)."
    ),
]
SHARES = (0.1, 0.2, 0.5)
WRITTEN = 64  # chats
MaxTokens = Annotated[int, typer.Option(help="Maximum tokens of an answer.")]


@app.command("check")
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Schemas, and prompts for them.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Check lengths, gaps and positions too, with this model's tokenizer."),
    ] = None,
) -> None:
    """Check schemas and prompts; each error is one line: FILE:LINE:COLUMN: what is wrong.

    A prompt is checked against its schema, which is one of the files. Exit code: 0 if all is
    right, 2 if not.
    """
    from onestem.cli.pml_check import Checker

    checker = Checker(model)
    for path in files:
        checker.add(path)
    for path, prompt in checker.prompts:
        checker.check_prompt(path, prompt)
    if checker.failed:
        raise typer.Exit(2)


@app.command("show")
@options.with_options
def show(
    engine: Annotated[EngineOptions, options.Only("model")],
    schema_file: Annotated[Path, typer.Argument(metavar="SCHEMA", help="File of a schema.")],
    prompt_file: Annotated[
        Path | None, typer.Argument(metavar="PROMPT", help="File of a prompt.")
    ] = None,
    isolation: Isolation = "anchored",
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a schema's modules with their positions, and a prompt's segments.

    No weights are loaded. With PROMPT, each segment is shown with what it attends to (numbers of
    other segments) and the key under which it is cached.
    """
    from onestem.cli.pml_model import load_tokenizer
    from onestem.cli.pml_show import layout_facts, layout_lines, prompt_facts, prompt_lines
    from onestem.pml import compile_prompt, lay_out, parse_isolation, read_prompt, read_schema

    who_sees_what = parse_isolation(isolation)
    tokenizer, max_positions = load_tokenizer(str(engine.model))
    layout = lay_out(read_schema(schema_file), tokenizer, max_positions=max_positions)
    shown: dict[str, Any] = {"schema": layout_facts(layout)}
    lines = list(layout_lines(layout, ids))
    if prompt_file is not None:
        compiled = compile_prompt(layout, read_prompt(prompt_file), who_sees_what)
        shown["prompt"] = prompt_facts(compiled)
        lines += ["", *prompt_lines(compiled, tokenizer, ids)]
    typer.echo(json.dumps(shown) if as_json else "\n".join(lines))


@app.command("run")
@options.with_options
def run(
    engine: EngineOptions,
    prompt_file: Annotated[Path, typer.Argument(metavar="PROMPT", help="File of a prompt.")],
    schemas: Schemas = None,
    isolation: Isolation = "anchored",
    n: Annotated[int, typer.Option("-n", help="Answers.")] = 1,
    max_tokens: MaxTokens = 128,
    temperature: options.Temperature = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Answer a prompt; its cost goes to stderr.

    The time to the first token is that of the engine, without loading the model.
    """
    from onestem.cli.pml_run import answer_facts, cost_line, default_disk, load_library
    from onestem.pml import parse_isolation, read_prompt
    from onestem.request import SamplingParams

    who_sees_what = parse_isolation(isolation)
    prompt = read_prompt(prompt_file)
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature, seed=engine.seed)
    if engine.disk_kv is None and default_disk().is_dir():
        engine = engine.replace(disk_kv=default_disk())
    llm = options.load_llm(engine)
    load_library(llm, prompt_file, prompt, schemas)
    facts = answer_facts(llm.generate_pml(prompt, params, isolation=who_sees_what)[0])
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    for text in facts["texts"]:
        typer.echo(text)
    typer.echo(cost_line(facts), err=True)


@app.command("compare")
@options.with_options
def compare(
    engine: EngineOptions,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="PROMPT", help="Files of prompts; or questions, a .jsonl file."),
    ],
    schemas: Schemas = None,
    isolation: Annotated[
        str | None,
        typer.Option(
            help="What cached tokens attend to: anchored or isolated (default: anchored; of "
            "questions both)."
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(help="Times to the first token measured (default: 5).", min=1),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line per prompt; of questions, then a summary.")
    ] = False,
) -> None:
    """Answer prompts with their modules cached, and computed whole.

    A prompt's answers are printed side by side, with median times to the first token, measured in
    turns. Computed whole is isolation=off: ordinary causal attention.

    Questions are lines {"pml": MARKUP, "answer": TEXT}; an answer with TEXT in it, in any case, is
    right. Answers in each isolation are counted, and the last line says which to use.
    """
    from rich.console import Console

    from onestem.cli.pml_compare import check_comparable, comparison_table, side_by_side
    from onestem.cli.pml_questions import ask_all, read_questions, summary, summary_lines
    from onestem.cli.pml_run import load_library
    from onestem.errors import ConfigError
    from onestem.pml import ISOLATIONS, parse_isolation, read_prompt
    from onestem.request import SamplingParams

    cached = [one for one in ISOLATIONS if one != "off"]
    who_sees_what = [parse_isolation(isolation)] if isolation is not None else cached
    check_comparable(who_sees_what[0], engine.share)
    asked = [(path, read_questions(path)) for path in files if path.suffix == ".jsonl"]
    prompts = [(path, read_prompt(path)) for path in files if path.suffix != ".jsonl"]
    if repeat is not None and not prompts:
        raise ConfigError("--repeat is of a prompt's times, and questions have none: leave it out")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=engine.seed or 0)
    llm = options.load_llm(engine)
    for path, prompt in prompts:
        load_library(llm, path, prompt, schemas)
    for path, prompt in prompts:
        facts = side_by_side(llm, prompt, who_sees_what[0], params, repeat or 5)
        if as_json:
            named = {"prompt": str(path), "model": str(engine.model)}
            typer.echo(json.dumps({**named, **facts}, ensure_ascii=False))
        else:
            Console().print(comparison_table(str(path), facts))
    for path, questions in asked:
        each = ask_all(llm, path, questions, ["off", *who_sees_what], params, schemas)
        told = {"model": str(engine.model), **summary(each)}
        if as_json:
            lines = [json.dumps(one, ensure_ascii=False) for one in (*each, told)]
        else:
            lines = list(summary_lines(str(path), told))
        typer.echo("\n".join(lines))


@app.command("check-model")
@options.with_options
def check_model(
    context: typer.Context,
    engine: EngineOptions,
    name: options.Model = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="PROMPTS", help="Chats as lines (default: written).")
    ] = None,
    shares: Annotated[
        list[float] | None,
        typer.Option("--repair", help="A share (default: 0.1, 0.2 and 0.5).", min=0, max=0.99),
    ] = None,
    max_tokens: MaxTokens = 32,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON line per chat, then all.")
    ] = False,
) -> None:
    """Answer chats with their documents repaired, and whole, and say which to use.

    Lines are {"messages": [...], "documents": [...], "answer": TEXT}, judged as those of compare.
    Nats say how much more probable each token of the whole prompt's answer is.
    """
    from onestem.cli.pml_check_model import ask_all, read_asked, written
    from onestem.cli.pml_questions import summary, summary_lines

    asked = [*written(WRITTEN)] if file is None else read_asked(file)
    llm = options.load_llm(options.named_model(context, engine, name))
    each = ask_all(llm, asked, shares or SHARES, max_tokens)
    told = {"model": llm.name, **summary(each)}
    if as_json:
        lines = [json.dumps(one, ensure_ascii=False) for one in (*each, told)]
    else:
        lines = list(summary_lines(llm.name, told))
    typer.echo("\n".join(lines))


@app.command("encode")
@options.with_options
def encode(
    engine: EngineOptions,
    schema_file: Annotated[Path, typer.Argument(metavar="SCHEMA", help="File of a schema.")],
    isolation: Isolation = "anchored",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Compute a schema's modules and keep them on the disk.

    Stored modules are checked and not computed again. `onestem pml run` with the same model, dtype
    and isolation then reads them.
    """
    from onestem.cli.pml_run import default_disk, encode_line, encode_schema
    from onestem.pml import parse_isolation, read_schema

    who_sees_what = parse_isolation(isolation)
    schema = read_schema(schema_file)
    if engine.disk_kv is None:
        engine = engine.replace(disk_kv=default_disk())
    llm = options.load_llm(engine)
    facts = encode_schema(llm, schema, who_sees_what, quiet=quiet)
    typer.echo(json.dumps(facts) if as_json else encode_line(facts))


@app.command("memory")
def memory(
    models: Annotated[
        list[str],
        typer.Option(
            "--model",
            help="Model directory, GGUF file, hub name, or a config.json (may be repeated).",
        ),
    ],
    num_bytes: Annotated[int, typer.Option("--bytes", help="Bytes of a number.", min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per model.")] = False,
) -> None:
    """Memory of one cached token, in MiB, from the config alone.

    The first column counts a key and a value for each query head, as table 2 of the Prompt Cache
    paper does. The second counts those that are stored, for each KV head.
    """
    from onestem.cli.pml_model import find_config
    from onestem.models.memory import token_memory

    sizes = [(model, token_memory(find_config(model), num_bytes=num_bytes)) for model in models]
    if not as_json:
        typer.echo(f"{'all heads':>10} {'stored':>10}  model")
    for model, size in sizes:
        if as_json:
            facts = {"all_heads": size.all_heads, "kv_heads": size.kv_heads}
            typer.echo(json.dumps({"model": model, "mib_per_token": facts}))
        else:
            typer.echo(f"{size.all_heads:10.4f} {size.kv_heads:10.4f}  {model}")
