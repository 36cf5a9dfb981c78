"""GGUF files in llama.cpp's quantised types, of random weights of a config.json or of another file.
numpy and the packages of `requirements/llama_cpp.txt` are enough."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf_model import ARCHITECTURES, write_config

__all__ = ["FILE_TYPES", "quantised", "quantised_model"]

FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q5_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
DEVIATION = 0.02


def quantised_model(config: Path, work: Path, kind: str, threads: int) -> Path:
    """The file of random weights under `work`; written unless it is there."""
    target = work / f"{config.parent.name}-{kind}.gguf"
    plain = work / f"{config.parent.name}-bf16.gguf"
    if not target.exists() and not plain.exists():
        _write_random(json.loads(config.read_text()), plain)
    return quantised(plain, target, kind, threads)


def quantised(source: Path, target: Path, kind: str, threads: int) -> Path:
    """`target`; written unless it is there, as llama-quantize does, from a file of any type."""
    if not target.exists():
        partial = target.with_suffix(".partial")
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread, params.ftype, params.allow_requantize = threads, FILE_TYPES[kind], True
        code = llama_cpp.llama_model_quantize(
            str(source).encode(), str(partial).encode(), ctypes.byref(params)
        )
        if code != 0:
            raise RuntimeError(f"llama_model_quantize returned {code}")
        partial.rename(target)
    return target


def _write_random(config: dict[str, Any], target: Path) -> None:
    arch = ARCHITECTURES[config["model_type"]]
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[arch])
    write_config(writer, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): shape
        for name, shape in _tensors(config)
    }
    plain, vector = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    for name, shape in tensors.items():
        wide = len(shape) > 1
        size = int(np.prod(shape)) * (2 if wide else 4)
        kind = np.uint16 if wide else np.float32
        writer.add_tensor_info(name, shape, np.dtype(kind), size, plain if wide else vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    # Rows of a tensor repeat: what is timed does not depend on values.
    values = random.standard_normal(1 << 22, np.float32) * DEVIATION
    some = (values.view(np.uint32) >> 16).astype(np.uint16)
    for shape in tensors.values():
        size = int(np.prod(shape))
        tensor = np.resize(some, size) if len(shape) > 1 else np.ones(size, np.float32)
        writer.write_tensor_data(tensor.reshape(shape))
    writer.close()
    partial.rename(target)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen2's or Qwen3's tensors whose head is its embedding."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", size // heads)
    yield "model.embed_tokens.weight", (config["vocab_size"], size)
    yield "model.norm.weight", (size,)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", (size,)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}.self_attn.{name}_proj.weight", (count * dim, size)
            if config["model_type"] == "qwen2":
                yield f"{at}.self_attn.{name}_proj.bias", (count * dim,)
        if config["model_type"] == "qwen3":
            for name in "qk":
                yield f"{at}.self_attn.{name}_norm.weight", (dim,)
        yield f"{at}.self_attn.o_proj.weight", (size, heads * dim)
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", (inner, size)
        yield f"{at}.mlp.down_proj.weight", (size, inner)
