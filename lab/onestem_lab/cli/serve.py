"""`onestem bench serve`: load a server that speaks OpenAI's API and find the rate it sustains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onestem.cli import options
from onestem.errors import ConfigError
from onestem.files import check_apart
from onestem.models.fields import Fields, read_json
from onestem.models.find import find_model
from onestem.options import EngineOptions
from onestem_lab.cli.given import refuse_given
from onestem_lab.lengths import length_files, parse_lengths

if TYPE_CHECKING:
    from onestem_lab.load.run import Bench
    from onestem_lab.load.search import RateSearch
    from onestem_lab.load.workload import Workload

__all__ = ["serve"]

SERVER = "Our own server"
WORKLOAD = "Workload"
RUN = "Run"
MOST_REQUESTS = 1_000_000  # of a run
SHARED = ("model", "seed")  # options of our server that also apply to another one


@options.with_options
def serve(
    context: typer.Context,
    engine: EngineOptions,
    base_url: Annotated[
        str | None,
        typer.Option(help="A running server; without it, ours is started for the run."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer key.", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to serve (default: embedded), or to ask for (default: the first listed)."
        ),
    ] = None,
    app: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A system prompt that our server pins at its start; requests begin with them "
            "in place of drawn ones, as text. May be given several times.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    apps: Annotated[int, typer.Option(help="Applications.", rich_help_panel=WORKLOAD)] = 1,
    system_tokens: Annotated[
        int,
        typer.Option(help="Tokens of each application's system prompt.", rich_help_panel=WORKLOAD),
    ] = 2048,
    question: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help="Tokens of each request's own text.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "sharegpt",
    answer: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help="Tokens to sample for each request.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "sharegpt",
    scale: Annotated[
        float,
        typer.Option(
            help="Factor of question and answer lengths.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 1.0,
    prompts: Annotated[
        str,
        typer.Option(
            help="ids (token ids: every server gets the same) or text.", rich_help_panel=WORKLOAD
        ),
    ] = "ids",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Ids are drawn below it (default: the model's, where known, or 32000).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Ask /v1/chat/completions, with text.", rich_help_panel=WORKLOAD
        ),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Send only OpenAI's own fields: no ignore_eos, no return_token_ids.",
            rich_help_panel=WORKLOAD,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals, lengths and prompts.", rich_help_panel=WORKLOAD)
    ] = 0,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests per second; several times for several runs. Without it, the "
            "sustainable rate is searched.",
            rich_help_panel=RUN,
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of a run.", rich_help_panel=RUN)
    ] = None,
    duration: Annotated[
        float,
        typer.Option(
            help="Seconds of arrivals of a run without --requests; it has at least 20 requests.",
            rich_help_panel=RUN,
        ),
    ] = 60.0,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds per output token, from arrival to end, that nine of ten requests may "
            "take where a rate holds (default: 0.5 for a CPU; 0.05 with --device cuda).",
            rich_help_panel=RUN,
        ),
    ] = None,
    start_rate: Annotated[
        float, typer.Option(help="Where the search begins.", rich_help_panel=RUN)
    ] = 1.0,
    resolution: Annotated[
        float,
        typer.Option(
            help="The search ends when a rate that held and one that did not are this share apart.",
            rich_help_panel=RUN,
        ),
    ] = 0.05,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that send the requests, dealt out among them (default: a fourth of "
            "the cores).",
            rich_help_panel=RUN,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Maximum seconds without a byte of an answer.", rich_help_panel=RUN),
    ] = 600.0,
    log: Annotated[
        Path | None,
        typer.Option(help="Where our own server's output goes.", rich_help_panel=SERVER),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line instead of a table.")
    ] = False,
) -> None:
    """Load a server with arrivals that wait for nothing, and find the rate that it sustains.

    The seed gives Poisson arrivals, questions and answers (of ShareGPT's lengths by default), and
    applications' system prompts. Every stream is checked: one with parts missing, doubled or out of
    order counts as torn, and the command ends with code 1.
    """
    from onestem_lab.load.client import Target
    from onestem_lab.load.crowd import default_clients
    from onestem_lab.load.run import Bench, model_name
    from onestem_lab.load.search import RateSearch

    for what, value, least, most in (
        *(("rate", one, 1e-6, 1e6) for one in rate or ()),
        ("start-rate", start_rate, 1e-6, 1e6),
        ("duration", duration, 0, 1e6),
        ("limit", limit, 0, 1e6),
        ("timeout", timeout, 0, 1e6),
        ("requests", requests, 1, MOST_REQUESTS),
    ):
        if value is not None and not (least <= value <= most and value > 0):
            above = f"{least:g} to" if least else "above 0, up to"
            raise ConfigError(f"{what} is {value}, expected {above} {most:,.0f}")
    for one in () if requests else rate or ():
        if one * duration > MOST_REQUESTS:
            raise ConfigError(
                f"rate {one:g} for {duration:g} s is more than {MOST_REQUESTS:,} requests: lower "
                "rate or duration"
            )
    search = None if rate else RateSearch(start_rate, resolution=resolution)
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise ConfigError(f"log is {log}: expected a file in a folder that exists")
    if prompts not in ("ids", "text"):
        raise ConfigError(f"prompts is {prompts!r}, expected ids or text")
    if base_url is not None:
        _refuse_server_options(context)
    else:
        texts = {f"the text of app {name}": file for name, file in map(_app, app or [])}
        read = texts | length_files([("question", question), ("answer", answer)])
        trace = {} if engine.trace is None else {"the trace": Path(engine.trace)}
        check_apart("log", log, read | trace)
        check_apart("trace", engine.trace, read)
    load = _workload(
        seed=seed,
        apps=apps,
        system_tokens=system_tokens,
        question=parse_lengths("question", question, "question"),
        answer=parse_lengths("answer", answer, "answer"),
        scale=scale,
        vocab_size=_vocab_size(None if base_url else str(engine.model))
        if vocab_size is None
        else vocab_size,
        text=prompts == "text" or chat or bool(app),
        app=app or [],
    )
    with _server(base_url, context.params["config"], engine, app or [], log) as url:
        name = model if base_url and model else model_name(url, api_key)
        bench = Bench(
            base_url=url,
            target=Target(name, chat=chat, plain=plain),
            workload=load,
            limit=limit or (0.05 if engine.device.startswith("cuda") else 0.5),
            requests=requests,
            duration=duration,
            timeout=timeout,
            api_key=api_key,
            clients=clients or default_clients(),
        )
        with closing(bench):
            result = _run(bench, rate or [], search)
    result["server"] = {"base_url": base_url} if base_url else dict(engine)
    _print(result, as_json)
    if any(run["torn"] for run in result["runs"]):
        raise typer.Exit(1)


def _refuse_server_options(context: typer.Context) -> None:
    """Refuse options of our own server for one that runs already."""
    own = [name for name in EngineOptions.offered() if name not in SHARED]
    refuse_given(context, [*own, "app", "log"], "is for our own server, not --base-url's")


def _workload(*, app: list[str], **sizes: Any) -> Workload:
    from onestem_lab.load.workload import Workload

    if not app:
        return Workload(**sizes)
    systems = tuple(_text(*_app(entry)) for entry in app)
    return Workload(**{**sizes, "apps": len(systems), "systems": systems})


def _app(entry: str) -> tuple[str, Path]:
    """Name and file of an application."""
    name, equals, path = entry.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"app is {entry!r}, expected NAME=FILE")
    return name, Path(path)


def _text(name: str, file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"app {name}: {file} cannot be read: {error.strerror}") from error


def _vocab_size(model: str | None) -> int:
    """Vocabulary size of a model; 32000 where the server's is unknown."""
    if model is None:
        return 32000
    file = find_model(model) / "config.json"
    return Fields(read_json(file), file).positive("vocab_size")


@contextmanager
def _server(
    base_url: str | None,
    config: Path | None,
    engine: EngineOptions,
    app: list[str],
    log: Path | None,
) -> Iterator[str]:
    from onestem_lab.load.flags import flags_of
    from onestem_lab.load.server import free_port, onestem_command, serving

    if base_url is not None:
        yield base_url
        return
    arguments = flags_of(engine) + [f"--app={entry}" for entry in app]
    if config is not None:  # in place of ONESTEM_CONFIG's, which it would read
        arguments.append(f"--config={config}")
    port = free_port()
    with TemporaryDirectory() as state:
        command = onestem_command(port, Path(state), arguments)
        with serving(command, port, log=log) as url:
            yield url


def _run(bench: Bench, rates: list[float], search: RateSearch | None) -> dict[str, Any]:
    """Runs at the rates, or those of the search."""
    bench.warm_up()
    result: dict[str, Any] = {"case": bench.describe()}
    if search is None:
        return result | {"runs": [bench.measure(rate) for rate in rates]}
    runs = bench.find(search)
    return result | {
        "sustainable_rate": search.best,
        "resolution": search.resolution,
        "runs": runs,
    }


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    for run in result["runs"]:
        typer.echo(f"rate {run['rate']:.3f} requests/s, {'holds' if run['held'] else 'too much'}")
        for name, value in run.items():
            typer.echo(f"  {name:22} {_cell(value)}")
    if "sustainable_rate" in result:
        typer.echo(f"sustainable rate {result['sustainable_rate']}")
    if any(run["torn"] or run["failed"] for run in result["runs"]):
        print("onestem: some requests failed; 'problems' says why", file=sys.stderr)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_cell(part)}" for key, part in value.items()) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
