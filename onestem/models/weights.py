"""From a model directory to a `Decoder`: the tensors it needs, and where each goes."""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from onestem.errors import ConfigError, WeightsError
from onestem.models.checkpoint import (
    PACKED,
    Checkpoint,
    Header,
    Parts,
    Shapes,
    Source,
    check_shapes,
    check_unknown,
    checkpoint_source,
    has_own_head,
    listed,
    our_name,
)
from onestem.models.config import ModelConfig
from onestem.models.cuts import Cut
from onestem.models.decoder import Decoder, Layer, Norm, activation_of
from onestem.models.description import ExpertNames, Experts
from onestem.models.formats.held import Weight
from onestem.models.formats.products import RoundedHead, Target, projection, row_bytes
from onestem.models.formats.rounding import rounded_weight
from onestem.models.formats.stored import Expected
from onestem.models.linear import Activation, Head, Layout, Linear, Projection, choose_layout
from onestem.models.mlp import (
    ExpertLayer,
    ExpertProducts,
    ExpertsBeside,
    Mlp,
    SortedBlocks,
    clamped_swiglu,
    route,
    route_on_gpu,
)
from onestem.models.part import cuts_of, part_of
from onestem.models.places import Place, ProductPlace, TensorPlace, bias_of
from onestem.models.quantization import Scheme
from onestem.models.ranks import ALONE, Ranks
from onestem.models.rope import rotary_order
from onestem.models.vectors import LayerVectors, TokenVectors
from onestem.ops import Heads, LayerOps, resolve_layers
from onestem.ops.experts import MAX_POWER, MX_BLOCK, GroupedWeight
from onestem.options import Quantize

__all__ = [
    "ExpertWeights",
    "checked_config",
    "checked_tensors",
    "expert_activation",
    "expected_shapes",
    "formats_of",
    "linear_modules",
    "load_decoder",
    "num_parameters",
    "open_checkpoint",
    "quantised_as",
    "quantised_experts",
    "random_decoder",
    "read_experts",
    "read_weight",
    "refuse_rounding_twice",
    "rounds_head",
    "target_of",
    "weight_bytes",
    "with_own_head",
    "write_tensors",
]

log = logging.getLogger(__name__)

# Of all experts of a layer: gate and up, and down.
ExpertWeights = tuple[GroupedWeight, GroupedWeight]

# Dtypes of tensors in updates.
FLOATING = ("bfloat16", "float16", "float32", "float64")


def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_weights: bool = False,
    seed: int = 0,
    quantization: Quantize | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Read a Hugging Face model directory; with `random_weights`, only its `config.json`.

    Where several `ranks` hold the model together, only this rank's part is read. Random weights are
    normal with the configuration's `initializer_range`, biases 0 and norms 1. Each tensor depends
    on (seed, its name, device) alone. With `quantization` weights of layers are rounded to a format
    (see `onestem.models.formats.rounding`).

    Raises:
        ConfigError: `quantization` of weights that are quantised already; or the model does not
            divide over the ranks.
    """
    config = ModelConfig.from_directory(path)
    target = torch.device(device)
    if random_weights:
        return random_decoder(
            config, dtype=dtype, device=target, seed=seed, quantization=quantization, ranks=ranks
        )
    refuse_rounding_twice(path, config, quantization)
    config = with_own_head(Path(path), config)
    cuts = cuts_of(config, ranks)
    source = open_checkpoint(path, config, dtype, target, cuts)
    return _decoder(config, source, dtype, target, quantization, ranks, cuts)


def open_checkpoint(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Mapping[str, Cut] | None = None,
) -> Checkpoint:
    """The tensors of a model's directory (see `checkpoint_source`)."""
    shapes, names = expected_shapes(config), config.tensor_names.experts
    parts = {} if names is not None and names.alternating else expert_parts(config)
    return checkpoint_source(Path(path), config, shapes, parts, dtype, device, cuts or {})


def refuse_rounding_twice(
    path: str | Path, config: ModelConfig, quantization: Quantize | None
) -> None:
    """Raise `ConfigError` if weights that are quantised are to be rounded."""
    if quantization is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization is {quantization}, and the weights of {path} are quantised "
            f"({config.quantization.method}): leave it out"
        )


def with_own_head(path: Path, config: ModelConfig) -> ModelConfig:
    """The configuration of a directory's weights (see `has_own_head`)."""
    tied = config.tie_embeddings and not has_own_head(path, config)
    return replace(config, tie_embeddings=tied)


