"""Tiny checkpoints in published formats of quantised weights, written from their definitions.

Each writer rounds a weight by itself and says what it stands for, in float64: what is read back is
compared with that, and an engine with one on a checkpoint of these values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["FORMATS", "Format", "dequantised", "fp8_blocks", "mxfp4", "quantised", "unchanged"]

GROUP = 32


@dataclass(frozen=True)
class Format:
    """A published format.

    Attributes:
        config: the `quantization_config`.
        write: (weight [out, in], index of the module) -> the module's tensors, and what they stand
            for.
        rounds: products round their rows to int8.
        left_out: ends of modules that are not quantised.
    """

    config: dict[str, Any]
    write: Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
    rounds: bool = False
    left_out: tuple[str, ...] = field(default=())


def quantised(source: Path, target: Path, form: Format) -> Path:
    """A copy of a model directory in a format."""
    _copy(source, target, form, lambda stored, _: stored)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = form.config
    (target / "config.json").write_text(json.dumps(config))
    return target


def dequantised(source: Path, target: Path, form: Format) -> Path:
    """The same with the values that the format stands for, as float32."""
    _copy(source, target, form, lambda _, value: {"weight": value.float()})
    return target


def unchanged(name: str, form: Format) -> bool:
    """Whether a tensor is no weight that the format rounds."""
    module, _, part = name.rpartition(".")
    linear = "layers" in module and "norm" not in module and part == "weight"
    return not linear or module.endswith(form.left_out or "\0")


def _copy(
    source: Path,
    target: Path,
    form: Format,
    choose: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]],
) -> None:
    shutil.copytree(source, target)
    written: dict[str, Tensor] = {}
    held = load_file(source / "model.safetensors")
    for index, (name, tensor) in enumerate(sorted(held.items())):
        if unchanged(name, form):
            written[name] = tensor
            continue
        module = name.removesuffix(".weight")
        for part, one in choose(*form.write(tensor.double(), index)).items():
            written[f"{module}.{part}"] = one.contiguous()
    save_file(written, target / "model.safetensors")


def mxfp4(plain: Path, target: Path) -> Path:
    """A tiny gpt-oss whose experts are random bytes, as it is published."""
    shutil.copytree(plain, target)
    held, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        num, columns, rows = held.pop(name).shape
        size = (num, rows, columns // 32)
        for end, low, high, shape in (
            ("_blocks", 0, 256, (*size, 16)),
            ("_scales", 121, 124, size),
        ):
            held[name + end] = torch.randint(
                low, high, shape, generator=generator, dtype=torch.uint8
            )
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _by_part(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The largest size of each block, and how to spread blocks' values over the weight."""
    out, size = weight.shape
    most = torch.stack(
        [
            torch.stack([part.abs().amax() for part in line.split(columns, 1)])
            for line in weight.split(rows, 0)
        ]
    )

    def spread(values: Tensor) -> Tensor:
        wide = values.repeat_interleave(rows, 0)[:out]
        return wide.repeat_interleave(columns, 1)[:, :size]

    return most, spread


def _float8(rows: int | None, columns: int | None, name: str, dtype: torch.dtype) -> Any:
    def write(weight: Tensor, _: int) -> tuple[dict[str, Tensor], Tensor]:
        most, spread = _by_part(weight, rows or len(weight), columns or weight.shape[1])
        scales = (most / 448).to(dtype)
        codes = (weight / spread(scales.double())).float().to(torch.float8_e4m3fn)
        shape = scales[0] if rows is None else scales
        return {"weight": codes, name: shape}, codes.double() * spread(scales.double())

    return write


def _int8(weight: Tensor, _: int) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).float()
    codes = (weight / scales).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.double()


