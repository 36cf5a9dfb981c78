"""Another checkpoint of the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["changed_model", "tensors_of"]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a model directory, by their names."""
    return load_file(path / "model.safetensors")


def changed_model(path: Path, into: Path, seed: int = 1) -> Path:
    """A model directory in which every tensor has other values, biases and norms too."""
    shutil.copytree(path, into)
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(path)
    for name in sorted(tensors):
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = tensors[name] * (1 + 0.3 * noise) + 0.01 * noise
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into
