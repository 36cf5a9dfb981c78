"""Copies of host arrays to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on a device, without waiting for a GPU; on a CPU, the same memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory a copy waits for the device
    return tensor.to(device, non_blocking=True)
