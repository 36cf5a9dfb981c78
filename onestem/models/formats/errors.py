"""What a format adds to a model's errors, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from onestem.errors import ConfigError
from onestem.models.formats.held import dense
from onestem.models.formats.products import projection
from onestem.models.weights import (
    checked_config,
    expected_shapes,
    linear_modules,
    open_checkpoint,
    read_weight,
    target_of,
)
from onestem.options import Quantize

__all__ = ["FormatError", "format_errors"]

ROWS = 64


@dataclass(frozen=True)
class FormatError:
    """Of one linear module. Errors are norms by norms: 0.01 is one percent.

    Attributes:
        module: its name in the checkpoint.
        kind: its format, and the product that it has here.
        weights: of the weights, where the original ones are known; None: they are not.
        products: of products with normal random rows, against float64 products with the original
            weights, or with those that the format stands for: what rows and sums add.
    """

    module: str
    kind: str
    weights: float | None
    products: float


@torch.inference_mode()
def format_errors(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None = None,
    original: Path | None = None,
) -> Iterator[FormatError]:
    """Of each quantised module of a directory, read one after the other.

    Args:
        quantization: to round 16-bit weights to.
        original: a directory of the same model with the weights that were quantised.

    Raises:
        ConfigError: nothing is quantised.
        WeightsError: a directory does not hold the model.
    """
    config, schemes = checked_config(path)
    if not schemes and quantization is None:
        raise ConfigError(f"the weights of {path} are not quantised: give --quantization")
    shapes = expected_shapes(config)
    source = open_checkpoint(path, config, dtype, device)
    target = target_of(shapes, dtype, device)
    truth = source if schemes == {} else None
    if original is not None:
        theirs = checked_config(original)[0]
        truth = open_checkpoint(original, theirs, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for module in linear_modules(config):
        if schemes and module not in schemes:
            continue
        weight = read_weight(config, source, module, quantization)
        product = projection([weight], None, None, target)
        meant = dense(weight, torch.float64)
        exact = meant
        if truth is not None:
            exact = dense(read_weight(config, truth, module, None), torch.float64)
        x = torch.empty(ROWS, product.in_features, dtype=dtype, device=device)
        x.normal_(generator=generator)
        right = x.double() @ exact.t()
        yield FormatError(
            module,
            product.kind,
            None if truth is None else _by_norm(meant - exact, exact),
            _by_norm(product(x).double() - right, right),
        )


def _by_norm(error: torch.Tensor, whole: torch.Tensor) -> float:
    return float(error.norm() / whole.norm().clamp_min(1e-300))
