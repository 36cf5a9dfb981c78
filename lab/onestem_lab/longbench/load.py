"""LongBench's files: one JSON object a line, with `input`, `context`, `answers`, `dataset`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.errors import ConfigError
from onestem_lab.longbench.tasks import TASKS

__all__ = ["Example", "find_files", "passages", "read_examples"]

_PASSAGE = re.compile(r"^(?=(?:Passage|Paragraph) \d+:)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One line.

    Attributes:
        task: a key of `TASKS`.
        name: unique within a run: the file and the line.
        labels: all classes, where there are any.
    """

    task: str
    name: str
    input: str
    context: str
    answers: tuple[str, ...]
    labels: tuple[str, ...]


def find_files(paths: list[Path]) -> list[Path]:
    """The files named, and those of known tasks in the folders named (also the `_e` ones)."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = [f for f in sorted(path.glob("*.jsonl")) if f.stem.removesuffix("_e") in TASKS]
            if not found:
                raise ConfigError(f"{path} has no file like hotpotqa.jsonl: name LongBench's data")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"{path} does not exist: name LongBench's files or their folder")
    return files


def read_examples(file: Path, limit: int | None = None) -> list[Example]:
    """The first `limit` examples of a file.

    Raises:
        ConfigError: names file, line and field.
    """
    examples = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(examples) >= limit:
                break
            if line.strip():
                examples.append(_example(line, f"{file}, line {number}", f"{file.stem}-{number}"))
    if not examples:
        raise ConfigError(f"{file} holds no examples")
    return examples


def _example(line: str, at: str, name: str) -> Example:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{at}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{at}: {type(fields).__name__}, expected a JSON object")
    task = _text(fields, "dataset", at).removesuffix("_e")
    if task not in TASKS:
        raise ConfigError(f"{at}: dataset is {task!r}, known: {', '.join(TASKS)}")
    labels = fields.get("all_classes")
    answers = _texts(fields.get("answers"), "answers", at)
    if not answers:
        raise ConfigError(f"{at}: answers is empty, expected at least one text")
    return Example(
        task=task,
        name=name,
        input=_text(fields, "input", at),
        context=_text(fields, "context", at),
        answers=answers,
        labels=() if labels is None else _texts(labels, "all_classes", at),
    )


def _text(fields: dict[str, Any], name: str, at: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{at}: {name} is {value!r}, expected a text")
    return value


def _texts(value: object, name: str, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{at}: {name} is {value!r}, expected a list of texts")
    return tuple(value)


def passages(context: str) -> Iterator[str]:
    """The context's numbered passages, each a module of its own; or the whole context."""
    for part in _PASSAGE.split(context):
        if part.strip():
            yield part
