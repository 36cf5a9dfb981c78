"""What the pages of docs/ show works: every block runs, is read as what it is, or says why not."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.blocks import DOCS, Block, Page, blocks, matches
from tests.forked import Command

EMBEDDED = DOCS.parent / "onestem" / "embedded" / "model"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.name != "cli.md" and "reference" not in path.relative_to(DOCS).parts
)
READ: dict[str, Callable[[str], object]] = {
    "json": lambda code: [json.loads(line) for line in code.splitlines()],
    "toml": tomllib.loads,
    "xml": ElementTree.fromstring,
    "text": lambda code: None,
    "nginx": lambda code: None,
}
PART = "not run: a part of "
PRELUDES = {
    "scores": """
from pathlib import Path
Path("examples.txt").write_text("Q: Is snow warm?\\nA: B\\n")
""",
    "pml": f"""
import re
from pathlib import Path
xml = re.findall("```xml\\n(.*?)```", Path({str(DOCS / "pml.md")!r}).read_text(), re.DOTALL)
Path("cities.xml").write_text(xml[0])
Path("prompt.xml").write_text(xml[1])
""",
    "rollouts": """
from onestem import LLM
from transformers import AutoModelForCausalLM
path = "path/to/a/model"
llm, model = LLM(path, device="cpu"), AutoModelForCausalLM.from_pretrained(path)
""",
}
"""What pages take for granted."""


def is_run(block: Block) -> bool:
    return block.language in ("python", "sh") and not block.told.startswith("not run: ")


def of(path: Path) -> list[Block]:
    return list(blocks(path.read_text()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_parts_of_files_are_in_them(path):
    for block in of(path):
        file = DOCS.parent / block.told.removeprefix(PART)
        if block.told.startswith(PART) and file.is_file():
            there = {"", "{", "}", *map(str.strip, file.read_text().splitlines())}
            assert not [line for line in block.code.splitlines() if line.strip() not in there]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Callable[[], str]]:
    """The URL of `onestem serve`, started when a page first asks it."""
    folder = tmp_path_factory.mktemp("server")
    started: list[Command] = []

    def url() -> str:
        if not started:
            (text,) = (b for b in of(DOCS / "tutorials" / "service.md") if "support" in b.told)
            (folder / "support.txt").write_text(text.code)
            started.append(Command(
                "serve", "--port", 0, "--state", folder / "state", "--app", "support=support.txt",
                "--kv-memory", "128MiB", "--max-model-len", 2048, "--device", "cpu",
                "--dtype", "float32", folder=folder,
            ))  # fmt: skip
        (command,) = started

        def told() -> list[str]:
            lines = command.stderr.splitlines()
            return [json.loads(line)["url"] for line in lines if '"event": "listening"' in line]

        command.until(lambda: bool(told()), 90.0)
        assert command.is_running, command.stderr
        return told()[0]

    yield url
    for command in started:
        command.send(signal.SIGTERM)
        command.wait(60.0)


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if any(map(is_run, of(path)))],
    ids=lambda path: str(path.relative_to(DOCS)),
)
def test_blocks_run(path, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONESTEM_KV_MEMORY", "64MiB")
    monkeypatch.setenv("ONESTEM_DTYPE", "float32")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("path/to/a/model", "path/to/a/hugging-face/model"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(EMBEDDED)
    Page(path, tmp_path, server, PRELUDES.get(path.stem, "")).run()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_other_blocks_are_what_they_are_called(path):
    for block in of(path):
        if is_run(block) or block.told.startswith("not run: ") or block.language.startswith("{"):
            continue  # Sphinx reads directives
        assert block.language in READ, f"{path.name}:{block.line}: ```{block.language}"
        READ[block.language](block.code)


def test_what_is_printed_is_compared():
    assert matches("a\n...\nz\n", "a  \nb\nc\nz\n")
    assert not matches("a\n...\nz\n", "a\nb\n")
    assert not matches("a.c\n", "abc\n")
