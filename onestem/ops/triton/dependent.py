"""Launches that begin before the one before them has ended (programmatic dependent launch).

Such a kernel first lets the launch after it begin, then waits until all before it have ended.
Before that wait it reads only what no launch changes, as weights, and writes nothing. A launch ends
after its own wait, so one that waits comes after all before it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_launch(DEPENDENT: tl.constexpr):
    """Let the next launch begin, and wait until all before this one have ended."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The options of a launch; kernels take `DEPENDENT`."""
    if _can_depend(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _can_depend(device: torch.device) -> bool:
    """From compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