def _unsigned(weight: Tensor, bits: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in] from 0, scales and zero points [out, groups], of groups of `GROUP`."""
    parts = weight.unflatten(1, (-1, GROUP))
    top = (1 << bits) - 1
    if zeros:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / top).half().double()
        zero = (-low / scales).round().clamp(1, top)
    else:
        scales = (parts.abs().amax(2) / (top / 2)).half().double()
        zero = torch.full_like(scales, float(1 << (bits - 1)))
    codes = (parts / scales[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.flatten(1).long(), scales, zero.long()


def _meaning(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = [one.double().repeat_interleave(GROUP, 1) for one in (zeros, scales)]
    return (codes.double() - wide[0]) * wide[1]


def _words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int64 [n, m] -> int32 [n, m * bits / 32]; place i of a word holds column `places[i]`."""
    count = 32 // bits
    lacking = -codes.shape[1] % count
    codes = torch.nn.functional.pad(codes, (0, lacking))
    total = torch.zeros(len(codes), codes.shape[1] // count, dtype=torch.int64)
    for i, column in enumerate(places or range(count)):
        total |= codes[:, column::count] << (bits * i)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def _packed(bits: int, zeros: bool) -> Any:
    """compressed-tensors' pack-quantized."""

    def write(weight: Tensor, _: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zero = _unsigned(weight, bits, zeros)
        stored = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            stored["weight_zero_point"] = _words(zero.t(), bits).t()
        return stored, _meaning(codes, scales, zero)

    return write


def _gptq(bits: int, offset: int, act_order: bool) -> Any:
    def write(weight: Tensor, index: int) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1]
        # q, k and v read the same inputs, so their orders are one; those of others differ.
        seed = 0 if size == len(weight) or index % 2 else 1
        order = torch.arange(size)
        if act_order:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        codes, scales, zero = _unsigned(weight[:, order], bits, zeros=True)
        groups = torch.empty(size, dtype=torch.int32)
        groups[order] = torch.arange(size, dtype=torch.int32) // GROUP
        meant = torch.empty_like(weight)
        meant[:, order] = _meaning(codes, scales, zero)
        by_input = torch.empty_like(codes)
        by_input[:, order] = codes
        stored = {
            "qweight": _words(by_input, bits).t(),
            "qzeros": _words((zero - offset).t(), bits),
            "scales": scales.t().half(),
            "g_idx": groups,
        }
        return stored, meant

    return write


def _awq(weight: Tensor, _: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zero = _unsigned(weight, 4, zeros=True)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": _words(codes.t(), 4, places),
        "qzeros": _words(zero.t(), 4, places),
        "scales": scales.t().half(),
    }
    return stored, _meaning(codes, scales, zero)


def _compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _weights(
    kind: str, bits: int, strategy: str, *, symmetric: bool = True, **more: Any
) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **more}


_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_FLOAT_ROWS = {**_TOKEN, "type": "float"}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": True, "sym": False}
_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def fp8_blocks(rows: int, columns: int) -> Format:
    """Blocks of a size, as models' authors store them."""
    return Format(
        {**_BLOCK, "weight_block_size": [rows, columns]},
        _float8(rows, columns, "weight_scale_inv", torch.float32),
    )


_GROUPS = {"group_size": GROUP}

FORMATS: dict[str, Format] = {
    "fp8 per tensor": Format(
        _compressed("float-quantized", _weights("float", 8, "tensor"), _FLOAT_ROWS),
        _float8(None, None, "weight_scale", torch.bfloat16),
    ),
    "fp8 per channel": Format(
        _compressed("float-quantized", _weights("float", 8, "channel"), _FLOAT_ROWS),
        _float8(1, None, "weight_scale", torch.float32),
    ),
    "fp8 in blocks": fp8_blocks(24, 40),
    "fp8 per tensor of authors": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight, index: _with_input_scale(weight, index),
        left_out=("down_proj",),
    ),
    "int8": Format(
        _compressed("int-quantized", _weights("int", 8, "channel"), {**_TOKEN, "type": "int"}),
        _int8,
        rounds=True,
    ),
    "int8 without rounding of rows": Format(
        _compressed("int-quantized", _weights("int", 8, "channel")), _int8
    ),
    "packed int4": Format(
        _compressed("pack-quantized", _weights("int", 4, "group", **_GROUPS)), _packed(4, False)
    ),
    "packed int4, zero points": Format(
        _compressed("pack-quantized", _weights("int", 4, "group", symmetric=False, **_GROUPS)),
        _packed(4, True),
    ),
    "packed int8": Format(
        _compressed("pack-quantized", _weights("int", 8, "group", **_GROUPS)), _packed(8, False)
    ),
    "gptq": Format({**_GPTQ, "bits": 4}, _gptq(4, 1, False)),
    "gptq, act-order": Format({**_GPTQ, "bits": 4}, _gptq(4, 1, True)),
    "gptq_v2 of 8 bits, act-order, k left out": Format(
        {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        _gptq(8, 0, True),
        left_out=("k_proj",),
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
}


def _with_input_scale(weight: Tensor, index: int) -> tuple[dict[str, Tensor], Tensor]:
    stored, meant = _float8(None, None, "weight_scale", torch.float32)(weight, index)
    stored["weight_scale"] = stored["weight_scale"].reshape(())
    return {**stored, "input_scale": torch.tensor(0.5)}, meant
