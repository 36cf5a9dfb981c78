"""Random weights of a shape, saved once so that all engines run the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from onestem.shapes import find_shape

__all__ = ["model_directory", "write_weights"]


def model_directory(work: Path, shape: str, dtype: str) -> Path:
    """A directory with config.json and model.safetensors in `dtype`; made unless it is there."""
    target = work / f"{shape}-{dtype}"
    if not (target / "model.safetensors").exists():
        target.mkdir(parents=True, exist_ok=True)
        _write_config(find_shape(shape) / "config.json", target / "config.json", dtype)
        write_weights(target, dtype)
    return target


def _write_config(source: Path, target: Path, dtype: str) -> None:
    config = json.loads(source.read_text())
    target.write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n")


def write_weights(directory: Path, dtype: str) -> None:
    """Make model.safetensors for the config.json in a directory.

    Normal values: a matrix keeps the size of what it multiplies (deviation 1 / sqrt(inputs)),
    embedding and biases have a deviation of 0.02; norms and vectors of heads are 1. With 0.02
    throughout, tied embeddings make every model repeat its last token, and equal answers would say
    nothing.
    """
    import torch
    from safetensors.torch import save_file

    from onestem.models.config import ModelConfig
    from onestem.models.tensors import Kind, Tensors

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    config = ModelConfig.from_directory(directory)
    for spec in Tensors(config):
        is_matrix = spec.kind in (Kind.MATRIX, Kind.HEAD, Kind.FILTER)
        deviation = spec.shape[-1] ** -0.5 if is_matrix else 0.02
        tensor = torch.ones(spec.shape)
        if spec.kind is Kind.NORM:
            tensor -= config.norm_offset
        elif spec.kind is not Kind.VECTOR:
            tensor.normal_(0.0, deviation, generator=generator)
        tensors[spec.name] = tensor.to(getattr(torch, dtype))
    partial = directory / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    shutil.move(partial, directory / "model.safetensors")
