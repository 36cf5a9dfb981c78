"""A benchmark's module, run in a process of its own by this version of the project or another; and
processes that keep the machine busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onestem_lab.results import LAB

# An editable installation would find its own package first, and another checkout has benchmarks of
# its own: only the package comes from the folder. It comes before torch (`onestem.threads`).
RUN = """
import importlib.machinery, importlib.util, runpy, sys
folder = sys.argv[1]
sys.argv = sys.argv[2:]
if folder:
    sys.meta_path[:] = [it for it in sys.meta_path if "_editable" not in type(it).__module__]
    spec = importlib.machinery.PathFinder.find_spec("onestem", [folder])
    if spec is None or spec.loader is None:
        sys.exit(f"{folder} has no package onestem: a checkout or pip install --target makes it")
    sys.modules["onestem"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["onestem"])
import onestem
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def command_of(module: str, arguments: Sequence[str], folder: Path | None = None) -> list[str]:
    """The command that runs `module`, from `LAB`. `folder`: of another version, a checkout or an
    installation (`pip install --target`). A checkout has no compiled CPU kernels."""
    where = "" if folder is None else str(folder.resolve())
    return [sys.executable, "-c", RUN, where, module, *arguments]


def measured(module: str, arguments: Sequence[str], folder: Path | None = None) -> Any:
    """What the last line says that `module` prints, as JSON; see `command_of`."""
    command = command_of(module, arguments, folder)
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=LAB)
    if out.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed, of {folder or 'this version'}")
    return json.loads(out.stdout.splitlines()[-1])


def in_turns(
    module: str, arguments: Sequence[str], against: Path | None, turns: int
) -> Iterator[tuple[str, Any]]:
    """`measured` of this version ("now") and of another, if there is one ("before"), in so many
    turns, of which each other one begins with the other."""
    sides: list[tuple[str, Path | None]] = [("now", None)]
    if against is not None:
        sides.append(("before", against))
    for turn in range(turns):
        for side, folder in sides[:: -1 if turn % 2 else 1]:
            yield side, measured(module, arguments, folder)


@contextmanager
def busy_cores(
    code: str = "while True: pass", count: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes, or one for each core, that run Python code without end."""
    command = [sys.executable, "-c", code]
    count = (os.cpu_count() or 1) if count is None else count
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
