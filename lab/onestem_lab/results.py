"""What a result says of its sources and its machine, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onestem

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMMIT",
    "LAB",
    "RESULTS",
    "ROOT",
    "UNFINISHED",
    "UNKNOWN",
    "bare",
    "commit",
    "commit_of",
    "device_name",
    "hardware",
    "machine",
    "processor",
    "write",
]

_SOURCES = Path(__file__).parents[2]
ROOT = _SOURCES if (_SOURCES / "lab" / "onestem_lab").is_dir() else Path.cwd()
"""The clone that this file is of. An installed copy is of none: that in which it runs."""
LAB = ROOT / "lab"
RESULTS = LAB / "results"
COMMIT = "ONESTEM_COMMIT"
"""Environment variable: the commit of sources that were copied without git."""
UNKNOWN = "unknown"
UNFINISHED = "unfinished"
"""Field of a result that is true while its command still measures."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def write(path: Path, result: Mapping[str, Any] | list[Any]) -> None:
    """Write a result as JSON. An object gets today's date and the commit that runs, unless it has
    its own; its command has no folders of this machine."""
    if isinstance(result, Mapping):
        first = {}
        if "command" in result:
            first["command"] = bare(result["command"])
        own = {name: value for name, value in result.items() if name not in first}
        result = first | {"date": date.today().isoformat(), "commit": commit()} | own
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def bare(command: str) -> str:
    """A command, or other text, without the folders of this machine."""
    return re.sub(r"(?<=[ =])/\S*/", "", command)


@cache
def commit() -> str:
    """The commit of these sources, as it was when a process first asked."""
    return commit_of(ROOT, onestem.__version__)


def commit_of(root: Path, version: str) -> str:
    """The commit of the sources in a folder, with "+" where files differ from it; or else that of
    the version's name, or `UNKNOWN`."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
        found = subprocess.run([*command, "--abbrev=12"], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    named = re.search(r"\+g([0-9a-f]+)", version)
    return named[1] if named else UNKNOWN


def machine() -> dict[str, object]:
    """This machine's CPU, and the versions that run on it."""
    import torch

    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "torch": version("torch"),
        "onestem": _installed(),
    }


def processor(threads: int) -> dict[str, Any]:
    """This machine's CPU by its name and instructions, and how many threads ran on it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name", platform.processor()),
        "threads": threads,
        "instructions": [flag for flag in INSTRUCTIONS if flag in flags],
        "architecture": platform.machine(),
    }


def hardware(device: str) -> str:
    """A GPU's name, or cores and what they have."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    flags = Path("/proc/cpuinfo").read_text()
    has = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return f"{os.cpu_count()} cores with {' and '.join(has) or 'neither AVX-512 nor AMX'}"


def device_name(device: torch.device) -> str:
    """A GPU's name, or `cpu`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _installed() -> str:
    try:
        return version("onestem")
    except PackageNotFoundError:
        return "source"
