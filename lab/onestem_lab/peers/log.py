"""The runs that a command has finished, so that it can be stopped and go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from onestem_lab.peers.runners.job import Job

__all__ = ["RunLog"]


class RunLog:
    """One line of JSON for each finished run of a job. Lines of another job are passed over.

    Args:
        stem: path without ending; `answers` stands beside the log.
        keep: go on with what is there; else begin again.
    """

    def __init__(self, stem: Path, job: Job, *, keep: bool) -> None:
        self.path = stem.with_name(f"{stem.name}.runs.jsonl")
        self.answers = stem.with_name(f"{stem.name}.answers.json").resolve()
        self.job = _digest(job)
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, dict[str, Any]] = {}
        if keep and self.path.exists():
            self._read()
        if not self.results:
            self.path.unlink(missing_ok=True)
            self.answers.unlink(missing_ok=True)

    def _read(self) -> None:
        whole = []
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the command was stopped while it wrote
            whole.append(f"{line}\n")
            if entry["job"] == self.job:
                self.results[entry["key"]] = entry["result"]
        self.path.write_text("".join(whole))

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        return self.results.get(_name(key))

    def add(self, key: dict[str, Any], result: dict[str, Any]) -> None:
        entry = {"job": self.job, "key": _name(key), "result": result}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _digest(job: Job) -> str:
    """Of what all engines are given."""
    fields = dataclasses.asdict(dataclasses.replace(job, settings={}, outputs=""))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
