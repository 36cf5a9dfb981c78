"""The compiled module: whether it is there, and which instruction set it uses.

An installation without a compiler lacks it; everything then runs with PyTorch (`onestem env` says
so). `ONESTEM_CPU_ISA` names an instruction set to use instead of the best.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from types import ModuleType

import torch

from onestem.errors import UnsupportedError

__all__ = ["DTYPES", "chosen_isa", "is_built", "isas", "native", "status"]

# The numbers by which the module knows the types of q, k and v.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

ISA_VARIABLE = "ONESTEM_CPU_ISA"


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and why there is none."""
    try:
        module = importlib.import_module("onestem.ops.cpu._native")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            return None, "not built: install with a C++ compiler for faster attention"
        return None, f"cannot be loaded: {error}"
    module.find_openmp(str(Path(torch.__file__).parent))
    return module, ""


def is_built() -> bool:
    """Whether the extension can be used."""
    return _load()[0] is not None


def native() -> ModuleType:
    """The compiled module; raises `UnsupportedError` where there is none."""
    module, reason = _load()
    if module is None:
        raise UnsupportedError(f"the CPU extension is {reason}; or use impl='torch'")
    return module


def isas() -> tuple[str, ...]:
    """Instruction sets that this machine has and the extension was compiled for, the best first."""
    module = native()
    return tuple(name for name in module.compiled_isas() if module.has_isa(name))


def checked_isa(name: str) -> str:
    """`name`, if it can be used here; else raises `UnsupportedError`."""
    if name in isas():
        return name
    known = native().compiled_isas()
    why = "this machine lacks it" if name in known else "the extension was not compiled for it"
    raise UnsupportedError(f"instruction set {name!r}: {why}, use one of: {', '.join(isas())}")


@functools.cache
def _best_isa(wanted: str) -> str:
    return checked_isa(wanted) if wanted else isas()[0]


def chosen_isa() -> str:
    """The instruction set in use: that of `ONESTEM_CPU_ISA`, or the best that the machine has."""
    return _best_isa(os.environ.get(ISA_VARIABLE, ""))


def status() -> str:
    """One line for a person: whether the extension is there, and what it uses."""
    module, reason = _load()
    if module is None:
        return reason
    return f"built, {chosen_isa()} (of {', '.join(isas())}), threads of {module.thread_source()}"
