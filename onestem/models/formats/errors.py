"""The error that a weight format adds to each module of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from onestem.errors import ConfigError
from onestem.models.checkpoint import Checkpoint
from onestem.models.formats.held import Weight, dense
from onestem.models.formats.products import projection
from onestem.models.formats.rounding import rounded_weight
from onestem.models.weights import (
    checked_config,
    expected_shapes,
    linear_modules,
    open_checkpoint,
    read_weight,
    rounds_head,
    target_of,
)
from onestem.options import Quantize

__all__ = ["FormatError", "format_errors"]

ROWS = 64


@dataclass(frozen=True)
class FormatError:
    """Errors of one linear module, or of the head. Each is a ratio of norms: 0.01 is one percent.

    Attributes:
        module: its name in the checkpoint.
        kind: its format, and its product on this device.
        weights: error of the weights against the original ones; None: these are not known.
        products: error of products with normal random rows. The reference is float64 products with
            the original weights, or with the dequantised ones: then rounding of rows and sums.
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
    """Errors of each quantised module of a directory, which are read one after the other.

    Args:
        quantization: format that 16-bit weights are rounded to.
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
    forms: dict[str, Quantize | None] = dict.fromkeys(linear_modules(config), quantization)
    head = config.tensor_names.embedding if config.tie_embeddings else config.tensor_names.head
    if rounds_head(config, quantization, target):
        forms[head] = "int8"

    def read(checkpoint: Checkpoint, module: str, form: Quantize | None) -> Weight:
        if module != head:
            return read_weight(config, checkpoint, module, form)
        weight = checkpoint(f"{head}.weight")
        return weight if form is None else rounded_weight(weight, form)

    for module, form in forms.items():
        if schemes and module not in schemes:
            continue
        weight = read(source, module, form)
        if isinstance(weight, torch.Tensor):
            continue  # the format does not take its width
        product = projection([weight], None, None, target)
        meant = dense(weight, torch.float64)
        exact = meant
        if truth is not None:
            exact = dense(read(truth, module, None), torch.float64)
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
