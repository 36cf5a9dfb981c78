"""The instruction sets that CPU tests run: those of this machine, and the emulated ones.

`scripts/install VENV dev` builds the module `_emulated`, in which AVX-512 and AMX are computed with
AVX2 (`csrc/emulate`); their kernels are the same source. A plain installation lacks it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from onestem.ops.cpu import (
    CpuAttention,
    CpuCost,
    CpuDelta,
    CpuLayers,
    CpuSampling,
    extension,
    is_built,
    isas,
)

# Of these only the kernels for bf16 are their own; the others are AVX-512's.
BF16_ONLY = ("amx_bf16", "avx512_bf16")


def emulated() -> ModuleType | None:
    """The module for tests, or None where it was not built."""
    try:
        module = importlib.import_module("onestem.ops.cpu._emulated")
    except ModuleNotFoundError:
        return None
    module.find_openmp(str(Path(torch.__file__).parent))
    return module


@dataclass(frozen=True)
class Isa:
    """An instruction set, of this machine or emulated."""

    name: str
    module: ModuleType | None = None

    def __str__(self) -> str:
        return self.name if self.module is None else f"{self.name}-emulated"

    def has(self, dtype: torch.dtype) -> bool:
        """Whether it has kernels of its own for a dtype."""
        return dtype == torch.bfloat16 or self.name not in BF16_ONLY

    def attention(self, cost: CpuCost | None = None, deterministic: bool = False) -> Any:
        return self._bound(CpuAttention(isa=self.name, cost=cost, deterministic=deterministic))

    def layers(self) -> Any:
        return self._bound(CpuLayers(isa=self.name))

    def delta(self) -> Any:
        return self._bound(CpuDelta(isa=self.name))

    def sampling(self) -> Any:
        return self._bound(CpuSampling(isa=self.name))

    def codes(self, codes: Any) -> Any:
        return self._bound(replace(codes, isa=self.name))

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a function to which `onestem.ops.cpu` has this module for its own."""
        if self.module is None:
            return function(*args, **options)
        with patch.object(extension, "_load", lambda: (self.module, "")):
            return function(*args, **options)

    def _bound(self, ops: Any) -> Any:
        return ops if self.module is None else _Bound(self, ops)


class _Bound:
    """Operations whose every call goes to an emulated module."""

    def __init__(self, isa: Isa, ops: Any) -> None:
        self._isa, self._ops = isa, ops

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ops, name)

        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            return self._isa.call(method, *args, **options)

        return call


def _every_isa() -> tuple[Isa, ...]:
    if not is_built():
        return ()
    module = emulated()
    own = tuple(Isa(name) for name in isas())
    if module is None or not module.has_isa("avx512"):
        return own
    return own + tuple(Isa(name, module) for name in module.compiled_isas() if name != "portable")


EVERY_ISA = _every_isa()
EMULATED = tuple(isa for isa in EVERY_ISA if isa.module is not None)
