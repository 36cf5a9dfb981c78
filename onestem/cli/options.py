"""Declared options (`onestem.options`) on a verb's command line, and an `LLM` from them."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from onestem.errors import ConfigError, OnestemError
from onestem.files import check_apart
from onestem.options import Defaults, EngineOptions, Options, extra_of

if TYPE_CHECKING:
    from onestem.llm import LLM
    from onestem.request import RequestOutput

Verb = TypeVar("Verb", bound=Callable[..., Any])

ENGINE = EngineOptions.panel
CONFIG = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file with defaults of these options (default: ONESTEM_CONFIG's).",
        rich_help_panel=ENGINE,
    ),
]


# Options of verbs that answer.
Temperature = Annotated[float | None, typer.Option(help="0 is greedy (default: the model's).")]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass (default: the model's).")]
TopK = Annotated[
    int | None, typer.Option(help="Most likely tokens to keep (default: the model's).")
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]


class Only:
    """In an annotation: the fields that a verb offers."""

    def __init__(self, *names: str) -> None:
        self.names = names


def with_options(verb: Verb) -> Verb:
    """Offer on the command line the fields of each parameter whose type is a kind of `Options`.

    The verb gets them with the defaults of environment and file. A parameter of the verb's own with
    the name of a field replaces that field's option, and gives its value.
    """
    own = inspect.signature(verb, eval_str=True).parameters
    kinds = {name: found for name, one in own.items() if (found := _kind(one.annotation))}

    @functools.wraps(verb)
    def call(*, config: Path | None = None, **given: Any) -> Any:
        defaults = Defaults(config)
        made = {}
        for name, (kind, fields) in kinds.items():
            said = {field: given[field] for field in fields if given[field] not in (None, [])}
            made[name] = defaults.options(kind, said)[0]
        if defaults.file is not None:
            traces = [("trace", getattr(one, "trace", None)) for one in made.values()]
            written = [(option, given.get(option)) for option in ("log", "html", "write")]
            for option, path in (*traces, *written):
                check_apart(option, path, {"the file of options": defaults.file})
        rest = {name: value for name, value in given.items() if name in own}
        return verb(**rest, **made)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for name, one in own.items() if name not in kinds]
    for kind, fields in kinds.values():
        parameters += [_parameter(kind, field) for field in fields if field not in own]
    parameters.append(inspect.Parameter("config", keyword, default=None, annotation=CONFIG))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call  # type: ignore[return-value]


def _kind(annotation: Any) -> tuple[type[Options], list[str]] | None:
    """The kind of options of a parameter, and which of its fields are offered; None: no options."""
    only: Collection[str] | None = None
    if get_origin(annotation) is Annotated:
        only = next((one.names for one in annotation.__metadata__ if isinstance(one, Only)), None)
        annotation = annotation.__origin__
    if not (isinstance(annotation, type) and issubclass(annotation, Options)):
        return None
    return annotation, [name for name in annotation.offered() if only is None or name in only]


def _parameter(kind: type[Options], name: str) -> inspect.Parameter:
    field, named = kind.model_fields[name], f"--{kind.offered()[name]}"
    typed = _type_of(field.annotation)
    option = typer.Option(
        f"{named}/--no-{named[2:]}" if typed is bool else named,
        help=_help(field),
        metavar=extra_of(field).get("metavar"),
        show_default=False,
        rich_help_panel=kind.panel,
    )
    annotation = Annotated[typed | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _type_of(annotation: Any) -> Any:
    """What typer reads: the type that has no text form of its own, or text."""
    if get_origin(annotation) is Annotated:
        return _type_of(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        options = [one for one in get_args(annotation) if one is not type(None)]
        return _type_of(options[0]) if len(options) == 1 else str
    if get_origin(annotation) is tuple:
        return list[str]
    return annotation if annotation in (bool, int, float) else str


def _help(field: FieldInfo) -> str:
    told = " ".join((field.description or "").split())
    if field.default in (None, False, ()) or "(default:" in told:
        return told
    return re.sub(r"\.?$", "", told) + f" (default: {field.default})."


def named_model(context: typer.Context, engine: EngineOptions, name: str | None) -> EngineOptions:
    """The options with the model that a verb's argument MODEL names, if it was given. It goes
    before a variable or a file.

    Raises:
        ConfigError: --model names another.
    """
    if name is None:
        return engine
    told = context.params["model"]
    if told not in (None, name):
        raise ConfigError(f"the model is {name!r}, and --model is {told!r}: give one of them")
    return engine.replace(model=name)


def has_template(llm: LLM) -> bool:
    """Whether a model has a chat template."""
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template


def check_answered(output: RequestOutput, place: str) -> None:
    """Raise `OnestemError` for an answer that ended with an error."""
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise OnestemError(f"{place}: {answer.stop_reason}")


def load_llm(options: EngineOptions) -> LLM:
    """Import torch and load a model; verbs without a model start fast without this."""
    from onestem.llm import LLM

    return LLM.from_options(options)
