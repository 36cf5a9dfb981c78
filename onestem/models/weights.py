"""From a model directory to a `Decoder`: which tensors there must be, and where each goes."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.models.checkpoint import Shapes, Source, checkpoint_source, has_own_head
from onestem.models.config import ModelConfig, Rotary
from onestem.models.decoder import Decoder, Layer, Norm
from onestem.models.formats.held import Weight
from onestem.models.formats.products import Target, projection, row_bytes
from onestem.models.formats.rounding import rounded_weight
from onestem.models.linear import Head, Layout, Projection, choose_layout, has_room
from onestem.models.quantization import Scheme
from onestem.models.rope import rotary_order
from onestem.ops import Heads
from onestem.options import Quantize

__all__ = [
    "checked_config",
    "expected_shapes",
    "formats_of",
    "linear_modules",
    "load_decoder",
    "num_parameters",
    "random_decoder",
    "read_weight",
    "refuse_rounding_twice",
    "target_of",
    "weight_bytes",
]


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
    refuse_rounding_twice(path, config, quantization)
    config = _with_own_head(Path(path), config)
    source = checkpoint_source(Path(path), config, expected_shapes(config), dtype, target)
    return _decoder(config, source, dtype, target, quantization)


def refuse_rounding_twice(
    path: str | Path, config: ModelConfig, quantization: Quantize | None
) -> None:
    """Raise `ConfigError` where weights that are quantised are to be rounded."""
    if quantization is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization is {quantization}, and the weights of {path} are quantised "
            f"({config.quantization.method}): leave it out"
        )


def _with_own_head(path: Path, config: ModelConfig) -> ModelConfig:
    tied = config.tie_embeddings and not has_own_head(path, config)
    return replace(config, tie_embeddings=tied)


def checked_config(path: str | Path) -> tuple[ModelConfig, dict[str, Scheme]]:
    """The configuration of a directory that holds the model's tensors, by names and shapes, and how
    its quantised modules are stored.

    Raises:
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    config = _with_own_head(Path(path), ModelConfig.from_directory(path))
    shapes = expected_shapes(config)
    source = checkpoint_source(Path(path), config, shapes, torch.float32, torch.device("cpu"))
    return config, {module: scheme for module, (scheme, _, _) in source.schemes.items()}


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    formats: Mapping[str, Scheme | Quantize] | None = None,
) -> int:
    """What `Decoder.weight_bytes` will be, but for packed copies of biases and orders of inputs.

    Args:
        formats: of quantised modules.
    """
    shapes, names = expected_shapes(config), config.tensor_names
    target = target_of(shapes, dtype, device)
    layout, formats = target.layout, formats or {}
    head = config.vocab_size * config.hidden_size
    total = head * layout.head_itemsize(dtype, tied=config.tie_embeddings)
    tables = (f"{names.embedding}.weight", f"{names.positions}.weight")
    per_row = functools.cache(lambda form, size: row_bytes(form, size, target))
    for name, shape in shapes.items():
        product = len(shape) == 2 and name not in tables
        form = formats.get(name.removesuffix(".weight"))
        if name == f"{names.head}.weight":
            continue
        if product and form is not None:
            out, size = reversed(shape) if names.transposed else shape
            total += int(out * per_row(form, size))
            continue
        size = layout.itemsize(dtype) if product else dtype.itemsize
        norm = len(shape) == 1 and not name.endswith(".bias") and config.norm_offset
        total += math.prod(shape) * (4 if norm else size)
    return total


def formats_of(config: ModelConfig, quantization: Quantize | None) -> dict[str, Scheme | Quantize]:
    """Formats of a model's modules as far as its configuration tells: which are left out stands in
    the weights' files."""
    modules = linear_modules(config)
    if quantization is not None:
        return dict.fromkeys(modules, quantization)
    stored = config.quantization
    schemes = {} if stored is None else {module: stored.scheme(module) for module in modules}
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def linear_modules(config: ModelConfig) -> list[str]:
    """Names of the layers' linear modules, in the order of layers."""
    shapes, names = expected_shapes(config), config.tensor_names
    others = {names.embedding, names.positions, names.head}
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return [module for module in modules if module not in others]


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
    target = target_of(shapes, dtype, device)
    return _Builder(config, source, target, quantization).decoder(num_parameters(shapes))


def target_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Target:
    """What products of a model are made for, of which these are all weights."""
    copies = has_room(2 * num_parameters(shapes) * dtype.itemsize)
    return Target(dtype, device, choose_layout_of(shapes, dtype, device), copies)


