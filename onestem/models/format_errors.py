"""The error that a weight format adds to each module of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from onestem.errors import ConfigError
from onestem.models.builder import Builder, expert_activation, read_weight
from onestem.models.checkpoint import Checkpoint, open_checkpoint, with_own_head
from onestem.models.config import ModelConfig
from onestem.models.formats.held import dense
from onestem.models.formats.products import projection
from onestem.models.names import Role
from onestem.models.sizes import kept_by, rounds_head, target_of
from onestem.models.tensors import Tensors
from onestem.ops import LayerOps
from onestem.options import Quantize

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


# What a model has, and where it is read from.
_Model = tuple[Tensors, Checkpoint]


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
    held = tensors, source = _opened(path, dtype, device, quantization)
    config, schemes = tensors.config, source.schemes
    stored = config.experts is not None and config.experts.mxfp4
    if not schemes and not stored and quantization is None:
        if original is None:
            return
        raise ConfigError(
            f"the weights of {path} are not quantised, and --original is what quantised ones came "
            "from: leave it out, or give --quantization"
        )
    target = target_of(tensors, dtype, device)
    truth, unrounded = (None if schemes else source), None
    if original is not None:
        unrounded = _, truth = _opened(original, dtype, device, None)
    generator = torch.Generator(device).manual_seed(0)

    def rows(size: int) -> torch.Tensor:
        x = torch.empty(ROWS, size, dtype=dtype, device=device)
        return x.normal_(generator=generator)

    forms = [(spec, quantization) for spec in tensors.matrices]
    if rounds_head(config, quantization, target):
        forms.append((tensors.head, "int8"))
    for spec, form in forms:
        module = str(spec.module)
        if schemes and module not in schemes:
            continue
        weight = read_weight(source, spec, form)
        if isinstance(weight, torch.Tensor):
            continue  # the format does not take its width
        product = projection([weight], None, None, target)
        exact = meant = dense(weight, torch.float64)
        if truth is not None:
            exact = dense(read_weight(truth, spec, None), torch.float64)
        x = rows(product.in_features)
        right = x.double() @ exact.t()
        yield FormatError(
            module,
            product.kind,
            None if truth is None else _by_norm(meant - exact, exact),
            _by_norm(product(x).double() - right, right),
        )
    if unrounded is None and quantization is not None and not stored:
        unrounded = held
    for layer, module in _quantised_experts(held, quantization):
        builder = Builder(*held, target, quantization)
        yield from _of_experts(builder, unrounded, layer, module, rows(config.hidden_size))


def _opened(
    path: Path, dtype: torch.dtype, device: torch.device, quantization: Quantize | None
) -> _Model:
    tensors = Tensors(with_own_head(path, ModelConfig.from_directory(path)))
    keeps = kept_by(target_of(tensors, dtype, device), quantization)
    return tensors, open_checkpoint(path, tensors, dtype, device, keeps)


def _quantised_experts(model: _Model, quantization: Quantize | None) -> Iterator[tuple[int, str]]:
    """(layer, name of the module) of all experts in a format of fewer bits than 16."""
    tensors, source = model
    names = tensors.config.tensor_names
    for layer, specs in enumerate(tensors.layers):
        if Role.EXPERTS_UP in specs:
            module = (names.layer.format(layer) + names[Role.EXPERT_GATE]).partition(".{}")[0]
            held = specs[Role.EXPERTS_UP].scales is not None or quantization is not None
            if held or any(one.startswith(f"{module}.") for one in source.schemes):
                yield layer, module


def _of_experts(
    builder: Builder, original: _Model | None, layer: int, module: str, x: torch.Tensor
) -> Iterator[FormatError]:
    """Errors of all experts of a layer, each of which takes the same number of rows of x; none
    where a format does not take their widths."""
    tensors = builder.tensors
    weights = exact = builder.expert_weights(tensors.layers[layer])
    if all(one.whole is not None for one in weights):
        return
    products = builder.products(tensors.layers[layer], *weights)
    if original is not None:
        exact = Builder(*original, builder.target).expert_weights(original[0].layers[layer])
    experts = tensors.config.experts
    assert experts is not None
    size = (len(x), experts.top_k)
    chosen = torch.arange(len(x) * experts.top_k, device=x.device).view(size) % experts.num
    scores = torch.full(size, 1 / experts.top_k, device=x.device)
    right = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    activate = expert_activation(tensors.config, LayerOps()).function
    off, whole = 0.0, 0.0
    for index in range(experts.num):
        layers = []
        for weight, theirs in zip(weights, exact, strict=True):
            truth = theirs.dense(index, torch.float64)
            off += float((weight.dense(index, torch.float64) - truth).square().sum())
            whole += float(truth.square().sum())
            layers.append((truth, None if theirs.bias is None else theirs.bias[index].double()))
        up, down = layers
        result = F.linear(activate(F.linear(x.double(), *up)), *down)
        right += result * (scores * (chosen == index)).sum(-1, keepdim=True)
    yield FormatError(
        module,
        f"{experts.num} experts",
        None if original is None else (off / whole) ** 0.5,
        _by_norm(products(x, scores, chosen, None).double() - right, right),
    )


def _by_norm(error: torch.Tensor, whole: torch.Tensor) -> float:
    return float(error.norm() / whole.norm().clamp_min(1e-300))
