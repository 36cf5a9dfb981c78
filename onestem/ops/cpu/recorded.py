"""What a step's layers compute as one call of C++: Python takes a third of a small model's step.

The first step of a number of rows is run call by call, and recorded: the calls of the extension
with the addresses of their tensors, which are all kept. A step with anything else in it, such as a
product by PyTorch, is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onestem.errors import ConfigError
from onestem.ops.cpu.attention import PreparedCpu
from onestem.ops.cpu.extension import native

_EMPTY = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
# They may copy, which is seen by the storage.
_VIEWS = (
    "aten.alias.default",
    "aten.detach.default",
    "aten.flatten.using_ints",
    "aten.slice.Tensor",
    "aten.to.dtype",
    "aten.view.default",
)


class _Kept(TorchDispatchMode):
    """Keeps what is allocated.

    Attributes:
        tensors: in the order of their allocation.
        alone: whether nothing else was done by PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.alone = True

    _should_skip_dynamo = classmethod(lambda cls: False)  # or a second's import of the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func) in _EMPTY:
            self.tensors.append(found)
        elif str(func) not in _VIEWS or _storage(found) != _storage(args[0]):
            self.alone = False
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorded:
    """The calls of a step.

    Args:
        inputs: what differs from step to step; the call gets copies of them.
        plans: of its attention.
        call: runs the step.

    Attributes:
        found: what the call returned, written by each step.
        works: whether it can be run again.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        plans: Sequence[PreparedCpu],
        call: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        self._inputs = [one.clone() for one in inputs]
        self._program = native().Program(torch.get_num_threads())
        self._program.begin([plan.native for plan in plans])
        try:
            with _Kept() as kept:
                self.found = call(self._inputs)
        finally:
            self._program.end()
        self.works = kept.alone
        self._kept = kept.tensors

    def run(self, inputs: Sequence[Tensor], plans: Sequence[PreparedCpu], num_pages: int) -> Tensor:
        """The same step of other inputs and plans, for as many rows.

        Raises:
            ConfigError: a slot or a plan's page is not in the KV pages.
        """
        for plan in plans:
            plan.check(len(inputs[0]), num_pages)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        if not self._program.run([plan.native for plan in plans]):
            raise ConfigError("a slot is not in the KV pages")
        return self.found
