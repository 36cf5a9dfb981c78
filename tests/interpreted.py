"""Triton's interpreter, with what it works out again and again kept: an operation on a few numbers
costs it forty others on types and shapes, and kernels took a sixth of the suite's time.

numpy computes the same of the same arrays, and what the interpreter refuses, it refuses. Written
for the version of `constraints.txt`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["hasten"]


def hasten() -> None:
    """Patch this process's interpreter, once."""
    for owner, name, made in (
        (interpreter.InterpretedFunction, "__call__", _patch_once),
        (interpreter, "_patch_attr", _call_straight),
        (interpreter, "_get_np_dtype", _types_by_name),
        (interpreter.InterpreterBuilder, "get_all_ones_value", _all_ones),
        (core.dtype, "__eq__", _same_is_equal),
        (core.block_type, "__init__", _checked_shapes),
        (core.block_type, "to_ir", _types_as_they_are),
        (core.tensor, "__init__", _wrapped_shapes),
        (TritonSemantic, "computation_type_impl", _computation_types),
        (TritonSemantic, "broadcast_impl_value", _alike_as_they_are),
        (TritonSemantic, "binary_op_type_checking_impl", _operands),
    ):
        setattr(owner, name, made(getattr(owner, name)))
    # Sums of integers are computed a second time in 64 bits, and compared with the bounds of their
    # type, for an assertion that is dropped where nobody debugs.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once(first: Callable) -> Callable:
    """At each call of a function within a kernel the interpreter patches Triton's language, which
    takes half of the time. What the first call patches stays patched: others go without."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if core.is_builtin(core.full):
            return first(self, *args, **options)
        return self.rewrite()(*args, **options)

    return call


def _call_straight(_: Callable) -> Callable:
    """A function of the language is called through two others, of which one copies its options."""
    semantic = interpreter.interpreter_semantic
    checks = core.builtin(lambda: None).__code__  # that there is a semantic

    def patch(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is checks else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(target, name, call)

    return patch


def _types_by_name(find: Callable) -> Callable:
    """numpy's type of one of Triton's is found by the type's name."""
    found: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return numpy_type


def _all_ones(_: Callable) -> Callable:
    """Of unsigned types too, for which numpy refuses a -1."""

    def made(self: Any, type: Any) -> Any:
        name = type.scalar.name
        ones = ~np.zeros(1, bool if name == "int1" else name)
        return interpreter.TensorHandle(ones, type.scalar)

    return made


def _same_is_equal(equal: Callable) -> Callable:
    """Equal types are mostly the same object."""
    return lambda self, other: self is other or equal(self, other)


def _computation_types(decide: Callable) -> Callable:
    """In which type two types are computed is decided once."""
    decided: dict[Any, Any] = {}

    def computation_type(self: Any, one: Any, scalar: bool, other: Any, *more: bool) -> Any:
        key = (one.name, scalar, other.name, *more)
        if key not in decided:
            decided[key] = decide(self, one, scalar, other, *more)
        return decided[key]

    return computation_type


def _checked_shapes(make: Callable) -> Callable:
    """A shape is checked the first time that it is seen."""
    checked: dict[Any, Any] = {}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        if key not in checked:
            make(self, element_ty, shape)
            checked[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = checked[key]
        self.name = f"<{text}, {element_ty}>"

    return make_type


def _types_as_they_are(convert: Callable) -> Callable:
    """The interpreter's form of a type is one that is equal."""

    def to_ir(self: Any, builder: Any) -> Any:
        if builder is interpreter.interpreter_builder and not self.element_ty.is_ptr():
            return self
        return convert(self, builder)

    return to_ir


def _wrapped_shapes(make: Callable) -> Callable:
    """Tensors of one shape have one object of it, made for the language once."""
    wrapped: dict[Any, Any] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in wrapped:
            make(self, handle, type)
            wrapped[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped[key]

    return make_tensor


def _alike_as_they_are(broadcast: Callable) -> Callable:
    """Nothing is to be done where shapes are the same."""

    def broadcast_unlike(self: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    return broadcast_unlike


def _operands(match: Callable) -> Callable:
    """Two tensors of one type go into an operation as they are, and a number becomes the tensor
    that it became before."""
    numbers: dict[Any, Any] = {}

    def operands(self: Any, one: Any, other: Any, *flags: bool, **named: bool) -> Any:
        both = type(one) is core.tensor, type(other) is core.tensor
        if both == (True, True):
            alike = one.shape is other.shape and one.dtype is other.dtype
            # The first two flags are about pointers.
            if alike and len(flags) < 3 and not named and not one.dtype.is_ptr():
                return one, other
            return match(self, one, other, *flags, **named)
        number, beside = (one, other) if both[1] else (other, one)
        kind = type(number)
        # 0.0 and -0.0 are equal, as keys too.
        if not any(both) or kind not in (int, float) or (kind is float and number == 0) or named:
            return match(self, one, other, *flags, **named)
        # By the object of a shape, which `_wrapped_shapes` keeps for good.
        key = kind, number, id(beside.shape), beside.dtype.name, both, flags
        if key in numbers:
            return (numbers[key], other) if both[1] else (one, numbers[key])
        matched = match(self, one, other, *flags)
        if matched[both[1]] is beside:
            if len(numbers) == 4096:  # loops count
                numbers.clear()
            numbers[key] = matched[both[0]]
        return matched

    return operands
