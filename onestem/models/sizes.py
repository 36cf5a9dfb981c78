"""What formats a model's weights have on a device and how much memory they take, known before they
are loaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch

from onestem.models.config import ModelConfig
from onestem.models.formats.experts import ExpertWeights, of_mxfp4
from onestem.models.formats.gpu_experts import gpu_experts
from onestem.models.formats.held import Channels, Groups, Weight, rounded_weight
from onestem.models.formats.products import Target, projection, takes_groups
from onestem.models.formats.tables import takes_rounded_head
from onestem.models.gguf.blocks import empty_groups
from onestem.models.linear import choose_layout, held_tensors
from onestem.models.names import RATES, Role
from onestem.models.quantization import Scheme
from onestem.models.tensors import Kind, Tensors, TensorSpec
from onestem.ops.experts import MX_BLOCK
from onestem.options import Quantize

OF_EXPERTS = (Kind.EXPERTS, Kind.CODES, Kind.POWERS)


def target_of(
    tensors: Tensors, dtype: torch.dtype, device: torch.device, *, deterministic: bool = False
) -> Target:
    """The target of a model's products. One layout for the whole model: all its products are of one
    kind."""
    size = tensors.num_parameters * dtype.itemsize
    layout = choose_layout(dtype, device, size, deterministic=deterministic)
    return Target(dtype, device, layout, deterministic)


def quantised_as(config: ModelConfig, quantization: Quantize | None) -> str | None:
    """The format that weights of a model are stored in or rounded to; None: they are not
    quantised."""
    if quantization is not None or config.quantization is None:
        return quantization or ("mxfp4" if config.experts and config.experts.mxfp4 else None)
    return config.quantization.method


def formats_of(
    config: ModelConfig, quantization: Quantize | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Scheme | Quantize]:
    """Formats of a model's modules, of experts those of the first, from its configuration alone:
    modules that are left out are known only from the weights' files."""
    tensors = Tensors(config)
    kinds = {one.module: one.kind for one in tensors if one.module is not None}
    modules = [module for module, kind in kinds.items() if kind is Kind.MATRIX]
    if config.experts is not None and not config.experts.mxfp4:
        firsts = chain(*(tensors.singles(whole)[0] for whole in tensors.of_experts))
        modules += [one.module for one in firsts if one.module is not None]
    if quantization is not None:
        rounded = rounds_head(config, quantization, target_of(tensors, dtype, device))
        head = [config.tensor_names[Role.HEAD]] if rounded else []
        kept = {one.module for one in tensors if one.role in RATES}
        return {one: quantization for one in modules + head if one not in kept}
    stored = config.quantization
    if stored is None:
        return {}
    modules = [*kinds, *modules] if stored.converts else modules
    schemes = {module: stored.scheme(module) for module in modules}
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def rounds_head(config: ModelConfig, quantization: Quantize | None, target: Target) -> bool:
    """Whether the head is also rounded, to int8: on a CPU, where it takes as long as many
    layers."""
    rounded = quantization in ("int8", "int4")
    return rounded and takes_rounded_head(config.hidden_size, target)


def kept_by(target: Target, quantization: Quantize | None) -> Callable[[Scheme], bool]:
    """Which schemes of a GGUF file's modules stay as they are stored."""
    return functools.cache(lambda scheme: quantization is None and keeps(scheme, target))


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
    per_row = functools.cache(lambda form, size: _row_bytes(form, size, target))
    head = config.tensor_names[Role.HEAD]
    if isinstance(forms.get(head), str):
        total = int(config.vocab_size * per_row("int8", config.hidden_size))
    elif _is_packed(forms.get(tensors.head.module or ""), target):
        total = 0  # counted below
    else:
        itemsize = target.layout.head_itemsize(dtype, tied=config.tie_embeddings)
        total = config.vocab_size * config.hidden_size * itemsize
    for spec in tensors:
        form = forms.get(spec.module or "")
        packed = spec.role in (Role.EMBEDDING, Role.HEAD) and _is_packed(form, target)
        if form is not None and (packed or spec.kind is Kind.MATRIX):
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


def _row_bytes(form: Scheme | Quantize, size: int, target: Target) -> float:
    """Bytes of one row of a weight in a format, in all copies that its product holds. Measured on a
    few rows that are made here."""
    some = 128
    product = projection([_empty_weight(form, some, size, target)], None, None, target)
    return sum(tensor.nbytes for tensor in held_tensors(product)) / some


def _empty_weight(form: Scheme | Quantize | None, out: int, size: int, target: Target) -> Weight:
    """A weight of zeros in a format; None: the target's dtype."""
    if isinstance(form, Scheme):
        return _empty(form, out, size, target.device)
    zeros = torch.zeros(out, size, dtype=target.dtype, device=target.device)
    return zeros if form is None else rounded_weight(zeros, form)


def keeps(scheme: Scheme, target: Target) -> bool:
    """Whether weights of a scheme that stores groups are multiplied, and looked up, as such."""
    weight = _empty(scheme, 32, 512, target.device)
    return isinstance(weight, Groups) and takes_groups(weight, target)


def _empty(scheme: Scheme, out: int, size: int, device: torch.device) -> Channels | Groups:
    if scheme.storage == "blocks":
        return empty_groups(scheme.kind, out, size).to(device)
    floats = scheme.storage == "float8"
    if scheme.rounds_rows and scheme.columns is None:
        kind = torch.float8_e4m3fn if floats else torch.int8
        return Channels(
            torch.zeros(out, size, device=device).to(kind), torch.ones(out, device=device)
        )
    group = scheme.columns or size
    scales = torch.ones(out, -(-size // group), device=device)
    zeros = torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.int16)
    zeros[0] += not scheme.symmetric  # zero points that differ are kept
    kind = torch.float8_e4m3fn if floats else torch.uint8
    codes = torch.zeros(out, size, device=device).to(kind)
    return Groups(codes, scales, None if floats else zeros, group, scheme.bits)


def _is_packed(form: Scheme | Quantize | None, target: Target) -> bool:
    """Whether a table or head stays in the blocks of a GGUF file."""
    if not isinstance(form, Scheme) or form.storage != "blocks":
        return False
    return target.device.type == "cpu" and keeps(form, target)


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
            weight = _empty_weight(form, out, size, target)
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
