"""`onestem generate`: answer a prompt, or several."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from onestem.cli import options
from onestem.errors import ConfigError
from onestem.options import EngineOptions


@options.with_options
def generate(
    engine: EngineOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="One prompt or more (default: what comes through a pipe, as one)."),
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Answers per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends an answer (may be repeated).")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put each prompt through the model's chat template, or take it as it is (default: "
            "the template, if there is one).",
        ),
    ] = None,
    parse_special: Annotated[
        bool,
        typer.Option(
            help="With --raw: read the names of control tokens in prompts as these tokens, or as "
            "characters (as in chats).",
        ),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System prompt of chats.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per prompt.")] = False,
) -> None:
    """Answer prompts. What they and their n answers have in common is computed once."""
    from onestem.request import SamplingParams

    if system is not None and chat is False:
        raise ConfigError("--system is for chats, and --raw has none: leave one of them out")
    prompts = prompts or [_piped()]
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        seed=engine.seed,
    )
    llm = options.load_llm(engine)
    if chat is None:
        chat = options.has_template(llm)
    if system is not None and not chat:
        raise ConfigError(f"--system is for chats, and {llm.name} has no chat template")
    if chat:
        head = [{"role": "system", "content": system}] if system is not None else []
        chats = [[*head, {"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params)
    else:
        outputs = llm.generate(prompts, params, parse_special=parse_special)
    for prompt, output in zip(prompts, outputs, strict=True):
        if as_json:
            names = ("text", "token_ids", "finish_reason")
            facts = [{name: getattr(one, name) for name in names} for one in output.outputs]
            typer.echo(json.dumps({"prompt": prompt, "outputs": facts}, ensure_ascii=False))
            continue
        for answer in output.outputs:
            typer.echo(answer.text)
    for number, output in enumerate(outputs, start=1):
        options.check_answered(output, f"prompt {number}")


def _piped() -> str:
    """The standard input, without the end of its last line."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is no prompt: write one, or send it through a pipe")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8: {error}") from error
    if not text.strip():
        raise ConfigError("there is no prompt: nothing came through the pipe")
    return text.removesuffix("\n")
