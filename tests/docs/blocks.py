"""Code blocks of a page, as somebody who follows it runs them.

A comment before a block says what it is: `<!-- file: NAME -->`, a file that the next ones read;
`<!-- server -->`, it asks a server on port 8000; `<!-- not run: WHY -->`. A `text` block after one
that ran is what it prints; `...` there stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.forked import onestem

__all__ = ["DOCS", "Block", "Page", "blocks"]

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(
    r"^(?:<!-- (?P<told>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass
class Block:
    """A block of code.

    Attributes:
        line: of the page, of its first line of code.
        told: what the comment before it says.
        follows: nothing but blank lines are between it and the block before it.
    """

    language: str
    code: str
    line: int
    told: str
    follows: bool


def blocks(text: str) -> Iterator[Block]:
    end = 0
    for found in FENCE.finditer(text):
        line = text[: found.start("code")].count("\n") + 1
        follows = end > 0 and not text[end : found.start()].strip()
        end = found.end()
        yield Block(found["language"], found["code"], line, found["told"] or "", follows)


class Page:
    """Runs a page's blocks in a folder, Python's in one namespace.

    Args:
        server: gives the URL of a server, in place of http://localhost:8000.
        prelude: Python that a page takes for granted.
    """

    def __init__(self, path: Path, folder: Path, server: Callable[[], str], prelude: str) -> None:
        self._path, self._folder, self._server = path, folder, server
        self._names: dict[str, object] = {"__name__": "__main__"}
        exec(prelude, self._names)

    def run(self) -> None:
        printed: str | None = None
        for block in blocks(self._path.read_text()):
            place = f"{self._path.name}:{block.line}"
            if block.told.startswith("not run: "):
                printed = None
            elif block.told.startswith("file: "):
                (self._folder / block.told.removeprefix("file: ")).write_text(block.code)
                printed = None
            elif block.language == "text":
                if block.follows and printed is not None:
                    assert matches(block.code, printed), f"{place}: it prints\n{printed}"
                printed = None
            else:
                printed = self._ran(block, place)

    def _ran(self, block: Block, place: str) -> str | None:
        code = block.code
        if block.told == "server":
            code = re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", self._server(), code)
        if block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, place, "exec"), self._names)
            return out.getvalue()
        if block.language == "sh":
            return "".join(self._typed(words) for words in commands(code))
        return None

    def _typed(self, words: list[str]) -> str:
        if words[0] == "onestem":
            return onestem(*words[1:], folder=self._folder).stdout
        assert words[0] == "curl", f"{words[0]} is not run here: mark its block"
        done = subprocess.run(
            ["curl", "-sS", "--fail-with-body", *words[1:]],
            capture_output=True, text=True, check=False, cwd=self._folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def commands(code: str) -> Iterator[list[str]]:
    """Words of each command, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def matches(wanted: str, printed: str) -> bool:
    """Whether a text is as wanted, where `...` is anything."""
    parts = (re.escape(part) for part in re.sub(r" +$", "", wanted, flags=re.M).split("..."))
    return re.fullmatch(".*".join(parts), re.sub(r" +$", "", printed, flags=re.M), re.S) is not None
