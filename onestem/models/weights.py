"""From a model directory to a `Decoder`: which tensors there must be, and where each goes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models.checkpoint import (
    Shapes,
    Source,
    check_shapes,
    check_unknown,
    checkpoint_source,
    listed,
)
from onestem.models.config import ModelConfig, Rotary
from onestem.models.decoder import Decoder, Layer, Norm
from onestem.models.linear import Head, Layout, Linear, choose_layout
from onestem.models.parts import Part, ProductPart, TensorPart
from onestem.models.rope import rotary_order
from onestem.ops import Heads

__all__ = ["checked_tensors", "write_tensors", "expected_shapes", "load_decoder", "random_decoder"]


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
    if random_weights:
        return random_decoder(config, dtype=dtype, device=target, seed=seed)
    source = checkpoint_source(Path(path), config, expected_shapes(config), dtype, target)
    return _decoder(config, source, dtype, target)


def random_decoder(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Decoder:
    """A decoder of a configuration with random weights (see `load_decoder`)."""
    source = _random_source(config, expected_shapes(config), dtype, device, seed)
    return _decoder(config, source, dtype, device)


def _decoder(
    config: ModelConfig, source: Source, dtype: torch.dtype, device: torch.device
) -> Decoder:
    shapes = expected_shapes(config)
    builder = _Builder(config, source, choose_layout_of(shapes, dtype, device))
    return builder.decoder(_num_parameters(shapes))


def checked_tensors(
    config: ModelConfig, named_tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """By their names in the checkpoint, some of the tensors that a decoder is made of, or all.

    Raises:
        WeightsError: names what is unknown, given twice, of another shape or no floating point.
    """
    where = "update_weights"
    given: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"{where}: {name} is {type(tensor).__name__}, expected a tensor")
        if name in given:
            raise WeightsError(f"{where}: {name} is given twice")
        given[name] = tensor.detach()
    shapes = expected_shapes(config)
    check_unknown(where, config, shapes, given)
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in given.items()}
    found = ((name, tuple(tensor.shape), kinds[name]) for name, tensor in given.items())
    check_shapes(where, config, shapes, found, FLOATING)
    of_meta = [name for name, tensor in given.items() if tensor.is_meta]
    if of_meta:
        raise WeightsError(f"{where}: tensors without values (meta device): {listed(of_meta)}")
    return {name: tensor for name, tensor in given.items() if name in shapes}


@torch.no_grad()
def write_tensors(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors that were checked over a decoder's own, in the same memory."""

    def given(name: str) -> Tensor | None:
        return tensors[name].to(decoder.device, decoder.dtype) if name in tensors else None

    for part in decoder.parts:
        if not tensors.keys().isdisjoint(part.names):
            part.write(given)


def choose_layout_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """One layout for the whole model, so that all its products are of one kind."""
    return choose_layout(dtype, device, _num_parameters(shapes) * dtype.itemsize)


# Of tensors that are given.
FLOATING = ("bfloat16", "float16", "float32", "float64")