def choose_layout_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """One layout for the whole model, so that all its products are of one kind."""
    return choose_layout(dtype, device, num_parameters(shapes) * dtype.itemsize)


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
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in (names.input_norm, names.output_norm, names.post_norm, names.down_norm):
        shapes |= {} if norm is None else _norm_shapes(config, norm)
    up = inner * (1 + config.gated) // len(names.up)
    linears = [
        *((name, rows, hidden, config.qkv_bias) for name, rows in _qkv_rows(config).items()),
        (names.output, hidden, config.num_q_heads * config.head_dim, config.o_bias),
        *((name, up, hidden, config.mlp_bias) for name in names.up),
        (names.down, hidden, inner, config.mlp_bias),
    ]
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (columns, rows) if names.transposed else (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    heads = (config.num_q_heads, config.num_kv_heads) if config.qk_norm_of_all else (1, 1)
    for name, count in zip(names.qk_norm, heads, strict=False):
        shapes[f"{name}.weight"] = (count * config.head_dim,)
    return shapes


def _qkv_rows(config: ModelConfig) -> dict[str, int]:
    """How many rows each of the projections gives."""
    names = config.tensor_names.qkv
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sizes = [q_size + 2 * kv_size] if len(names) == 1 else [q_size, kv_size, kv_size]
    return dict(zip(names, sizes, strict=True))


def num_parameters(shapes: Shapes) -> int:
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

    def decoder(self, num_parameters: int) -> Decoder:
        config, names, source = self.config, self.names, self.source
        embedding = source(f"{names.embedding}.weight")
        layers = [self.layer(index) for index in range(config.num_layers)]
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

    def layer(self, index: int) -> Layer:
        config, names = self.config, self.names
        at, order = names.layer.format(index), qkv_order(config, index)
        norms = self.qk_norms(at, config.rotaries[index])
        q_norm, k_norm = (None, None) if config.qk_norm_of_all or norms is None else norms
        sizes = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        return Layer(
            input_norm=self.layer_norm(at, names.input_norm),
            qkv=self.linear(at, names.qkv, config.qkv_bias, order),
            heads=Heads(*sizes, q_norm, k_norm, config.norm_eps),
            output=self.linear(at, (names.output,), config.o_bias),
            post_norm=self.layer_norm(at, names.post_norm),
            up=self.linear(at, names.up, config.mlp_bias),
            down=self.linear(at, (names.down,), config.mlp_bias),
            output_norm=self.layer_norm(at, names.output_norm),
            down_norm=self.layer_norm(at, names.down_norm),
            qk_norms=norms if config.qk_norm_of_all else None,
        )

    def qk_norms(self, at: str, rotary: Rotary | None) -> tuple[Tensor, Tensor] | None:
        """Weights of the norms over q and k, in the order of a head's dimensions here."""
        if not self.names.qk_norm:
            return None
        order = torch.tensor(rotary_order(self.config.head_dim, rotary))
        size = self.config.head_dim
        q, k = (self.norm_weight(f"{at}{name}").view(-1, size) for name in self.names.qk_norm)
        return q[:, order.to(q.device)].flatten(), k[:, order.to(k.device)].flatten()

    def layer_norm(self, at: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(at + name)

    def norm(self, name: str) -> Norm:
        bias = self.source(f"{name}.bias") if self.config.norm_bias else None
        return Norm(self.norm_weight(name), bias)

    def norm_weight(self, name: str) -> Tensor:
        """With the offset in float32: 16 bits would lose most of what is stored."""
        weight, offset = self.source(f"{name}.weight"), self.config.norm_offset
        return weight.float() + offset if offset else weight

    def linear(
        self, at: str, modules: tuple[str, ...], bias: bool, order: list[int] | None = None
    ) -> Projection:
        """Projections of the same input, fused into one product; its rows in `order`."""
        weights = [
            read_weight(self.config, self.source, at + name, self.quantization) for name in modules
        ]
        places = None if order is None else torch.tensor(order, device=self.target.device)
        joined = None
        if bias:
            joined = torch.cat([self.source(f"{at}{name}.bias") for name in modules])
            joined = joined if places is None else joined[places]
        return projection(weights, joined, places, self.target)


def read_weight(
    config: ModelConfig, source: Source, module: str, quantization: Quantize | None
) -> Weight:
    """`[out_features, in_features]` of a linear layer, rounded where that is asked for."""
    weight = source.weight(module)
    if not isinstance(weight, Tensor):
        return weight
    weight = weight.t().contiguous() if config.tensor_names.transposed else weight
    return weight if quantization is None else rounded_weight(weight, quantization, module)


def qkv_order(config: ModelConfig, layer: int = 0) -> list[int] | None:
    """Which row of a checkpoint's projection stands at each place of the decoder's, whose heads
    are all q, all k, all v and whose pairs are half a head apart. None: they stand so."""
    num_q, num_kv, size = config.num_q_heads, config.num_kv_heads, config.head_dim
    group = num_q // num_kv
    heads = list(range(num_q + 2 * num_kv))
    if config.tensor_names.grouped:
        line = group + 2
        heads = [h // group * line + h % group for h in range(num_q)]
        heads += [h * line + group + part for part in (0, 1) for h in range(num_kv)]
    plain = list(range(size))
    turned = rotary_order(size, config.rotaries[layer])
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
        self.spread, self.norm = config.initializer_range, 1 - config.norm_offset
        self.shapes = shapes
        self.dtype, self.device, self.seed = dtype, device, seed

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return torch.full(shape, self.norm, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(_tensor_seed(self.seed, name))
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, self.spread, generator=generator)

    def weight(self, module: str) -> Tensor:
        return self(f"{module}.weight")


def _tensor_seed(seed: int, name: str) -> int:
    """32 bits: the CPU's generator ignores higher ones."""
    return zlib.crc32(f"{seed} {name}".encode())
