"""What formats a model's weights have on a device and how much memory they take, known before they
are loaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from onestem.models.config import ModelConfig
from onestem.models.formats.experts import ExpertWeights, of_mxfp4
from onestem.models.formats.gpu_experts import gpu_experts
from onestem.models.formats.held import Weight
from onestem.models.formats.products import (
    RoundedHead,
    Target,
    empty_weight,
    projection,
    row_bytes,
)
from onestem.models.linear import choose_layout, held_tensors
from onestem.models.names import Role
from onestem.models.quantization import Scheme
from onestem.models.tensors import Kind, Tensors, TensorSpec
from onestem.ops.experts import MX_BLOCK
from onestem.options import Quantize

__all__ = ["formats_of", "quantised_as", "rounds_head", "target_of", "weight_bytes"]

OF_EXPERTS = (Kind.EXPERTS, Kind.CODES, Kind.POWERS)


def target_of(tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of a model's products. One layout for the whole model: all its products are of one
    kind."""
    layout = choose_layout(dtype, device, tensors.num_parameters * dtype.itemsize)
    return Target(dtype, device, layout)


def quantised_as(config: ModelConfig, quantization: Quantize | None) -> str | None:
    """The format that weights of a model are stored in or rounded to; None: they are not
    quantised."""
    if quantization is not None or config.quantization is None:
        return quantization or ("mxfp4" if config.experts and config.experts.mxfp4 else None)
    return config.quantization.method


def formats_of(
    config: ModelConfig, quantization: Quantize | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Scheme | Quantize]:
    """Formats of a model's modules, from its configuration alone: modules that are left out are
    known only from the weights' files."""
    tensors = Tensors(config)
    modules = [one.module for one in tensors.matrices if one.module is not None]
    if config.experts is not None and not config.experts.mxfp4:
        singles = (one for whole in tensors.of_experts for one in chain(*tensors.singles(whole)))
        modules += [one.module for one in singles if one.module is not None]
    if quantization is not None:
        rounded = rounds_head(config, quantization, target_of(tensors, dtype, device))
        head = [config.tensor_names[Role.HEAD]] if rounded else []
        return dict.fromkeys(modules + head, quantization)
    stored = config.quantization
    schemes = {} if stored is None else {module: stored.scheme(module) for module in modules}
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def rounds_head(config: ModelConfig, quantization: Quantize | None, target: Target) -> bool:
    """Whether the head is also rounded, to int8: on a CPU, where it takes as long as many
    layers."""
    rounded = quantization in ("int8", "int4")
    return rounded and RoundedHead.takes(config.hidden_size, target)


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    formats: Mapping[str, Scheme | Quantize] | None = None,
) -> int:
    """`Decoder.weight_bytes` to come, without packed copies of biases and orders of inputs.

    Args:
        formats: of quantised modules.
    """
    tensors, forms = Tensors(config), formats or {}
    target = target_of(tensors, dtype, device)
    per_row = functools.cache(lambda form, size: row_bytes(form, size, target))
    if config.tensor_names[Role.HEAD] in forms:
        total = int(config.vocab_size * per_row("int8", config.hidden_size))
    else:
        itemsize = target.layout.head_itemsize(dtype, tied=config.tie_embeddings)
        total = config.vocab_size * config.hidden_size * itemsize
    for spec in tensors:
        form = forms.get(spec.module or "")
        if spec.kind is Kind.MATRIX and form is not None:
            out, size = reversed(spec.shape) if spec.transposed else spec.shape
            total += int(out * per_row(form, size))
        elif spec.kind not in OF_EXPERTS and spec.role is not Role.HEAD:
            total += math.prod(spec.shape) * _itemsize(config, spec, target)
    per_expert = functools.cache(lambda *forms: _expert_bytes(config, forms, target))
    for layer in tensors.layers:
        wholes = [layer[role] for role in (Role.EXPERTS_UP, Role.EXPERTS_DOWN) if role in layer]
        if wholes:
            firsts = [tensors.singles(whole)[0][0].module for whole in wholes]
            total += wholes[0].shape[0] * per_expert(*(forms.get(one or "") for one in firsts))
    return total


def _expert_bytes(
    config: ModelConfig, forms: Sequence[Scheme | Quantize | None], target: Target
) -> int:
    """Bytes of one expert's products, without biases, which are made here. forms: of gate and up,
    and of down; mxfp4 has none."""
    experts = config.experts
    assert experts is not None
    inner, hidden = experts.intermediate_size, config.hidden_size

    def empty(form: Scheme | Quantize | None, out: int, size: int) -> ExpertWeights:
        if experts.mxfp4:
            blocks = torch.zeros(out, size // 2, dtype=torch.uint8, device=target.device)
            weight: Weight = of_mxfp4(blocks, blocks[:, :: MX_BLOCK // 2])
        else:
            weight = empty_weight(form, out, size, target)
        return ExpertWeights.of("", [[weight]])

    up, down = empty(forms[0], 2 * inner, hidden), empty(forms[1], hidden, inner)
    if target.has_kernels:
        made: object = gpu_experts(up, down, target, None, gelu=False)
    else:
        made = [projection(one.each[0], None, None, target) for one in (up, down)]
    return sum(tensor.nbytes for tensor in held_tensors(made))


def _itemsize(config: ModelConfig, spec: TensorSpec, target: Target) -> int:
    """Bytes of one element of a tensor that is not quantised, in all its copies."""
    kind, dtype, layout = spec.kind, target.dtype, target.layout
    if kind is Kind.MATRIX:
        return layout.itemsize(dtype)
    if kind is Kind.HEAD and spec.role is Role.ROUTER:
        return layout.head_itemsize(dtype, tied=False)
    wide = kind is Kind.VECTOR or (kind is Kind.NORM and config.norm_offset)
    return 4 if wide else dtype.itemsize
