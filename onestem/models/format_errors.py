"""The error that a weight format adds to each module of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from onestem.errors import ConfigError
from onestem.models.builder import Builder, ExpertWeights, expert_activation, read_weight
from onestem.models.checkpoint import Checkpoint, open_checkpoint
from onestem.models.formats.held import Weight, dense
from onestem.models.formats.products import Target, projection
from onestem.models.formats.rounding import rounded_weight
from onestem.models.mlp import ExpertProducts
from onestem.models.names import Role
from onestem.models.quantization import Scheme
from onestem.models.sizes import rounds_head, target_of
from onestem.models.tensors import Tensors, TensorSpec
from onestem.models.weights import checked_config
from onestem.ops import LayerOps
from onestem.ops.experts import GroupedWeight
from onestem.options import Quantize

__all__ = ["FormatError", "format_errors"]

ROWS = 64


@dataclass(frozen=True)
class FormatError:
    """Errors of one linear module, of a layer's experts, or of the head. Each is a ratio of norms:
    0.01 is one percent.

    Attributes:
        module: its name in the checkpoint.
        kind: its format, and its product on this device.
        weights: error of the weights against the original ones; None: these are not known.
        products: error of products with normal random rows (of experts: of what they add to rows).
            The reference is float64 products with the original weights, or with the dequantised
            ones: then rounding of rows and sums.
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
    """Errors of each quantised module of a directory, which are read one after the other; none
    where nothing is quantised.

    Args:
        quantization: format that 16-bit weights are rounded to.
        original: a directory of the same model with the weights that were quantised.

    Raises:
        ConfigError: nothing is quantised that could be compared with `original`.
        WeightsError: a directory does not hold the model.
    """
    config, schemes = checked_config(path)
    stored = config.experts is not None and config.experts.mxfp4
    if not schemes and not stored and quantization is None:
        if original is None:
            return
        raise ConfigError(
            f"the weights of {path} are not quantised, and --original is what quantised ones came "
            "from: leave it out, or give --quantization"
        )
    tensors = Tensors(config)
    source = open_checkpoint(path, tensors, dtype, device)
    target = target_of(tensors, dtype, device)
    truth, unrounded = (None if schemes else source), None
    if original is not None:
        theirs = Tensors(checked_config(original)[0])
        truth = open_checkpoint(original, theirs, dtype, device)
        unrounded = (theirs, truth)
    generator = torch.Generator(device).manual_seed(0)

    def rows(size: int) -> torch.Tensor:
        x = torch.empty(ROWS, size, dtype=dtype, device=device)
        return x.normal_(generator=generator)

    forms: list[tuple[TensorSpec, Quantize | None]]
    forms = [(spec, quantization) for spec in tensors.matrices]
    if rounds_head(config, quantization, target):
        forms.append((tensors.head, "int8"))

    def read(checkpoint: Checkpoint, spec: TensorSpec, form: Quantize | None) -> Weight:
        if spec is not tensors.head:
            return read_weight(checkpoint, spec, form)
        weight = checkpoint(spec)
        return weight if form is None else rounded_weight(weight, form)

    for spec, form in forms:
        module = str(spec.module)
        if schemes and module not in schemes:
            continue
        weight = read(source, spec, form)
        if isinstance(weight, torch.Tensor):
            continue  # the format does not take its width
        product = projection([weight], None, None, target)
        meant = dense(weight, torch.float64)
        exact = meant
        if truth is not None:
            exact = dense(read(truth, spec, None), torch.float64)
        x = rows(product.in_features)
        right = x.double() @ exact.t()
        yield FormatError(
            module,
            product.kind,
            None if truth is None else _by_norm(meant - exact, exact),
            _by_norm(product(x).double() - right, right),
        )
    for layer, module in _quantised_experts(tensors, schemes):
        x = rows(config.hidden_size)
        yield _of_experts((tensors, source), unrounded, layer, module, x, target)


def _quantised_experts(
    tensors: Tensors, schemes: Mapping[str, Scheme]
) -> Iterator[tuple[int, str]]:
    """(layer, name of the module) of all experts that files hold in a format of fewer bits."""
    names = tensors.config.tensor_names
    for layer, specs in enumerate(tensors.layers):
        if Role.EXPERTS_UP in specs:
            module = (names.layer.format(layer) + names[Role.EXPERT_GATE]).partition(".{}")[0]
            scales = specs[Role.EXPERTS_UP].scales
            if scales is not None or any(one.startswith(f"{module}.") for one in schemes):
                yield layer, module


# What a model has, and where it is read from.
_Model = tuple[Tensors, Checkpoint]


def _read_experts(
    model: _Model, layer: int, target: Target
) -> tuple[ExpertWeights, ExpertProducts]:
    """Weights of a layer's experts as they are held, and their products."""
    builder, specs = Builder(*model, target), model[0].layers[layer]
    weights = builder.expert_weights(specs)
    return weights, builder.products(specs, *weights)


def _of_experts(
    held: _Model,
    original: _Model | None,
    layer: int,
    module: str,
    x: torch.Tensor,
    target: Target,
) -> FormatError:
    """Errors of all experts of a layer, each of which takes the same number of rows of x."""
    weights, products = _read_experts(held, layer, target)
    exact = weights if original is None else _read_experts(original, layer, target)[0]
    config = held[0].config
    experts = config.experts
    assert experts is not None
    size = (len(x), experts.top_k)
    chosen = torch.arange(len(x) * experts.top_k, device=x.device).view(size) % experts.num
    scores = torch.full(size, 1 / experts.top_k, device=x.device)
    right = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    activate = expert_activation(config, LayerOps()).function
    off, whole = 0.0, 0.0
    for index in range(experts.num):
        up, down = (_exact(weight, index) for weight in exact)
        for weight, (truth, _) in zip(weights, (up, down), strict=True):
            off += float((weight.dense(index, torch.float64) - truth).square().sum())
            whole += float(truth.square().sum())
        result = F.linear(activate(F.linear(x.double(), *up)), *down)
        right += result * (scores * (chosen == index)).sum(-1, keepdim=True)
    return FormatError(
        module,
        f"{experts.num} experts",
        None if original is None else (off / whole) ** 0.5,
        _by_norm(products(x, scores, chosen).double() - right, right),
    )


def _exact(weight: GroupedWeight, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if weight.bias is None else weight.bias[index].double()
    return weight.dense(index, torch.float64), bias


def _by_norm(error: torch.Tensor, whole: torch.Tensor) -> float:
    return float(error.norm() / whole.norm().clamp_min(1e-300))