def checked_config(path: str | Path) -> tuple[ModelConfig, dict[str, Scheme]]:
    """The configuration of a directory that holds the model's tensors, by names and shapes, and how
    its quantised modules are stored.

    Raises:
        WeightsError: names what is missing, unknown, of another shape or unreadable.
    """
    config = with_own_head(Path(path), ModelConfig.from_directory(path))
    source = open_checkpoint(path, config, torch.float32, torch.device("cpu"))
    return config, {module: scheme for module, (scheme, _, _) in source.schemes.items()}


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
    shapes, names = expected_shapes(config), config.tensor_names
    target = target_of(shapes, dtype, device)
    layout, forms = target.layout, formats or {}
    multiplied = set(linear_modules(config))
    per_row = functools.cache(lambda form, size: row_bytes(form, size, target))
    if names.head in forms:
        total = int(config.vocab_size * per_row("int8", config.hidden_size))
    else:
        head = config.vocab_size * config.hidden_size
        total = head * layout.head_itemsize(dtype, tied=config.tie_embeddings)
    vectors = names.token_vectors
    tables = [f"{names.embedding}.weight", f"{names.positions}.weight"]
    tables += [] if vectors is None else [f"{vectors.table}.weight"]
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if name in tables:
            total += math.prod(shape) * dtype.itemsize
        elif module in multiplied and module in forms:
            out, size = reversed(shape) if names.transposed else shape
            total += int(out * per_row(forms[module], size))
        elif name.endswith(PACKED) and _has_kernels(device):
            total += _tiled_bytes(name, shape, config)
        elif name != f"{names.head}.weight":
            total += math.prod(shape) * _itemsize(config, name, len(shape), layout, dtype, device)
    return total


def _tiled_bytes(name: str, shape: tuple[int, ...], config: ModelConfig) -> int:
    """Bytes of a tensor of mxfp4 `[num, rows, blocks, ...]` as `TiledExperts` holds it: rows, of
    gate and of up for themselves, in 64s, and columns by 4 blocks."""
    _, names = _experts_of(config)
    num, rows, blocks, *block = shape
    halves = 2 if name.removesuffix("_blocks").removesuffix("_scales").endswith(names.up) else 1
    padded = halves * math.ceil(rows / halves / 64) * 64
    return num * padded * math.ceil(blocks / 4) * 4 * math.prod(block)


def formats_of(
    config: ModelConfig, quantization: Quantize | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Scheme | Quantize]:
    """Formats of a model's modules, from its configuration alone: modules that are left out are
    known only from the weights' files."""
    modules = linear_modules(config)
    if quantization is not None:
        target = target_of(expected_shapes(config), dtype, device)
        head = [config.tensor_names.head] if rounds_head(config, quantization, target) else []
        return dict.fromkeys(modules + head, quantization)
    stored = config.quantization
    schemes = {} if stored is None else {module: stored.scheme(module) for module in modules}
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def rounds_head(config: ModelConfig, quantization: Quantize | None, target: Target) -> bool:
    """Whether the head is also rounded, to int8: on a CPU, where it takes as long as many
    layers."""
    rounded = quantization in ("int8", "int4")
    return rounded and RoundedHead.takes(config.hidden_size, target)


def linear_modules(config: ModelConfig) -> list[str]:
    """Names of the layers' linear modules that have formats (no routers, no experts), in the order
    of layers."""
    shapes, names = expected_shapes(config), config.tensor_names
    experts = names.experts
    others: tuple[str, ...] = (names.embedding, names.head)
    others += () if names.positions is None else (names.positions,)
    others += () if names.token_vectors is None else (names.token_vectors.table,)
    others += () if experts is None else (f".{experts.router}", f".{experts.shared_gate}")
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return [
        module for module in modules if f"{module}.weight" in shapes and not module.endswith(others)
    ]


def quantised_experts(
    config: ModelConfig, schemes: Mapping[str, Scheme]
) -> Iterator[tuple[int, str]]:
    """(layer, name of the module) of all experts that files hold in a format of fewer bits."""
    for layer in range(config.num_layers):
        if config.has_experts(layer):
            experts, names = _experts_of(config)
            module = (config.tensor_names.layer.format(layer) + names.each).partition(".{}")[0]
            if experts.mxfp4 or any(name.startswith(f"{module}.") for name in schemes):
                yield layer, module


