"""Launches that begin before the previous one has ended (programmatic dependent launch).

Before `wait_for_launch` such a kernel neither reads nor writes anything that changes. It may fetch
weights, which is why it begins early. The next launch may begin as soon as all of its programs have
passed that point.
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
    """Wait until all earlier launches have ended."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(at):
    """Fetch the lines of 128 bytes at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


# Whether launches between and before products begin early. Not timed yet: see
# `python -m benchmarks.layer --candidates`.
EARLY = False


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The options of a launch; kernels take `DEPENDENT`. Needs compute capability 9.0 or above."""
    if EARLY and _can_depend(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@functools.cache
def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
