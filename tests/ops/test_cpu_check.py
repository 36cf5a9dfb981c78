"""Instruction sets that compute wrongly are found at their first use, and not used."""

from __future__ import annotations

import ctypes
import warnings
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from onestem.errors import UnsupportedError
from onestem.ops.cpu import chosen_isa, extension, is_built, native, status
from onestem.ops.cpu.check import find_fault
from tests.ops.cpu_isas import EVERY_ISA

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

TYPES = ["float32", "bfloat16", "float16"]  # by their numbers
# Where the pointer of what an operation writes stands among its arguments.
WRITES = {
    "attend": 5, "lse": 6, "add_rms_norm": 5, "hidden": 2, "silu_mul": 3, "rope_write": 8,
    "k_pages": 9, "v_pages": 10, "multiply_codes": 3, "causal_conv": 9, "inputs": 7,
    "delta_rule": 9, "states": 7, "gated_norm": 8,
}  # fmt: skip
FUNCTION_OF = {
    "lse": "attend",
    "hidden": "add_rms_norm",
    "inputs": "causal_conv",
    "k_pages": "rope_write",
    "states": "delta_rule",
    "v_pages": "rope_write",
}
NAMES = {
    **dict.fromkeys(("attend", "lse"), "attention"),
    **dict.fromkeys(
        ("causal_conv", "inputs", "delta_rule", "states", "gated_norm"), "gated delta rules"
    ),
    "multiply_codes": "products of 8 and 4 bits",
}


class Faulty:
    """The module with an instruction set more, "better": as "portable", but the first element of
    what one operation writes for one type is 3.5."""

    def __init__(self, module: ModuleType, wrong: str | None, dtype: str) -> None:
        self._module, self._wrong, self._dtype = module, wrong, TYPES.index(dtype)

    def compiled_isas(self) -> list[str]:
        return ["better", *self._module.compiled_isas()]

    def has_isa(self, name: str) -> bool:
        return name == "better" or self._module.has_isa(name)

    def make_plan(self, isa: str, *args: Any) -> Any:
        if isa != "better":
            return self._module.make_plan(isa, *args)
        return _Plan(self, self._module.make_plan("portable", *args))

    def multiply_codes(self, isa: str, dtypes: tuple[int, int], *args: Any) -> None:
        self._module.multiply_codes("portable" if isa == "better" else isa, dtypes, *args)
        if isa == "better":
            self.spoil("multiply_codes", dtypes[1], (isa, dtypes, *args))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        return partial(self._run, name, function) if name in WRITES else function

    def _run(self, name: str, function: Any, isa: str, *args: Any) -> Any:
        result = function("portable" if isa == "better" else isa, *args)
        if isa == "better":
            self.spoil(name, args[0], (isa, *args))
        return result

    def spoil(self, name: str, dtype: int, args: tuple[Any, ...]) -> None:
        if self._wrong is None or dtype != self._dtype:
            return
        if FUNCTION_OF.get(self._wrong, self._wrong) != name:
            return
        address = args[WRITES[self._wrong]]
        if dtype == 0 or self._wrong in ("lse", "states"):
            ctypes.c_float.from_address(address).value = 3.5
        else:
            ctypes.c_uint16.from_address(address).value = 0x4060 if dtype == 1 else 0x4300


class _Plan:
    def __init__(self, module: Faulty, plan: Any) -> None:
        self._module, self._plan = module, plan

    def last_page(self) -> int:
        return self._plan.last_page()

    def attend(self, *args: Any) -> None:
        self._plan.attend(*args)
        self._module.spoil("attend", args[0], args)


@pytest.fixture
def using(monkeypatch):
    """Puts a module in the place of the extension, in which nothing is known yet."""

    def forget() -> None:
        extension.fault_of.cache_clear()
        extension.chosen_isa.cache_clear()

    def use(module: Any) -> None:
        monkeypatch.setattr(extension, "_load", lambda: (module, ""))
        forget()

    monkeypatch.delenv(extension.ISA_VARIABLE, raising=False)
    yield use
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("isa", EVERY_ISA, ids=str)
def test_every_isa_has_no_fault(isa):
    assert isa.call(find_fault, isa.name) is None


def test_what_computes_rightly_is_used(using):
    using(Faulty(native(), None, "float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen_isa() == "better"
    assert "wrongly" not in status()


@pytest.mark.parametrize("wrong", sorted(WRITES))
@pytest.mark.parametrize("dtype", TYPES)
def test_one_wrong_value_is_found(using, wrong, dtype):
    module = native()
    using(Faulty(module, wrong, dtype))
    what = NAMES.get(wrong, "layer operations")
    message = f"'better' computes {what} in {dtype} wrongly on this machine and is not used"
    with pytest.warns(RuntimeWarning, match=message):
        assert chosen_isa() == next(n for n in module.compiled_isas() if module.has_isa(n))
    assert status().endswith(f"; better computes {what} in {dtype} wrongly")


def test_what_computes_wrongly_cannot_be_forced(using, monkeypatch):
    using(Faulty(native(), "attend", "bfloat16"))
    monkeypatch.setenv(extension.ISA_VARIABLE, "better")
    with pytest.raises(UnsupportedError, match="'better' computes attention in bfloat16 wrongly"):
        chosen_isa()