# ------------------------------------------------------------------------------ what there must be


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name in the checkpoint -> shape, of every tensor that the decoder is made of."""
    names = config.tensor_names
    table = (config.vocab_size, config.hidden_size)
    shapes = {f"{names.embedding}.weight": table, **_norm_shapes(config, names.norm)}
    if names.positions is not None:
        size = (config.max_position_embeddings, config.hidden_size)
        shapes[f"{names.positions}.weight"] = size
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = table
    if config.head_bias:
        shapes[f"{names.head}.bias"] = (config.vocab_size,)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[names.layer.format(layer) + name] = shape
    return shapes


def _norm_shapes(config: ModelConfig, module: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{module}.{part}": (config.hidden_size,) for part in parts}


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names, hidden, inner = config.tensor_names, config.hidden_size, config.intermediate_size
    shapes = _norm_shapes(config, names.input_norm)
    if names.post_norm is not None:
        shapes |= _norm_shapes(config, names.post_norm)
    linears = [
        *((name, rows, hidden, config.qkv_bias) for name, rows in _qkv_rows(config).items()),
        (names.output, hidden, config.num_q_heads * config.head_dim, config.o_bias),
        *((name, inner, hidden, config.mlp_bias) for name in names.up),
        (names.down, hidden, inner, config.mlp_bias),
    ]
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (columns, rows) if names.transposed else (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes | {f"{name}.weight": (config.head_dim,) for name in names.qk_norm}


def _qkv_rows(config: ModelConfig) -> dict[str, int]:
    """How many rows each of the projections gives."""
    names = config.tensor_names.qkv
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sizes = [q_size + 2 * kv_size] if len(names) == 1 else [q_size, kv_size, kv_size]
    return dict(zip(names, sizes, strict=True))


def _num_parameters(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# -------------------------------------------------------------------------------- where each goes


class _Builder:
    """Makes the parts of a decoder from a source of tensors, and notes where each tensor went."""

    def __init__(self, config: ModelConfig, source: Source, layout: Layout) -> None:
        self.config = config
        self.names = config.tensor_names
        self.source = source
        self.layout = layout
        self.parts: list[Part] = []
        self.qkv_order = qkv_order(config)

    def decoder(self, num_parameters: int) -> Decoder:
        config, names = self.config, self.names
        embedding = self.source(f"{names.embedding}.weight")
        layers = [self.layer(names.layer.format(index)) for index in range(config.num_layers)]
        norm = self.norm(names.norm)
        return Decoder(
            config,
            embedding,
            layers,
            norm,
            self.head(embedding),
            num_parameters,
            positions=self.tensor(f"{names.positions}.weight") if names.positions else None,
            parts=self.parts,
        )

    def head(self, embedding: Tensor) -> Head:
        names, tied = self.names, self.config.tie_embeddings
        of_embedding, own = f"{names.embedding}.weight", f"{names.head}.weight"
        bias = self.tensor(f"{names.head}.bias") if self.config.head_bias else None
        head = Head(embedding if tied else self.source(own), self.layout, bias)
        self.parts.append(TensorPart(of_embedding, embedding))
        self.parts.append(ProductPart(head, (of_embedding if tied else own,)))
        return head

    def layer(self, at: str) -> Layer:
        config, names = self.config, self.names
        norms = [self.tensor(f"{at}{name}.weight") for name in names.qk_norm]
        q_norm, k_norm = norms or (None, None)
        sizes = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        return Layer(
            input_norm=self.norm(at + names.input_norm),
            qkv=self.linear(at, names.qkv, config.qkv_bias, self.qkv_order),
            heads=Heads(*sizes, q_norm, k_norm, config.norm_eps),
            output=self.linear(at, (names.output,), config.o_bias),
            post_norm=None if names.post_norm is None else self.norm(at + names.post_norm),
            up=self.linear(at, names.up, config.mlp_bias),
            down=self.linear(at, (names.down,), config.mlp_bias),
        )

    def norm(self, name: str) -> Norm:
        bias = self.tensor(f"{name}.bias") if self.config.norm_bias else None
        return Norm(self.tensor(f"{name}.weight"), bias)

    def tensor(self, name: str) -> Tensor:
        """One that stands in the decoder as it is."""
        made = self.source(name)
        self.parts.append(TensorPart(name, made))
        return made

    def linear(
        self, at: str, modules: tuple[str, ...], bias: bool, order: list[int] | None = None
    ) -> Linear:
        """Projections of the same input, fused into one product; its rows in `order`."""
        weights = [self.source(f"{at}{name}.weight") for name in modules]
        if self.names.transposed:
            weights = [weight.t().contiguous() for weight in weights]
        biases = [self.source(f"{at}{name}.bias") for name in modules] if bias else []
        joined = _ordered(_concatenated(biases), order) if bias else None
        linear = Linear(_ordered(_concatenated(weights), order), joined, self.layout)
        names = tuple(f"{at}{name}.weight" for name in modules)
        counts = tuple(map(len, weights))
        self.parts.append(ProductPart(linear, names, counts, order, self.names.transposed))
        return linear


def qkv_order(config: ModelConfig) -> list[int] | None:
    """Which row of a checkpoint's projection stands at each place of the decoder's, whose heads
    are all q, all k, all v and whose pairs are half a head apart. None: they stand so."""
    num_q, num_kv, size = config.num_q_heads, config.num_kv_heads, config.head_dim
    group = num_q // num_kv
    heads = list(range(num_q + 2 * num_kv))
    if config.tensor_names.grouped:
        line = group + 2
        heads = [h // group * line + h % group for h in range(num_q)]
        heads += [h * line + group + part for part in (0, 1) for h in range(num_kv)]
    rotary = config.positions
    plain = list(range(size))
    turned = rotary_order(size, rotary.dim) if isinstance(rotary, Rotary) else plain
    within = [turned] * (num_q + num_kv) + [plain] * num_kv
    order = [h * size + i for h, places in zip(heads, within, strict=True) for i in places]
    return None if order == list(range(len(order))) else order


def _ordered(tensor: Tensor, order: list[int] | None) -> Tensor:
    return tensor if order is None else tensor[torch.tensor(order, device=tensor.device)]


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