def _itemsize(
    config: ModelConfig,
    name: str,
    dims: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes of one element of a tensor of a layer or of the last norm, as it is kept."""
    experts = config.tensor_names.experts
    if name.endswith(PACKED):
        return 2 * name.endswith("_blocks") * layout.itemsize(dtype)  # two values in a byte
    if dims == 1:
        wide = ".bias" not in name and config.norm_offset
        alone = name.endswith((".sinks", ".e_score_correction_bias"))
        if experts is not None:
            alone = alone or name.endswith(
                (f".{experts.router_scale}", f".{experts.expert_scales}")
            )
        return 4 if wide or alone else dtype.itemsize
    if name.endswith("bias"):
        return dtype.itemsize
    if experts is not None and name.endswith(f".{experts.router}.weight"):
        return layout.head_itemsize(dtype, tied=False)
    if experts is not None and name.endswith(f".{experts.shared_gate}.weight"):
        return dtype.itemsize
    return layout.itemsize(dtype)


def random_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    quantization: Quantize | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """A decoder with random weights (see `load_decoder`). A rank's part is cut from the tensors of
    the whole model."""
    cuts = cuts_of(config, ranks)
    source = _RandomSource(config, expected_shapes(config), dtype, device, seed, cuts)
    return _decoder(config, source, dtype, device, quantization, ranks, cuts)


def _decoder(
    config: ModelConfig,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None,
    ranks: Ranks,
    cuts: Mapping[str, Cut],
) -> Decoder:
    shapes = expected_shapes(config)
    target = target_of(shapes, dtype, device)
    builder = _Builder(part_of(config, ranks), source, target, quantization, ranks, cuts)
    return builder.decoder(config, num_parameters(shapes))


def quantised_as(config: ModelConfig, quantization: Quantize | None) -> str | None:
    """The format that weights of a model are stored in or rounded to; None: they are not
    quantised."""
    if quantization is not None or config.quantization is None:
        return quantization or ("mxfp4" if config.experts and config.experts.mxfp4 else None)
    return config.quantization.method


def checked_tensors(
    config: ModelConfig,
    named_tensors: Iterable[tuple[str, Tensor]],
    quantised: str | None = None,
) -> dict[str, Tensor]:
    """Check some or all of a decoder's tensors; returns them by the names of `Decoder.places`.

    Tensors of single experts are views of those of all experts.

    Args:
        quantised: see `quantised_as`.

    Raises:
        WeightsError: names what is unknown, given twice, of another shape or no floating point; or
            the weights are quantised.
    """
    where = "update_weights"
    if quantised is not None:
        raise WeightsError(
            f"{where}: the weights are {quantised}, which cannot be written again: load the model "
            "in 16 bits"
        )
    known = _writable(config)
    given: dict[str, Tensor] = {}
    for theirs, tensor in named_tensors:
        name = our_name(config, theirs)
        if name is None:
            continue
        with_prefix = config.tensor_names.prefix + name
        name = with_prefix if name not in known and with_prefix in known else name
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"{where}: {name} is {type(tensor).__name__}, expected a tensor")
        if name in given:
            raise WeightsError(f"{where}: {name} is given twice")
        given[name] = tensor.detach()
    check_unknown(where, config, known, given)
    headers = {
        name: Header(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in given.items()
    }
    check_shapes(where, config, known, headers)
    of_meta = [name for name, tensor in given.items() if tensor.is_meta]
    if of_meta:
        raise WeightsError(f"{where}: tensors without values (meta device): {listed(of_meta)}")
    return _by_expert(config, {name: given[name] for name in given if name in known})


@torch.no_grad()
def write_tensors(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite a decoder's tensors in place with tensors that were checked."""

    def given(name: str, as_dtype: torch.dtype | None = None) -> Tensor | None:
        if name not in tensors:
            return None
        cut, tensor = decoder.cuts.get(name), tensors[name]
        tensor = tensor if cut is None else cut.of(tensor)
        return tensor.to(decoder.device, as_dtype or decoder.dtype)

    for place in dict.fromkeys(place for name in tensors for place in decoder.places[name]):
        place.write(given)


def target_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of a model's products; `shapes`: of all its weights."""
    return Target(dtype, device, choose_layout_of(shapes, dtype, device))


def _has_kernels(device: torch.device) -> bool:
    """Whether kernels are used, as in `resolve_layers`: without Triton all runs in PyTorch."""
    return device.type == "cuda" and find_spec("triton") is not None


def choose_layout_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Layout:
    """One layout for the whole model, so that all its products are of one kind."""
    return choose_layout(dtype, device, num_parameters(shapes) * dtype.itemsize)


# ------------------------------------------------------------------------------ needed tensors


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name in the checkpoint -> shape, of every tensor of the decoder."""
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
    if names.token_vectors is not None:
        vectors, width = names.token_vectors, config.num_layers * config.token_vectors
        shapes[f"{vectors.table}.weight"] = (config.vocab_size, width)
        shapes[f"{vectors.projection}.weight"] = (width, config.hidden_size)
        shapes[f"{vectors.norm}.weight"] = (config.token_vectors,)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[names.layer.format(layer) + name] = shape
    return shapes


def _norm_shapes(config: ModelConfig, module: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{module}.{part}": (config.hidden_size,) for part in parts}


# (module, out_features, in_features, whether it has a bias)
_Modules = list[tuple[str, int, int, bool]]


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    names, hidden, size = config.tensor_names, config.hidden_size, config.heads[layer].head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in (names.input_norm, names.output_norm, names.post_norm, names.down_norm):
        shapes |= {} if norm is None else _norm_shapes(config, norm)
    linears = [
        *((name, rows, hidden, config.qkv_bias) for name, rows in _qkv_rows(config, layer).items()),
        (names.output, hidden, config.num_q_heads * size, config.o_bias),
    ]
    if config.has_experts(layer):
        experts, their = _experts_of(config)
        shapes |= _expert_shapes(experts, their, hidden)
        linears += _beside_experts(experts, their, hidden)
    if config.has_mlp(layer):
        inner = config.mlp_size(layer)
        up = inner * (1 + config.gated) // len(names.up)
        linears += [(name, up, hidden, config.mlp_bias) for name in names.up]
        linears += [(names.down, hidden, inner, config.mlp_bias)]
    if names.token_vectors is not None:
        vectors = names.token_vectors
        linears += [(vectors.gate, config.token_vectors, hidden, False)]
        linears += [(vectors.output, hidden, config.token_vectors, False)]
        shapes |= _norm_shapes(config, vectors.output_norm)
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (columns, rows) if names.transposed else (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    heads = (config.num_q_heads, config.num_kv_heads) if config.qk_norm_of_all else (1, 1)
    for name, count in zip(_qk_norm(config, layer), heads, strict=False):
        shapes[f"{name}.weight"] = (count * size,)
    shapes |= {names.layer_scalar: (1,)} if names.layer_scalar else {}
    return shapes | ({names.sinks: (config.num_q_heads,)} if names.sinks else {})


def _experts_of(config: ModelConfig) -> tuple[Experts, ExpertNames]:
    names = config.tensor_names.experts
    assert config.experts is not None
    assert names is not None
    return config.experts, names


def _expert_shapes(experts: Experts, names: ExpertNames, hidden: int) -> dict[str, tuple[int, ...]]:
    num, inner = experts.num, experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in ((names.up, 2 * inner, hidden), (names.down, hidden, inner)):
        if experts.mxfp4:
            shapes[f"{name}_blocks"] = (num, rows, columns // MX_BLOCK, MX_BLOCK // 2)
            shapes[f"{name}_scales"] = (num, rows, columns // MX_BLOCK)
        else:
            shapes[name] = (num, columns, rows) if names.alternating else (num, rows, columns)
        if experts.bias:
            shapes[f"{name}_bias"] = (num, rows)
    if experts.beside_mlp:
        for module in (names.input_norm, names.mlp_norm, names.output_norm):
            shapes[f"{module}.weight"] = (hidden,)
        shapes[names.router_scale] = (hidden,)
    shapes |= {names.expert_scales: (num,)} if experts.expert_scales else {}
    return shapes | ({names.correction: (num,)} if experts.correction else {})


def _beside_experts(experts: Experts, names: ExpertNames, hidden: int) -> _Modules:
    """The router, the shared MLP and its gate."""
    modules = [(names.router, experts.num, hidden, experts.bias)]
    if experts.shared_size:
        modules += [(name, experts.shared_size, hidden, False) for name in names.shared_up]
        modules += [(names.shared_down, hidden, experts.shared_size, False)]
    if experts.shared_gate:
        modules += [(names.shared_gate, 1, hidden, False)]
    return modules


@functools.cache
def expert_parts(config: ModelConfig) -> Parts:
    """Tensor of all experts of a layer -> tensors of single experts, as most files have them."""
    layer = config.tensor_names.layer
    layers = [layer.format(i) for i in range(config.num_layers) if config.has_experts(i)]
    return {name: parts for at in layers for name, parts in _layer_parts(config, at).items()}


def _layer_parts(config: ModelConfig, at: str) -> Parts:
    experts, names = _experts_of(config)
    each = [at + names.each.format(index) for index in range(experts.num)]
    gate, up = names.each_up
    return {
        at + names.up: [(f"{one}{gate}.weight", f"{one}{up}.weight") for one in each],
        at + names.down: [(f"{one}{names.each_down}.weight",) for one in each],
    }


def _rows_first(tensor: Tensor, names: ExpertNames) -> Tensor:
    """Weights of all experts as `[num, out_features, in_features]`, from a file's 16-bit tensor."""
    return tensor.transpose(1, 2) if names.alternating else tensor


def _halves(tensor: Tensor, names: ExpertNames) -> tuple[Tensor, ...]:
    """`[num, 2 * size, ...]` -> gate and up, `[num, size, ...]` each."""
    if names.alternating:
        return tensor[:, 0::2], tensor[:, 1::2]
    return tensor.chunk(2, dim=1)


def _by_expert(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, with those of all experts replaced by views of single experts."""
    single = dict(tensors)
    for whole, experts in expert_parts(config).items():
        _, names = _experts_of(config)
        for name, name_of in ((whole, str), (f"{whole}_bias", bias_of)):
            if name not in single:
                continue
            tensor = single.pop(name)
            tensor = tensor if tensor.ndim == 2 else _rows_first(tensor, names)
            pieces = [tensor] if len(experts[0]) == 1 else _halves(tensor, names)
            for parts, *theirs in zip(experts, *pieces, strict=True):
                for part, piece in zip(map(name_of, parts), theirs, strict=True):
                    if part in single:
                        raise WeightsError(f"update_weights: {part} is given twice")
                    single[part] = piece
    return single


@functools.cache
def _writable(config: ModelConfig) -> Mapping[str, Expected]:
    """Tensors that can be rewritten, of all experts and of single ones."""
    wholes = {
        name: torch.empty(shape, device="meta") for name, shape in expected_shapes(config).items()
    }
    return {
        name: Expected(tuple(tensor.shape), FLOATING)
        for name, tensor in (wholes | _by_expert(config, wholes)).items()
    }


def _qkv_rows(config: ModelConfig, layer: int) -> dict[str, int]:
    """Name -> rows, of each QKV projection that the layer has."""
    names, heads = config.tensor_names.qkv, config.heads[layer]
    q_size = config.num_q_heads * heads.head_dim
    kv_size = heads.num_kv_heads * heads.head_dim
    sizes = [q_size + 2 * kv_size] if len(names) == 1 else [q_size, kv_size, kv_size]
    here = 1 if heads.kv_layer is not None else 2 if heads.value_is_key else len(sizes)
    return dict(zip(names[:here], sizes, strict=False))


def _qk_norm(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's norms over heads, relative to the layer's."""
    reads = config.heads[layer].kv_layer is not None
    return config.tensor_names.qk_norm[:1] if reads else config.tensor_names.qk_norm


def num_parameters(shapes: Shapes) -> int:
    """Number of parameters: two for each byte of mxfp4, none for scales."""
    counts = {name: math.prod(shape) for name, shape in shapes.items() if name[-7:] != "_scales"}
    return sum(count * (1 + name.endswith("_blocks")) for name, count in counts.items())


# -------------------------------------------------------------------------------- where each goes


class _Builder:
    """Makes the parts of a decoder from a source of tensors, and notes where each tensor went."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        target: Target,
        quantization: Quantize | None,
        ranks: Ranks,
        cuts: Mapping[str, Cut],
    ) -> None:
        """config: of this rank's part, which `cuts` describe."""
        self.ranks = ranks
        self.cuts = cuts
        self.config = config
        self.names = config.tensor_names
        self.source = source
        self.target = target
        self.quantization = quantization
        self.on_gpu = _has_kernels(target.device)
        self.quantised = quantised_as(config, quantization)
        self.places: list[Place] = []
        self.kept: list[str] = []  # modules that were not rounded

    def decoder(self, whole: ModelConfig, parameters: int) -> Decoder:
        """The decoder; `whole` and `parameters` are of the whole model."""
        config, names = self.config, self.names
        of_embedding = f"{names.embedding}.weight"
        embedding = self.tensor(of_embedding)
        layers = [self.layer(index) for index in range(config.num_layers)]
        if rounds_head(config, self.quantization, self.target):
            weight = embedding if config.tie_embeddings else self.source(f"{names.head}.weight")
            bias = self.tensor(f"{names.head}.bias") if config.head_bias else None
            head: Head = RoundedHead(weight, self.target.layout, bias)
        elif config.tie_embeddings:
            bias = self.tensor(f"{names.head}.bias") if config.head_bias else None
            head = Head(embedding, self.target.layout, bias)
            self.places.append(ProductPlace(head, (of_embedding,)))
        else:
            head = self.head(names.head, self.target.layout, config.head_bias)
        if self.kept:
            log.warning(
                "%s does not take the widths of %d modules (%s): they stay as they are",
                self.quantization,
                len(self.kept),
                listed(self.kept),
            )
        return Decoder(
            whole,
            embedding,
            layers,
            self.norm(names.norm),
            head,
            parameters,
            positions=self.tensor(f"{names.positions}.weight") if names.positions else None,
            vectors=self.token_vectors(),
            places=self.places,
            cuts=self.cuts,
            ranks=self.ranks,
            quantised=self.quantised,
        )

    def layer(self, index: int) -> Layer:
        config, names = self.config, self.names
        at, order = names.layer.format(index), qkv_order(config, index)
        norms = self.qk_norms(at, index)
        q_norm, k_norm = (None, None) if config.qk_norm_of_all else (*norms, None, None)[:2]
        their = config.heads[index]
        has_experts, has_mlp = config.has_experts(index), config.has_mlp(index)
        sinks = self.tensor(at + names.sinks, torch.float32) if names.sinks else None
        return Layer(
            input_norm=self.layer_norm(at, names.input_norm),
            qkv=self.linear(at, tuple(_qkv_rows(config, index)), config.qkv_bias, order),
            heads=Heads(
                num_q_heads=config.num_q_heads,
                num_kv_heads=their.num_kv_heads if their.kv_layer is None else 0,
                head_dim=their.head_dim,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=config.norm_eps,
                sinks=sinks,
                v_norm=config.v_norm,
                value_is_key=their.value_is_key,
            ),
            output=self.linear(at, (names.output,), config.o_bias),
            post_norm=self.layer_norm(at, names.post_norm),
            mlp=self.mlp(at) if has_mlp else self.experts(at),
            output_norm=self.layer_norm(at, names.output_norm),
            down_norm=self.layer_norm(at, names.down_norm),
            qk_norms=(norms[0], norms[1]) if config.qk_norm_of_all else None,
            beside=self.beside(at) if has_experts and has_mlp else None,
            vectors=self.layer_vectors(at),
            scalar=self.tensor(at + names.layer_scalar) if names.layer_scalar else None,
        )

    def token_vectors(self) -> TokenVectors | None:
        config, names = self.config, self.names.token_vectors
        if names is None:
            return None
        scale = torch.tensor(config.token_vectors**0.5, dtype=self.target.dtype).item()
        return TokenVectors(
            table=self.tensor(f"{names.table}.weight"),
            projection=self.linear("", (names.projection,), bias=False),
            norm=self.norm_weight(names.norm),
            eps=config.norm_eps,
            scale=scale,
            ranks=self.ranks,
        )

    def layer_vectors(self, at: str) -> LayerVectors | None:
        names = self.names.token_vectors
        if names is None:
            return None
        return LayerVectors(
            gate=self.linear(at, (names.gate,), bias=False),
            output=self.linear(at, (names.output,), bias=False),
            norm=self.norm_weight(at + names.output_norm),
        )

    def beside(self, at: str) -> ExpertsBeside:
        names, root = _experts_of(self.config)[1], self.config.hidden_size**-0.5
        return ExpertsBeside(
            experts=self.experts(at),
            router_norm=self.tensor(at + names.router_scale, torch.float32, lambda x: x * root),
            input_norm=self.norm_weight(at + names.input_norm),
            output_norm=self.norm_weight(at + names.output_norm),
            mlp_norm=self.norm_weight(at + names.mlp_norm),
        )

    def mlp(self, at: str) -> Mlp:
        names, bias = self.names, self.config.mlp_bias
        return Mlp(self.linear(at, names.up, bias), self.linear(at, (names.down,), bias))

    def experts(self, at: str) -> ExpertLayer:
        experts, names = _experts_of(self.config)
        shared = shared_gate = correction = scales = None
        if experts.shared_size:
            up = self.linear(at, names.shared_up, bias=False)
            shared = Mlp(up, self.linear(at, (names.shared_down,), bias=False))
        if experts.shared_gate:
            shared_gate = self.head(at + names.shared_gate, Layout.PLAIN)
        if experts.correction:
            # The published numbers are float32, and differ by less than 16 bits can represent.
            correction = self.tensor(at + names.correction, torch.float32)
        if experts.expert_scales:
            scales = self.tensor(at + names.expert_scales, torch.float32)
        return ExpertLayer(
            experts=experts,
            router=self.head(at + names.router, self.target.layout, experts.bias),
            correction=correction,
            products=self.products(at, *self.expert_weights(at)),
            shared=shared,
            shared_gate=shared_gate,
            route=route_on_gpu if self.on_gpu else route,
            expert_scales=scales,
        )

    def expert_weights(self, at: str) -> ExpertWeights:
        names = _experts_of(self.config)[1]
        return self.grouped(at + names.up, halves=True), self.grouped(at + names.down)

    def products(self, at: str, up: GroupedWeight, down: GroupedWeight) -> ExpertProducts:
        """Products of all experts of a layer, the fastest for the device."""
        experts = _experts_of(self.config)[0]
        clamp = None if experts.clamp is None else astuple(experts.clamp)
        # On a GPU these are views for rewriting; with mxfp4 they would be copies.
        some = range(0 if self.on_gpu and experts.mxfp4 else experts.num)
        linears = [(self.expert(up, i), self.expert(down, i)) for i in some]
        if self.quantised is None:
            self.note_experts(at, linears)
        if self.on_gpu:
            from onestem.ops.triton.experts import GroupedExperts
            from onestem.ops.triton.tiled_experts import TiledExperts

            if experts.mxfp4:
                return TiledExperts.of(up, down, clamp)
            gelu = self.config.mlp == "gelu_tanh_gated"
            return GroupedExperts(up, down, clamp, gelu=gelu)
        activation = expert_activation(self.config, resolve_layers(self.target.device))
        return SortedBlocks([Mlp(*pair) for pair in linears], activation, self.target.layout)

    def grouped(self, name: str, *, halves: bool = False) -> GroupedWeight:
        """A weight of all experts. `halves`: it has gate and up, which may alternate in files."""
        experts, names = _experts_of(self.config)
        if experts.mxfp4:
            values = self.source(f"{name}_blocks", torch.uint8).flatten(-2)
            scales = self.source(f"{name}_scales", torch.uint8)
            if self.on_gpu and (largest := int(scales.max())) > MAX_POWER:
                raise WeightsError(
                    f"{name}_scales has {largest}, limit on a GPU is {MAX_POWER} (weights of up to "
                    "12): use a CPU, or the model in 16 bits"
                )
        else:
            values, scales = _rows_first(self.source(name), names).contiguous(), None
        bias = self.source(f"{name}_bias") if experts.bias else None
        if halves and names.alternating:
            values = torch.cat(_halves(values, names), dim=1)
            scales = None if scales is None else torch.cat(_halves(scales, names), dim=1)
            bias = None if bias is None else torch.cat(_halves(bias, names), dim=1)
        return GroupedWeight(values, scales, bias)

    def note_experts(self, at: str, linears: Sequence[tuple[Linear, Linear]]) -> None:
        """Note the places of the tensors of single experts."""
        parts, names = _layer_parts(self.config, at), _experts_of(self.config)[1]
        of_up, of_down = parts[at + names.up], parts[at + names.down]
        for (up, down), up_names, down_names in zip(linears, of_up, of_down, strict=True):
            half = up.out_features // 2
            self.places.append(ProductPlace(up, tuple(up_names), (half, half)))
            self.places.append(ProductPlace(down, tuple(down_names)))

    def expert(self, weight: GroupedWeight, index: int) -> Linear:
        bias = None if weight.bias is None else weight.bias[index]
        return Linear(weight.dense(index, self.target.dtype), bias, self.target.layout)

    def qk_norms(self, at: str, layer: int) -> list[Tensor]:
        """Weights of a layer's norms over q and k, in the decoder's order of head dimensions."""
        order = rotary_order(self.config.heads[layer].head_dim, self.config.rotaries[layer])
        return [self.norm_weight(f"{at}{name}", order) for name in _qk_norm(self.config, layer)]

    def layer_norm(self, at: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(at + name)

    def norm(self, name: str) -> Norm:
        bias = self.tensor(f"{name}.bias") if self.config.norm_bias else None
        return Norm(self.norm_weight(name), bias)

    def norm_weight(self, name: str, order: list[int] | None = None) -> Tensor:
        """A norm's weight. The offset is added in float32: 16 bits would lose most of the stored
        value. `order`: of each head's dimensions."""
        offset = self.config.norm_offset

        def change(weight: Tensor) -> Tensor:
            weight = weight.float() + offset if offset else weight
            if order is None:
                return weight
            heads = weight.reshape(-1, len(order))
            return heads[:, torch.tensor(order, device=weight.device)].flatten()

        return self.tensor(f"{name}.weight", change=change)

    def tensor(
        self,
        name: str,
        as_dtype: torch.dtype | None = None,
        change: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> Tensor:
        """A tensor that is kept as it is, or as `change` returns it."""
        tensor = change(self.source(name, as_dtype))
        self.places.append(TensorPlace(name, tensor, as_dtype, change))
        return tensor

    def head(self, module: str, layout: Layout, bias: bool = False) -> Head:
        name = f"{module}.weight"
        head = Head(self.source(name), layout, self.tensor(bias_of(name)) if bias else None)
        self.places.append(ProductPlace(head, (name,)))
        return head

    def sharing(self, module: str) -> Ranks:
        """The ranks that have some of a module's columns each."""
        cut = self.cuts.get(f"{module}.weight")
        by_columns = cut is not None and cut.dim != int(self.names.transposed)
        return self.ranks if by_columns else ALONE

    def linear(
        self, at: str, modules: tuple[str, ...], bias: bool, order: list[int] | None = None
    ) -> Projection:
        """Projections of the same input, fused into one product; its rows in `order`."""
        ranks = self.sharing(at + modules[0])
        weights = [
            read_weight(self.config, self.source, at + name, self.quantization, ranks)
            for name in modules
        ]
        if self.quantization is not None:
            kept = (n for n, w in zip(modules, weights, strict=True) if isinstance(w, Tensor))
            self.kept.extend(f"{at}{name}" for name in kept)
        places = None if order is None else torch.tensor(order, device=self.target.device)
        joined = None
        if bias:
            joined = torch.cat([self.source(f"{at}{name}.bias") for name in modules])
            joined = joined if places is None else joined[places]
        linear = projection(weights, joined, places, self.target, ranks)
        if self.quantised is None:
            assert isinstance(linear, Linear)
            counts = tuple(len(weight) for weight in weights if isinstance(weight, Tensor))
            names = tuple(f"{at}{name}.weight" for name in modules)
            self.places.append(ProductPlace(linear, names, counts, order, self.names.transposed))
        return linear


def read_weight(
    config: ModelConfig,
    source: Source,
    module: str,
    quantization: Quantize | None,
    ranks: Ranks = ALONE,
) -> Weight:
    """The weight `[out_features, in_features]` of a linear layer, rounded if asked. `ranks`: each
    has some of the columns."""
    weight = source.weight(module)
    if not isinstance(weight, Tensor):
        return weight
    weight = weight.t().contiguous() if config.tensor_names.transposed else weight
    return weight if quantization is None else rounded_weight(weight, quantization, ranks)


def read_experts(
    config: ModelConfig, source: Source, layer: int, target: Target
) -> tuple[ExpertWeights, ExpertProducts]:
    """Weights of a layer's experts as they are held, and their products."""
    builder = _Builder(config, source, target, None, ALONE, {})
    at = config.tensor_names.layer.format(layer)
    weights = builder.expert_weights(at)
    return weights, builder.products(at, *weights)


def expert_activation(config: ModelConfig, ops: LayerOps) -> Activation:
    """The activation of a model's experts."""
    clamp = _experts_of(config)[0].clamp
    if clamp is None:
        return activation_of(config, ops)
    return Activation("clamped_swiglu", partial(clamped_swiglu, **vars(clamp)))


def qkv_order(config: ModelConfig, layer: int = 0) -> list[int] | None:
    """The row of a checkpoint's projection for each row of the decoder's; None: the same rows.

    The decoder has all q, all k, all v, and pairs half a head apart.
    """
    num_q, their = config.num_q_heads, config.heads[layer]
    num_kv, size = their.num_kv_heads, their.head_dim
    group = num_q // num_kv
    heads = list(range(num_q + 2 * num_kv))
    if config.tensor_names.grouped:
        line = group + 2
        heads = [h // group * line + h % group for h in range(num_q)]
        heads += [h * line + group + part for part in (0, 1) for h in range(num_kv)]
    plain = list(range(size))
    turned = rotary_order(size, config.rotaries[layer])
    num_k = num_kv if their.kv_layer is None else 0
    num_v = 0 if their.value_is_key else num_k
    within = [turned] * (num_q + num_k) + [plain] * num_v
    order = [h * size + i for h, places in zip(heads, within, strict=False) for i in places]
    return None if order == list(range(len(order))) else order


class _RandomSource:
    """A `Source` of random tensors."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.cuts = cuts
        self.spread, self.norm = config.initializer_range, 1 - config.norm_offset
        self.shapes, self.dtype, self.device, self.seed = shapes, dtype, device, seed

    def __call__(self, name: str, as_dtype: torch.dtype | None = None) -> Tensor:
        whole = self._whole(name, as_dtype)
        if name not in self.cuts:
            return whole
        part = self.cuts[name].of(whole)  # a view would hold all of it
        return part.clone(memory_format=torch.contiguous_format)

    def _whole(self, name: str, as_dtype: torch.dtype | None) -> Tensor:
        shape, kind = self.shapes[name], as_dtype or self.dtype
        if name.endswith("_scales"):
            # The root mean square of the values of random bits is 2.9.
            power = 127 + round(math.log2(self.spread / 2.9))
            return torch.full(shape, power, dtype=kind, device=self.device)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=kind, device=self.device)
        if len(shape) == 1:
            return torch.full(shape, self.norm, dtype=kind, device=self.device)
        generator = torch.Generator(self.device).manual_seed(_tensor_seed(self.seed, name))
        empty = torch.empty(shape, dtype=kind, device=self.device)
        if name.endswith("_blocks"):
            return empty.random_(0, 256, generator=generator)
        return empty.normal_(0.0, self.spread, generator=generator)

    def weight(self, module: str) -> Tensor:
        return self(f"{module}.weight")


def _tensor_seed(seed: int, name: str) -> int:
    """A seed of 32 bits: the CPU's generator ignores higher ones."""
    return zlib.crc32(f"{seed} {name}".encode())
