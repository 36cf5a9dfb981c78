"""From a model directory to a `Decoder`: which tensors there must be, and where each goes."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.models.checkpoint import Shapes, Source, checkpoint_source
from onestem.models.config import ModelConfig, Rotary
from onestem.models.decoder import Decoder, Layer, Norm
from onestem.models.formats.held import Weight
from onestem.models.formats.products import Target, projection
from onestem.models.formats.rounding import rounded_weight
from onestem.models.linear import Head, Layout, Projection, choose_layout, has_room
from onestem.models.rope import rotary_order
from onestem.ops import Heads
from onestem.options import Quantize

__all__ = ["expected_shapes", "load_decoder", "random_decoder"]


def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
    quantization: Quantize | None = None,
) -> Decoder:
    """Read a Hugging Face model directory; with `random_weights`, only its `config.json`.

    Random weights are normal with the configuration's `initializer_range`, biases 0 and norms 1.
    Each tensor depends on (seed, its name, device) alone. With `quantization` weights of layers are
    rounded to a format (see `onestem.models.formats.rounding`).

    Raises:
        ConfigError: `quantization` of weights that are quantised already.
    """
    config = ModelConfig.from_directory(path)
    target = torch.device(device)
    if random_weights:
        return random_decoder(
            config, dtype=dtype, device=target, seed=seed, quantization=quantization
        )
    if quantization is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization is {quantization}, and the weights of {path} are quantised "
            f"({config.quantization.method}): leave it out"
        )
    source = checkpoint_source(Path(path), config, expected_shapes(config), dtype, target)
    return _decoder(config, source, dtype, target, quantization)


def random_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    quantization: Quantize | None = None,
) -> Decoder:
    """A decoder of a configuration with random weights (see `load_decoder`)."""
    source = _RandomSource(config, expected_shapes(config), dtype, device, seed)
    return _decoder(config, source, dtype, device, quantization)


def _decoder(
    config: ModelConfig,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None,
) -> Decoder:
    shapes = expected_shapes(config)
    count = _num_parameters(shapes)
    copies = has_room(2 * count * dtype.itemsize)
    target = Target(dtype, device, choose_layout_of(shapes, dtype, device), copies)
    return _Builder(config, source, target, quantization).decoder(count)


def choose_layout_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """One layout for the whole model, so that all its products are of one kind."""
    return choose_layout(dtype, device, _num_parameters(shapes) * dtype.itemsize)


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
    """Makes the parts of a decoder from a source of tensors."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        target: Target,
        quantization: Quantize | None,
    ) -> None:
        self.config = config
        self.names = config.tensor_names
        self.source = source
        self.target = target
        self.quantization = quantization
        self.qkv_order = qkv_order(config)

    def decoder(self, num_parameters: int) -> Decoder:
        config, names, source = self.config, self.names, self.source
        embedding = source(f"{names.embedding}.weight")
        layers = [self.layer(names.layer.format(index)) for index in range(config.num_layers)]
        weight = embedding if config.tie_embeddings else source(f"{names.head}.weight")
        bias = source(f"{names.head}.bias") if config.head_bias else None
        return Decoder(
            config,
            embedding,
            layers,
            self.norm(names.norm),
            Head(weight, self.target.layout, bias),
            num_parameters,
            positions=source(f"{names.positions}.weight") if names.positions else None,
        )

    def layer(self, at: str) -> Layer:
        config, names = self.config, self.names
        norms = [self.source(f"{at}{name}.weight") for name in names.qk_norm]
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
        bias = self.source(f"{name}.bias") if self.config.norm_bias else None
        return Norm(self.source(f"{name}.weight"), bias)

    def linear(
        self, at: str, modules: tuple[str, ...], bias: bool, order: list[int] | None = None
    ) -> Projection:
        """Projections of the same input, fused into one product; its rows in `order`."""
        weights = [self.weight(at + name) for name in modules]
        places = None if order is None else torch.tensor(order, device=self.target.device)
        joined = None
        if bias:
            joined = torch.cat([self.source(f"{at}{name}.bias") for name in modules])
            joined = joined if places is None else joined[places]
        return projection(weights, joined, places, self.target)

    def weight(self, module: str) -> Weight:
        weight = self.source.weight(module)
        if not isinstance(weight, Tensor):
            return weight
        weight = weight.t().contiguous() if self.names.transposed else weight
        if self.quantization is None:
            return weight
        return rounded_weight(weight, self.quantization, module)


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


class _RandomSource:
    """A `Source` that makes tensors up."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self.spread, self.shapes = config.initializer_range, shapes
        self.dtype, self.device, self.seed = dtype, device, seed

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(_tensor_seed(self.seed, name))
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, self.spread, generator=generator)

    def weight(self, module: str) -> Tensor:
        return self(f"{module}.weight")


def _tensor_seed(seed: int, name: str) -> int:
    """32 bits: the CPU's generator ignores higher ones."""
    return zlib.crc32(f"{seed} {name}".encode())
