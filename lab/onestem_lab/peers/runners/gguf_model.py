"""A model directory (config.json, model.safetensors) of a Llama or Qwen2 as a GGUF file without a
vocabulary. numpy and the `gguf` package are enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

__all__ = ["ARCHITECTURES", "TYPES", "convert", "write_config"]

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def convert(directory: Path, kind: str) -> Path:
    """The GGUF file beside the weights, matrices in `kind`; written unless it is there."""
    target = directory / f"model-{kind}.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        _write(directory, partial, TYPES[kind])
        partial.rename(target)
    return target


def _write(directory: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    config = json.loads((directory / "config.json").read_text())
    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        raise ValueError(f"model_type is {model_type!r}, expected {' or '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    write_config(writer, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in _tensors(directory / "model.safetensors"):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"{name} has no name in GGUF's {model_type}")
        if model_type == "llama":
            values = _interleaved(name, values, config)
        # Vectors stay float32: the engine adds and multiplies them in float32.
        as_kind = kind if values.ndim > 1 else TYPES["f32"]
        writer.add_tensor(new, quantize(values, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _interleaved(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of Q and K of a head in the order in which llama.cpp rotates a Llama's: pairs of
    neighbours, where Hugging Face's layout pairs a row with the one half a head further."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            halves = values.reshape(config[heads], 2, -1, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of a safetensors file. Read by hand: numpy has no bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        yield name, _floats(data[start:end], entry["dtype"]).reshape(entry["shape"])


def _floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype not in ("F32", "F16"):
        raise ValueError(f"tensor is {dtype}, expected F32, F16 or BF16")
    return raw.view(np.float32 if dtype == "F32" else np.float16).astype(np.float32)
