"""The compiled module: whether it exists, and which instruction set it uses.

An installation without a compiler lacks it, and everything runs with PyTorch (`onestem env` says
so). `ONESTEM_CPU_ISA` names an instruction set to use instead of the best. An instruction set that
computes wrongly on this machine (`check.py`) is not used, with a warning.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import warnings
from pathlib import Path
from types import ModuleType

import torch

from onestem.errors import UnsupportedError

# The module's numbers for the dtypes of q, k and v.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

ISA_VARIABLE = "ONESTEM_CPU_ISA"

# These run on every machine of development and tests; others are checked before use.
UNCHECKED = ("avx2", "portable")


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and the reason."""
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
    """The compiled module; raises `UnsupportedError` if there is none."""
    module, reason = _load()
    if module is None:
        raise UnsupportedError(f"the CPU extension is {reason}; or use impl='torch'")
    return module


def isas() -> tuple[str, ...]:
    """Instruction sets that this machine has and the extension was compiled for, the best first."""
    module = native()
    return tuple(name for name in module.compiled_isas() if module.has_isa(name))


def checked_isa(name: str | None) -> str:
    """`name`, if it can be used here, else raises `UnsupportedError`; None: the one in use."""
    if name is None:
        return chosen_isa()
    if name in isas():
        return name
    known = native().compiled_isas()
    why = "this machine lacks it" if name in known else "the extension was not compiled for it"
    raise UnsupportedError(f"instruction set {name!r}: {why}, use one of: {', '.join(isas())}")


@functools.cache
def fault_of(isa: str) -> str | None:
    """What an instruction set computes wrongly on this machine; None if all is correct."""
    from onestem.ops.cpu.check import find_fault  # it imports this module

    return None if isa in UNCHECKED else find_fault(isa)


@functools.cache
def chosen_isa() -> str:
    """The instruction set in use: that of `ONESTEM_CPU_ISA`, or the machine's best that computes
    correctly. Chosen at the first call."""
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        if (fault := fault_of(checked_isa(wanted))) is None:
            return wanted
        raise UnsupportedError(
            f"instruction set {wanted!r} computes {fault} wrongly on this machine: unset "
            f"{ISA_VARIABLE}"
        )
    names = isas()
    faulty = list(itertools.takewhile(fault_of, names))  # never the last, `portable`
    for name in faulty:
        warnings.warn(
            f"instruction set {name!r} computes {fault_of(name)} wrongly on this machine and is "
            "not used: please report it, with the output of `onestem env`",
            RuntimeWarning,
            stacklevel=2,
        )
    return names[len(faulty)]


def status() -> str:
    """One line of text: whether the extension can be used, and its instruction set."""
    module, reason = _load()
    if module is None:
        return reason
    chosen = chosen_isa()
    faults = [f"{name} computes {fault} wrongly" for name in isas() if (fault := fault_of(name))]
    return "; ".join(
        [f"built, {chosen} (of {', '.join(isas())}), threads of {module.thread_source()}", *faults]
    )
