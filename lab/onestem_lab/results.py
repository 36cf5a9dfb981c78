"""Where results are, and what each says of its sources and its machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["LAB", "RESULTS", "ROOT", "commit", "machine"]

ROOT = Path(__file__).parents[2]  # of a clone
LAB = ROOT / "lab"
RESULTS = LAB / "results"


def commit() -> str:
    """The commit of this checkout, with "+" where files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def machine() -> dict[str, object]:
    """This machine's CPU, and the versions that ran on it."""
    import torch

    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "torch": version("torch"),
        "onestem": _installed(),
        "commit": commit(),
    }


def _installed() -> str:
    try:
        return version("onestem")
    except PackageNotFoundError:
        return "source"
