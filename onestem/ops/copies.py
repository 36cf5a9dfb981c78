"""Copies of host arrays to a device, and memory that both see."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on a device, without waiting for a GPU; on a CPU, the same memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory a copy waits for the device
    return tensor.to(device, non_blocking=True)


@dataclass(eq=False)
class HostWords:
    """What the host writes for a step, and a GPU's kernels read over the bus. A copy would wait for
    all copies that were begun, on whichever stream: of keys and values they take 20 ms.

    Attributes:
        seen: int32 or int64, zeros at first, on the device.
        array: the same memory on the host.
        uploaded: after it `array` may be written again; None: now.
    """

    seen: Tensor
    array: np.ndarray
    uploaded: torch.cuda.Event | None

    @staticmethod
    def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> HostWords:
        """One for a device; on a CPU, memory of its own."""
        if device.type != "cuda":
            here = torch.zeros(shape, dtype=dtype, device="cpu")
            return HostWords(here, here.numpy(), None)
        with torch.cuda.device(device):  # else the memory is taken for another GPU's, and copied
            here = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
            data, kind = (here.data_ptr(), False), f"<i{here.itemsize}"
            array = {"shape": shape, "typestr": kind, "data": data, "version": 3}
            memory = SimpleNamespace(kept=here, __cuda_array_interface__=array)
            seen = torch.as_tensor(memory, device=device)
        assert seen.data_ptr() == here.data_ptr()
        return HostWords(seen, here.numpy(), torch.cuda.Event())

    def writable(self) -> np.ndarray:
        """`array`, when it may be written."""
        if self.uploaded is not None:
            self.uploaded.synchronize()
        return self.array

    def upload(self, to: Tensor) -> None:
        """Fill a tensor on the device with what comes first."""
        torch.bitwise_or(self.seen[: len(to)], 0, out=to)
        if self.uploaded is not None:
            self.uploaded.record()
