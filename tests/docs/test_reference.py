"""Pages that speak of the code: its messages, the names that it declares, pictures as drawn."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer

from onestem.cli.app import app
from tests.docs.blocks import DOCS

PACKAGE = DOCS.parent / "onestem"
ANY = "\0"  # what a message fills in
# Files and folders of the repository, as pages name them.
NAMED = re.compile(r"`([\w./-]+\.(?:py|cpp|h)|(?:csrc|docs|lab|onestem|scripts|tests)/[\w./-]*)`")


def loaded(path: str) -> ModuleType:
    """A script of the repository, without running it."""
    name = path.rpartition("/")[2].removesuffix(".py")
    loader = importlib.machinery.SourceFileLoader(name, str(DOCS.parent / path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module  # for dataclasses
    try:
        loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def texts() -> Iterator[str]:
    """All texts in the package's code; `ANY` stands for what is filled in."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else ANY
                    for part in node.values
                )


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text().partition("## Slow")[0]
    messages = re.findall(r"^\| `(.*?)` \|", page, re.M)
    assert len(messages) > 25
    known = "\n".join(text.replace("\n", " ") for text in texts())
    for message in messages:
        parts = [re.escape(part) for part in message.split("...")]
        # A blank may stand for ANY, and no part may: each filled-in place is one of the message's.
        pattern = r"[^\n]*".join(parts)
        found = re.search(rf"^{pattern}$", known, re.M)
        assert found, message
        assert found[0].count(ANY) <= 2 * message.count("..."), message


def test_the_command_line_is_what_help_says():
    """Every option of a verb is among its own on the page, or a shared one that it takes."""
    commands = loaded("docs/site/commands.py")
    for path, text in commands.pages().items():
        assert path.read_text() == text, f"{path.name}: run scripts/docs"
    page = commands.PAGE.read_text()
    shared, _, verbs = page.partition("## `onestem batch`")
    for path, verb in verbs_of(typer.main.get_command(app), "onestem"):
        section = f"## `onestem batch`{verbs}".partition(f"# `{path}`\n")[2].partition("\n##")[0]
        left_out = re.findall(r"`(\S+)`", " ".join(re.findall(r"\) but (.*)\.$", section, re.M)))
        for flag in (one.opts[0] for one in verb.params if one.opts[0].startswith("-")):
            own = re.search(rf"^\* `[^`]*{flag}\b", section, re.M)
            of_all = f"* `{flag}" in shared and "All [" in section and flag not in left_out
            assert own or of_all or f"`{flag}`" in section, (path, flag)


def verbs_of(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_pictures_are_as_they_are_drawn():
    drawn = dict(loaded("docs/site/pictures.py").pictures())
    assert set(drawn) == {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    for name, picture in drawn.items():
        assert picture == (DOCS / "pictures" / f"{name}.svg").read_text(), (
            f"{name}: run scripts/docs"
        )


def test_the_linter_of_prose_sees_what_it_is_to_see():
    prose = loaded("scripts/prose")
    words = list(prose.words_of(prose.STYLE.read_text()))
    assert len(words) > 10
    text = (
        "Hides behind it. `a. B` is X.\n\n```sh\nbehind it\n```\n\n* One\n  two.\n* "
        + "w " * 41
        + "\n"
    )
    found = list(prose.sentences(text))
    assert [one.words for one in found] == [3, 3, 2, 41]
    faults = list(prose.check(found, words, 40))
    assert len(faults) == 2
    assert "'behind'" in faults[0]
    assert "41 words" in faults[1]
    many = [prose.Sentence(1, "word " * size) for size in (5,) * 8 + (28, 28)]
    assert any("a tenth" in fault for fault in prose.check(many, [], 40))
    assert list(prose.too_long("line\n" * 150, 150)) == [
        "150: the page has 150 lines, limit is 149"
    ]
    assert not list(prose.too_long("line\n" * 149, 150))
    assert not list(prose.too_wordy("| a word | - |\n" * 900))
    assert "1801 words" in next(prose.too_wordy("word\n" * 1801))


def test_the_linter_of_prose_reads_docstrings_helps_and_errors():
    prose = loaded("scripts/prose")
    words = list(prose.words_of(prose.STYLE.read_text()))
    source = '''"""It hides
behind it.

Args:
    one: so many
        of them.
    two: fine.
"""
add("--x", help="just one", default="behind")
raise ValueError(f"{x} stands behind {y + 'behind'}", "fine")
text = "so many"
'''
    found = list(prose.sentences_of_code(source))
    assert [(one.line, one.words) for one in found][:3] == [(1, 4), (5, 4), (7, 1)]
    faults = [fault.partition(": say")[0] for fault in prose.check(found, words, 40)]
    assert faults == ["1: 'behind'", "5: 'so many'", "10: 'behind'", "9: 'just'"]


def test_words_for_people_are_no_words_for_things():
    prose = loaded("scripts/prose")
    words = list(prose.words_of(prose.STYLE.read_text()))
    things = (
        "Rows who decode.", "Who waits holds a future.", "All who run are preempted.",
        "It is for who asks.", "Rows are made anew.", "A step is told by arrays.",
        "A key stands twice.",
    )  # fmt: skip
    people = (
        "Who reads it?", "Somebody who asks.", "Say who does what.", "Users are told that it ends.",
        "A slot stands for a token.", "The text is taken as it stands.",
    )  # fmt: skip
    for text in things:
        assert list(prose.check([prose.Sentence(1, text)], words, 40)), text
    for text in people:
        assert not list(prose.check([prose.Sentence(1, text)], words, 40)), text
    (error,) = prose.sentences_of_code('raise ValueError("a key stands twice")')
    assert not list(prose.check([error], words, 40))


def test_files_that_pages_name_are_there():
    root = DOCS.parent
    folders = ("csrc", "docs", "examples", "lab", "onestem", "scripts", "tests", "training")
    there = [path for folder in folders for path in (root / folder).rglob("*")]
    files = [*(f"/{one}" for one in folders), *(f"/{path.relative_to(root)}" for path in there)]
    pages = [*DOCS.rglob("*.md"), *(root / f"{name}.md" for name in ("README", "CONTRIBUTING"))]
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for name in NAMED.findall(text):
            file = name.rstrip("/")
            assert any(one.endswith(f"/{file}") for one in files), f"{page.name}: {name}"
