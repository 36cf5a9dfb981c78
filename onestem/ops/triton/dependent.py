"""Launches that begin before the one in front of them has ended (programmatic dependent launch).

A kernel that is launched so reads and writes nothing that changes before `wait_for_launch`. What it
may do before, and for which it begins early, is to fetch weights. Whatever comes behind it may
begin as soon as all of its programs have passed there.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["dependent_launch", "fetch_ahead", "wait_for_launch"]


@triton.jit
def wait_for_launch(DEPENDENT: tl.constexpr):
    """All that was launched before has ended behind this."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(at):
    """Bring the lines of 128 bytes at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


# Whether launches between and in front of products begin early. Not timed yet: see
# `python -m benchmarks.layer --candidates`.
EARLY = False


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The options of a launch; kernels take `DEPENDENT`. For compute capability 9.0 and above."""
    if EARLY and _can_depend(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
