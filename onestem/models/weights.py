"""From a model directory to a `Decoder`: which tensors there must be, and where they are read."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder, Layer
from onestem.models.linear import Head, Layout, Linear, choose_layout
from onestem.ops import Heads

__all__ = ["expected_shapes", "load_decoder"]

Shapes = Mapping[str, tuple[int, ...]]

# Gives a tensor by its name in the checkpoint, in the decoder's dtype and on its device.
Source = Callable[[str], Tensor]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

# Buffers that old checkpoints carry and that follow from the configuration.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"

# How many names an error spells out before it gives only their number.
NAMES_SHOWN = 4


def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
) -> Decoder:
    """Read a Hugging Face model directory; with `random_weights`, only its `config.json`.

    Random weights are normal with the configuration's `initializer_range`, biases 0 and norms 1.
    Each tensor depends on (seed, its name, device) alone.
    """
    config = ModelConfig.from_directory(path)
    target = torch.device(device)
    shapes = expected_shapes(config)
    if random_weights:
        source = _random_source(config, shapes, dtype, target, seed)
    else:
        source = _checkpoint_source(Path(path), config, shapes, dtype, target)
    return _build(config, source, _num_parameters(shapes), choose_layout_of(shapes, dtype, target))


def choose_layout_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """One layout for the whole model, so that all its products are of one kind."""
    return choose_layout(dtype, device, _num_parameters(shapes) * dtype.itemsize)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name in the checkpoint -> shape, of every tensor that the decoder is made of."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linears = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _num_parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _build(config: ModelConfig, source: Source, num_parameters: int, layout: Layout) -> Decoder:
    embedding = source(EMBEDDING)
    layers = [_layer(config, index, source, layout) for index in range(config.num_layers)]
    head = Head(embedding if config.tie_embeddings else source(HEAD), layout)
    return Decoder(config, embedding, layers, source(NORM), head, num_parameters)


def _layer(config: ModelConfig, index: int, source: Source, layout: Layout) -> Layer:
    def tensor(name: str) -> Tensor:
        return source(f"model.layers.{index}.{name}")

    def linear(parent: str, names: tuple[str, ...], bias: bool) -> Linear:
        """Projections of the same input, fused into one product."""
        paths = [f"{parent}.{name}_proj" for name in names]
        weight = _concatenated([tensor(f"{path}.weight") for path in paths])
        joined = _concatenated([tensor(f"{path}.bias") for path in paths]) if bias else None
        return Linear(weight, joined, layout)

    heads = Heads(
        config.num_q_heads,
        config.num_kv_heads,
        config.head_dim,
        tensor("self_attn.q_norm.weight") if config.qk_norm else None,
        tensor("self_attn.k_norm.weight") if config.qk_norm else None,
        config.rms_norm_eps,
    )
    return Layer(
        input_norm=tensor("input_layernorm.weight"),
        qkv=linear("self_attn", ("q", "k", "v"), config.qkv_bias),
        heads=heads,
        output=linear("self_attn", ("o",), config.o_bias),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=linear("mlp", ("gate", "up"), config.mlp_bias),
        down=linear("mlp", ("down",), config.mlp_bias),
    )


def _concatenated(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _random_source(
    config: ModelConfig, shapes: Shapes, dtype: torch.dtype, device: torch.device, seed: int
) -> Source:
    def source(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(_tensor_seed(seed, name))
        empty = torch.empty(shape, dtype=dtype, device=device)
        return empty.normal_(0.0, config.initializer_range, generator=generator)

    return source


def _tensor_seed(seed: int, name: str) -> int:
    """32 bits: the CPU's generator ignores higher ones."""
    return zlib.crc32(f"{seed} {name}".encode())


def _checkpoint_source(
    directory: Path, config: ModelConfig, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Source:
    files = _tensor_files(directory)
    _check_names(directory, config, shapes, files)
    _check_shapes(directory, shapes, files)

    def source(name: str) -> Tensor:
        # One file is open at a time: the pages of a shard that is done with can be dropped.
        with _opened(files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor.to(device=device, dtype=dtype, copy=True)  # not the mapped file itself

    return source


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Name of each tensor -> the file that holds it."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    file = directory / "model.safetensors"
    if not file.exists():
        raise WeightsError(_no_weights(directory))
    with _opened(file) as handle:
        return dict.fromkeys(handle.keys(), file)


def _no_weights(directory: Path) -> str:
    others = sorted(f.name for f in directory.iterdir() if f.suffix in (".bin", ".pt", ".gguf"))
    found = f" (found {_listed(others)})" if others else ""
    return (
        f"{directory} has neither model.safetensors nor model.safetensors.index.json{found}: "
        "convert the weights to safetensors, or ask for random weights"
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} has no readable weight_map: {error!r}") from None
    shards = set(files.values())
    absent = sorted(file.name for file in shards if not file.exists())
    if absent:
        raise WeightsError(f"{index.parent} lacks files that its index names: {_listed(absent)}")
    held = {file: set(_names_in(file)) for file in shards}
    lost = sorted(name for name, file in files.items() if name not in held[file])
    if lost:
        raise WeightsError(f"{index} names tensors that its files do not hold: {_listed(lost)}")
    return files


def _names_in(file: Path) -> list[str]:
    with _opened(file) as handle:
        return list(handle.keys())


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}") from None


def _check_names(
    directory: Path, config: ModelConfig, shapes: Shapes, files: Mapping[str, Path]
) -> None:
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise WeightsError(
            f"{directory} lacks tensors that {config.architecture} needs: {_listed(missing)}"
        )
    unknown = sorted(
        name
        for name in set(files) - set(shapes)
        if not name.endswith(IGNORED_SUFFIX) and name != HEAD
    )
    if unknown:
        raise WeightsError(
            f"{directory} holds tensors that {config.architecture} has no place for: "
            f"{_listed(unknown)}"
        )


def _check_shapes(directory: Path, shapes: Shapes, files: Mapping[str, Path]) -> None:
    """Also of a head that a tied model carries needlessly: another shape is another model."""
    expected = {HEAD: shapes[EMBEDDING], **shapes}
    wrong = [
        f"{name} is {list(found)}, expected {list(expected[name])}"
        for name, found in _shapes_in(files, expected)
        if found != expected[name]
    ]
    if wrong:
        raise WeightsError(f"{directory} holds tensors of other shapes: {_listed(wrong)}")


def _shapes_in(
    files: Mapping[str, Path], names: Iterable[str]
) -> Iterable[tuple[str, tuple[int, ...]]]:
    present = sorted((name for name in names if name in files), key=lambda name: str(files[name]))
    by_file: dict[Path, list[str]] = {}
    for name in present:
        by_file.setdefault(files[name], []).append(name)
    for file, held in by_file.items():
        with _opened(file) as handle:
            for name in held:
                yield name, tuple(handle.get_slice(name).get_shape())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names)} in all)"
