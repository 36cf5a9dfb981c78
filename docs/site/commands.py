"""Writes docs/cli.md and lab/cli.md from the commands' own help; see `scripts/docs`.

Options that verbs share (those of the engine, and of a job's input) are listed once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from onestem.checked import words
from onestem.cli.app import app
from onestem.options import EngineOptions, InputOptions, Options
from onestem.server.settings import Settings

__all__ = ["PAGE", "pages"]

PAGE = Path(__file__).parents[1] / "cli.md"
LAB_PAGE = Path(__file__).parents[2] / "lab" / "cli.md"
SHARED: tuple[type[Options], ...] = (EngineOptions, InputOptions)
PANELS = {kind.panel: kind for kind in SHARED}
FEW = 4  # options that are those of another verb are named; fewer are listed again
HAS_ALL = "batch"  # a verb that offers all options of both
HEAD = """# Command line

LLM inference for prompts that share text. `onestem --version` prints the version; `-h` or
`--help` after any verb, its help.

"""
LAB_HEAD = """# Command line of onestem-lab

"""


def pages() -> dict[Path, str]:
    """docs/cli.md with our verbs, and lab/cli.md with those that onestem-lab adds."""
    root = typer.main.get_command(app)
    verbs = root.commands  # type: ignore[attr-defined]
    shared, said = _shared(verbs[HAS_ALL]), {}
    parts = [HEAD, ", ".join(_links(verbs)), ".\n\n"]
    for kind in SHARED:
        parts += [f"## {_title(kind)}\n\n", _intro(kind)]
        parts += ["".join(f"* {record}\n" for record in shared[kind].values()), "\n"]
    parts += _verbs(verbs, "onestem", 2, shared, said)
    ours = "".join(parts).rstrip() + "\n"
    bench, context = verbs["bench"], typer.Context(verbs["bench"])
    names = [name for name in bench.list_commands(context) if name not in bench.commands]
    added = {name: bench.get_command(context, name) for name in sorted(names)}
    theirs = LAB_HEAD + "".join(_verbs(added, "onestem bench", 2, shared, said)).rstrip() + "\n"
    seen_from_lab = re.sub(
        r"\]\((?=[\w-]+\.md\))", "](../docs/", theirs.replace("](#", "](../docs/cli.md#")
    )
    return {PAGE: ours, LAB_PAGE: seen_from_lab}


Records = Mapping[type[Options], Mapping[str, str]]


def _shared(verb: Any) -> Records:
    """By kind: flag -> what its line says."""
    context = verb.make_context("batch", [], resilient_parsing=True)
    return {
        kind: {
            one.opts[0]: _record(one, context, kind)
            for one in verb.params
            if PANELS.get(getattr(one, "rich_help_panel", None)) is kind
        }
        for kind in SHARED
    }


def _record(one: Any, context: Any, kind: type[Options] | None) -> str:
    """`--name <type>`, if it is no text: what it does; its range, where `kind` declares one."""
    name, told = one.get_help_record(context) or ("", "")
    name = re.sub(r" <(?:str|path)>", "", name)
    if kind is not None:
        fields = {f"--{flag}": field for field, flag in kind.offered().items()}
        schema = kind.model_json_schema()["properties"].get(fields.get(one.opts[0]), {})
        limits = words(schema) if schema else ""
        if numbers := re.match(r"(?:an integer|a number) (?:of |from )?(.*)", limits):
            told += f" [{numbers[1]}]"
    told = told.replace("[required]", "(required)")
    return f"`{name}`: {_plain(told)}"


def _plain(text: str) -> str:
    """Text of a help as Markdown."""
    parts = " ".join(text.split()).replace("\\[", "[").split("`")
    return "`".join(p if i % 2 else _marked(p) for i, p in enumerate(parts))


def _marked(text: str) -> str:
    """Escaped, and with links to pages."""
    text = re.sub(r"[*_\\]|<(?=\w)", r"\\\g<0>", text)
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def _title(kind: type[Options]) -> str:
    return f"{kind.panel} options"


def _intro(kind: type[Options]) -> str:
    if kind is InputOptions:
        return "How a job's input is read ([inputs.md](inputs.md)).\n\n"
    others = [
        f"`--{flag}` is `{name}`"
        for name, flag in kind.offered().items()
        if name.replace("_", "-") != flag
    ]
    return (
        "Also arguments of `LLM`, with `_` in place of `-`"
        + "".join(f"; {one} there" for one in others)
        + ". [options.md](options.md) says where else they can be given.\n\n"
    )


def _links(verbs: Mapping[str, Any]) -> Iterator[str]:
    for name, command in verbs.items():
        inside = " ".join(getattr(command, "commands", ()))
        yield f"[{name}](#onestem-{name})" + (inside and f" ({inside})")


def _verbs(
    verbs: Mapping[str, Any], path: str, level: int, shared: Records, said: dict[str, str]
) -> Iterator[str]:
    """Sections. `said` has what stands on the page already: a line, and the verb that has it."""
    for name, command in verbs.items():
        here = f"{path} {name}"
        context = command.make_context(here, [], resilient_parsing=True)
        usage = " ".join([here, *command.collect_usage_pieces(context)])
        yield f"{'#' * level} `{here}`\n\n"
        paragraphs = (command.help or "").strip().split("\n\n")
        yield "".join(f"{_plain(one)}\n\n" for one in paragraphs)
        if hasattr(command, "commands"):
            yield from _verbs(command.commands, here, level + 1, shared, said)
            continue
        yield f"    {usage}\n\n"
        yield from _options(command, context, shared, said)
        if command.epilog and command.epilog not in said:
            said[command.epilog] = here
            yield f"{_plain(command.epilog)}\n\n"


def _options(command: Any, context: Any, shared: Records, said: dict[str, str]) -> Iterator[str]:
    """Lines of a verb's own options, then which of other verbs and of the shared ones it takes."""
    taken: dict[type[Options], list[str]] = {kind: [] for kind in SHARED}
    own: dict[str, str] = {}  # a line -> the option's name
    is_server = "served_model_name" in {one.name for one in command.params}
    for one in command.params:
        kind = PANELS.get(getattr(one, "rich_help_panel", None))
        record = _record(one, context, kind or (Settings if is_server else None))
        if kind is not None and shared[kind].get(one.opts[0]) == record:
            taken[kind].append(one.opts[0])
        else:
            own[record] = one.opts[0] if one.opts[0].startswith("-") else one.metavar
    alike = Counter(said[record] for record in own if record in said)
    other = next((verb for verb, number in alike.most_common(1) if number >= FEW), None)
    others = [name for record, name in own.items() if other and said.get(record) == other]
    lines = [record for record, name in own.items() if name not in others]
    yield "".join(f"* {record}\n" for record in lines) + "\n" if lines else ""
    if other:
        yield f"As in [{other}](#{other.replace(' ', '-')}){_named(': ', others)}.\n\n"
    for record in own:
        said.setdefault(record, context.info_name)
    for kind, flags in taken.items():
        if flags:
            link = f"[{_title(kind).lower()}](#{_title(kind).lower().replace(' ', '-')})"
            left = [flag for flag in shared[kind] if flag not in flags]
            if len(left) < len(flags):
                yield f"All {link}{_named(' but ', left)}.\n\n"
            else:
                yield f"Of the {link}{_named(': ', flags)}.\n\n"


def _named(before: str, flags: Iterable[str]) -> str:
    listed = ", ".join(f"`{flag}`" for flag in flags)
    return before + listed if listed else ""


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
