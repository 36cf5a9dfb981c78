"""What versions of Gluon call differently."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Begins to copy to shared memory by the copy engine: (descriptor, coordinates, barrier, memory).
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# The same by each thread: (memory, addresses, mask).
copy_lines = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Of all threads of a program.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Its name until Triton 3.6, and after.
IS_PRIVATE: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def viewed(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes as `memory`."""
    if IS_PRIVATE:
        return memory._reinterpret(dtype, shape, layout)
    else:  # noqa: RET505 - one of these is compiled
        return memory.reinterpret(dtype, shape, layout)


@gluon.jit
def without_first(memory):
    """Memory `[n, ...]` from its second part on, to be `viewed`."""
    if IS_PRIVATE:
        return memory.index(1)
    else:  # noqa: RET505 - one of these is compiled
        return memory.slice(1, memory.shape[0] - 1)
