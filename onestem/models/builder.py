"""The parts of a decoder, made of the tensors that a source has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onestem.models.checkpoint import Source
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder, Layer, Norm, activation_of
from onestem.models.delta import DeltaLayer
from onestem.models.description import DeltaRule
from onestem.models.formats.experts import ExpertWeights, of_mxfp4
from onestem.models.formats.gpu_experts import gpu_experts
from onestem.models.formats.held import Groups, Pieces, Weight, rounded_weight
from onestem.models.formats.products import Target, all_take, packed_groups, projection
from onestem.models.formats.tables import PackedHead, PackedTable, rounded_head
from onestem.models.linear import Activation, Head, Layout, Linear, Projection
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
from onestem.models.names import RATES, Role, listed
from onestem.models.part import part_of
from onestem.models.places import Place, ProductPlace, TensorPlace
from onestem.models.ranks import ALONE, Ranks
from onestem.models.rope import rotary_order
from onestem.models.sizes import quantised_as, rounds_head
from onestem.models.tensors import ByRole, Kind, Tensors, TensorSpec
from onestem.models.vectors import LayerVectors, TokenVectors
from onestem.ops import Heads, LayerOps, resolve_delta, resolve_layers
from onestem.options import Quantize

log = logging.getLogger(__name__)


class Builder:
    """Makes the parts of a decoder, and notes where each tensor went.

    Attributes:
        config: of the rank's part.
        places: of the tensors that were read.
    """

    def __init__(
        self,
        tensors: Tensors,
        source: Source,
        target: Target,
        quantization: Quantize | None = None,
    ) -> None:
        """`quantization`: the format that weights of layers are rounded to.

        Raises:
            ConfigError: the model does not divide over the ranks.
        """
        self.tensors = tensors
        self.ranks = tensors.ranks
        self.config = part_of(tensors.config, tensors.ranks)
        self.source = source
        self.target = target
        self.quantization = quantization
        self.on_gpu = target.has_kernels
        self.quantised = quantised_as(tensors.config, quantization)
        self.places: list[Place] = []
        self.kept: list[str] = []  # modules that were not rounded

    def decoder(self) -> Decoder:
        """The whole decoder. Modules that `quantization` does not take are named in a warning."""
        model = self.tensors.model
        embedding = self.table(model[Role.EMBEDDING])
        layers = [self.layer(index) for index in range(self.config.num_layers)]
        vectors = self.token_vectors()
        products = [one for layer in layers for one in layer.linears]
        products += [] if vectors is None else [vectors.projection]
        head = self.output_head(embedding, amx=any(one.amx for one in products))
        if self.kept:
            log.warning(
                "%s does not take the widths of %d modules (%s): they stay as they are",
                self.quantization,
                len(self.kept),
                listed(self.kept),
            )
        return Decoder(
            self.tensors.config,
            embedding,
            layers,
            self.norm(model[Role.NORM]),
            head,
            self.tensors.num_parameters,
            positions=self.optional(model, Role.POSITIONS),
            vectors=vectors,
            places=self.places,
            ranks=self.ranks,
            quantised=self.quantised,
            ops=resolve_layers(self.target.device, deterministic=self.target.deterministic),
        )

    def table(self, spec: TensorSpec) -> Tensor | PackedTable:
        """A table, in its groups where it is stored so and rows can be looked up in them."""
        weight = self.packed(spec)
        return self.tensor(spec) if weight is None else PackedTable(weight, self.target)

    def packed(self, spec: TensorSpec) -> Groups | Pieces | None:
        """The groups of a table or head; None: it is kept in the model's dtype."""
        if self.on_gpu or not self.source.keeps(spec):
            return None
        weight = self.source.weight(spec)
        if isinstance(weight, Groups | Pieces) and PackedTable.takes(weight, self.target):
            return weight
        return None

    def output_head(self, embedding: Tensor | PackedTable, *, amx: bool) -> Head:
        """The head, of its own weight or of the embedding `[vocab_size, hidden_size]`; rounded
        where `rounds_head` says so. `amx`: of some product of this rank's (see `Projection`)."""
        model, layout = self.tensors.model, self.target.layout
        ours = layout is Layout.PACKED and self.config.experts is None  # routers are not rounded
        ours = ours and all_take(not amx, self.ranks, self.target.device)
        others = Layout.PLAIN if ours else layout
        bias = self.optional(model, Role.HEAD_BIAS)
        if Role.HEAD in model:
            if (own := self.packed(model[Role.HEAD])) is not None:
                return PackedHead(packed_groups(own), others, bias)
        elif isinstance(embedding, PackedTable):
            return PackedHead(embedding.packed, others, bias)
        weight = self.source(self.tensors.head) if Role.HEAD in model else embedding
        assert isinstance(weight, Tensor)
        if rounds_head(self.config, self.quantization, self.target):
            return rounded_head(weight, others, bias)
        head = Head(weight, layout, bias, deterministic=self.target.deterministic)
        self.places.append(ProductPlace(head, (self.tensors.head,)))
        return head

    def layer(self, index: int) -> Layer:
        """The layer `index`."""
        specs, rule = self.tensors.layers[index], self.config.has_state(index)
        has_mlp, has_experts = Role.DOWN in specs, Role.ROUTER in specs
        return Layer(
            input_norm=self.optional_norm(specs, Role.INPUT_NORM),
            **(delta_parts(self, specs) if rule else self.attention(index, specs)),
            post_norm=self.optional_norm(specs, Role.POST_NORM),
            mlp=self.mlp(specs, Role.GATE, Role.UP, Role.DOWN) if has_mlp else self.experts(specs),
            output_norm=self.optional_norm(specs, Role.OUTPUT_NORM),
            down_norm=self.optional_norm(specs, Role.DOWN_NORM),
            beside=self.beside(specs) if has_experts and has_mlp else None,
            vectors=self.layer_vectors(specs),
            scalar=self.optional(specs, Role.SCALAR),
        )

    def attention(self, index: int, specs: ByRole) -> dict[str, Any]:
        """A layer's parts for attention: rows of q, k and v, and norms over heads, in the decoder's
        order."""
        config, heads = self.config, self.config.heads[index]
        turned = rotary_order(heads.head_dim, config.rotaries[index])
        norms = [
            self.norm_weight(specs[role], turned)
            for role in (Role.Q_NORM, Role.K_NORM)
            if role in specs
        ]
        q_norm, k_norm = (None, None) if config.qk_norm_of_all else (*norms, None, None)[:2]
        qkv = (Role.QKV, Role.Q, Role.K, Role.V)
        return {
            "qkv": self.linear(specs, *qkv, order=qkv_order(config, index)),
            "heads": Heads(
                num_q_heads=config.num_q_heads,
                num_kv_heads=heads.num_kv_heads if heads.kv_layer is None else 0,
                head_dim=heads.head_dim,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=config.norm_eps,
                sinks=self.optional(specs, Role.SINKS),
                v_norm=config.v_norm,
                value_is_key=heads.value_is_key,
            ),
            "output": self.linear(specs, Role.OUTPUT),
            "qk_norms": (norms[0], norms[1]) if config.qk_norm_of_all else None,
        }

    def token_vectors(self) -> TokenVectors | None:
        """Vectors of tokens; None: the model has none."""
        model = self.tensors.model
        if Role.TOKEN_VECTORS not in model:
            return None
        width = self.config.token_vectors
        return TokenVectors(
            table=self.tensor(model[Role.TOKEN_VECTORS]),
            projection=self.linear(model, Role.VECTORS_PROJECTION),
            norm=self.norm_weight(model[Role.VECTORS_NORM]),
            eps=self.config.norm_eps,
            scale=torch.tensor(width**0.5, dtype=self.target.dtype).item(),
            ranks=self.ranks,
        )

    def layer_vectors(self, specs: ByRole) -> LayerVectors | None:
        """A layer's use of vectors of tokens; None: it has none."""
        if Role.VECTORS_GATE not in specs:
            return None
        return LayerVectors(
            gate=self.linear(specs, Role.VECTORS_GATE),
            output=self.linear(specs, Role.VECTORS_OUTPUT),
            norm=self.norm_weight(specs[Role.VECTORS_OUTPUT_NORM]),
        )

    def mlp(self, specs: ByRole, gate: Role, up: Role, down: Role) -> Mlp:
        """An MLP of the tensors with these roles; it may have no gate."""
        return Mlp(self.linear(specs, gate, up), self.linear(specs, down))

    def beside(self, specs: ByRole) -> ExpertsBeside:
        """Experts beside the MLP of a layer."""
        root = self.config.hidden_size**-0.5
        return ExpertsBeside(
            experts=self.experts(specs),
            router_norm=self.tensor(specs[Role.ROUTER_SCALE], lambda x: x * root),
            input_norm=self.norm_weight(specs[Role.EXPERTS_INPUT_NORM]),
            output_norm=self.norm_weight(specs[Role.EXPERTS_OUTPUT_NORM]),
            mlp_norm=self.norm_weight(specs[Role.MLP_NORM]),
        )

    def experts(self, specs: ByRole) -> ExpertLayer:
        """Experts of a layer, with their router and what every row takes beside them."""
        experts = self.config.experts
        assert experts is not None
        shared = shared_gate = None
        if Role.SHARED_DOWN in specs:
            shared = self.mlp(specs, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN)
        if Role.SHARED_FACTOR in specs:
            shared_gate = self.head(specs[Role.SHARED_FACTOR], Layout.PLAIN)
        return ExpertLayer(
            experts=experts,
            router=self.head(specs[Role.ROUTER], self.target.layout),
            correction=self.optional(specs, Role.CORRECTION),
            products=self.products(specs, *self.expert_weights(specs)),
            shared=shared,
            shared_gate=shared_gate,
            route=route_on_gpu if self.on_gpu else route,
            expert_scales=self.optional(specs, Role.EXPERT_SCALES),
        )

    def expert_weights(self, specs: ByRole) -> tuple[ExpertWeights, ExpertWeights]:
        """Weights of a layer's experts: gate and up, and down."""
        return self.of_experts(specs[Role.EXPERTS_UP]), self.of_experts(specs[Role.EXPERTS_DOWN])

    def of_experts(self, spec: TensorSpec) -> ExpertWeights:
        """A weight of all experts. Those that files hold one by one are rounded as they are
        read."""
        alternates = spec.role is Role.EXPERTS_UP and self.tensors.alternates

        def gate_first(values: Tensor) -> Tensor:
            return torch.cat(self.tensors.halves(values), dim=1) if alternates else values

        bias = None if spec.bias is None else gate_first(self.source(spec.bias))
        if spec.scales is not None:
            held = [gate_first(self.source(one, torch.uint8)) for one in (spec, spec.scales)]
            pairs = zip(held[0].flatten(-2), held[1], strict=True)
            return ExpertWeights.of(spec.scales.name, [[of_mxfp4(*pair)] for pair in pairs], bias)
        ranks = self.ranks if spec.role is Role.EXPERTS_DOWN else ALONE
        singles = self.source.singles(spec)
        if singles is not None:
            each = [[self.weight(one, ranks) for one in expert] for expert in singles]
            return ExpertWeights.of(spec.name, each, bias)
        whole = gate_first(spec.rows_first(self.source(spec)).contiguous())
        form = self.quantization
        if form is None:
            return ExpertWeights.of_whole(spec.name, whole, bias)
        rounded = [[rounded_weight(one, form, ranks)] for one in whole]
        self.kept += [spec.name] * isinstance(rounded[0][0], Tensor)
        return ExpertWeights.of(spec.name, rounded, bias)

    def products(self, specs: ByRole, up: ExpertWeights, down: ExpertWeights) -> ExpertProducts:
        """Products of all experts of a layer, the fastest for the device."""
        config, experts, target = self.config, self.config.experts, self.target
        assert experts is not None
        made = None
        if self.on_gpu:
            clamp = None if experts.clamp is None else astuple(experts.clamp)
            made = gpu_experts(up, down, target, clamp, gelu=config.mlp == "gelu_tanh_gated")
        pairs = []
        if made is None or self.quantised is None:  # on a GPU these are views for rewriting
            pairs = [
                (self.expert(up, one, ALONE), self.expert(down, one, self.ranks))
                for one in range(experts.num)
            ]
        if self.quantised is None:
            self.note_experts(specs, pairs)
        if made is not None:
            return made
        activation = expert_activation(config, resolve_layers(target.device))
        # Only products of 16 bits are better with more rows.
        layout = target.layout if isinstance(pairs[0][0], Linear) else Layout.PLAIN
        return SortedBlocks([Mlp(*pair) for pair in pairs], activation, layout)

    def expert(self, weights: ExpertWeights, index: int, ranks: Ranks) -> Projection:
        """One expert's product. If it is not quantised, its weight is a view of all experts'."""
        return projection(weights.each[index], weights.bias_of(index), None, self.target, ranks)

    def note_experts(
        self, specs: ByRole, products: Sequence[tuple[Projection, Projection]]
    ) -> None:
        """Note the places of the tensors of single experts."""
        wholes = (specs[Role.EXPERTS_UP], specs[Role.EXPERTS_DOWN])
        ups, downs = map(self.tensors.singles, wholes)
        for (up, down), of_up, of_down in zip(products, ups, downs, strict=True):
            assert isinstance(up, Linear)
            assert isinstance(down, Linear)
            half = up.out_features // 2
            self.places.append(ProductPlace(up, of_up, (half, half)))
            self.places.append(ProductPlace(down, of_down))

    def optional_norm(self, specs: ByRole, role: Role) -> Norm | None:
        """The norm of a role; None: it is not there."""
        return self.norm(specs[role]) if role in specs else None

    def norm(self, spec: TensorSpec) -> Norm:
        """A norm, with its bias if it has one."""
        bias = None if spec.bias is None else self.tensor(spec.bias)
        return Norm(self.norm_weight(spec), bias)

    def norm_weight(self, spec: TensorSpec, order: list[int] | None = None) -> Tensor:
        """A norm's weight. The offset is added in float32: 16 bits would lose most of the stored
        value. `order`: of each head's dimensions."""
        offset = self.config.norm_offset

        def change(weight: Tensor) -> Tensor:
            weight = weight.float() + offset if offset else weight
            if order is None:
                return weight
            heads = weight.reshape(-1, len(order))
            return heads[:, torch.tensor(order, device=weight.device)].flatten()

        return self.tensor(spec, change)

    def optional(self, specs: ByRole, role: Role) -> Tensor | None:
        """The tensor of a role; None: it is not there."""
        return self.tensor(specs[role]) if role in specs else None

    def tensor(
        self, spec: TensorSpec, change: Callable[[Tensor], Tensor] = lambda values: values
    ) -> Tensor:
        """A tensor that is kept as it is, or as `change` returns it."""
        as_dtype = torch.float32 if spec.kind is Kind.VECTOR else None
        tensor = change(self.source(spec, as_dtype))
        self.places.append(TensorPlace(spec, tensor, as_dtype, change))
        return tensor

    def head(self, spec: TensorSpec, layout: Layout) -> Head:
        """A product in float32, with its bias if it has one."""
        weight = self.source(spec)
        bias = None if spec.bias is None else self.tensor(spec.bias)
        head = Head(weight, layout, bias)
        self.places.append(ProductPlace(head, (spec,)))
        return head

    def linear(self, specs: ByRole, *roles: Role, order: list[int] | None = None) -> Projection:
        """Projections of the same input, those that are there, fused into one product; its rows in
        `order`."""
        parts = [specs[role] for role in roles if role in specs]
        ranks = self.ranks if parts[0].shares_inputs else ALONE
        weights = [self.weight(one, ranks) for one in parts]
        rows = None if order is None else torch.tensor(order, device=self.target.device)
        joined = None
        biases = [one.bias for one in parts if one.bias is not None]
        if biases:
            joined = torch.cat([self.source(bias) for bias in biases])
            joined = joined if rows is None else joined[rows]
        linear = projection(weights, joined, rows, self.target, ranks)
        if self.quantised is None:
            assert isinstance(linear, Linear)
            counts = tuple(len(weight) for weight in weights if isinstance(weight, Tensor))
            self.places.append(ProductPlace(linear, tuple(parts), counts, order))
        return linear

    def weight(self, spec: TensorSpec, ranks: Ranks) -> Weight:
        """See `read_weight`; notes what is not rounded."""
        form = None if spec.role in RATES else self.quantization
        weight = read_weight(self.source, spec, form, ranks)
        if form is not None and isinstance(weight, Tensor):
            self.kept.append(str(spec.module))
        return weight


def read_weight(
    source: Source, spec: TensorSpec, quantization: Quantize | None, ranks: Ranks = ALONE
) -> Weight:
    """The weight `[out_features, in_features]` of a linear layer, rounded if asked. `ranks`: each
    has some of the columns."""
    weight = source.weight(spec)
    if not isinstance(weight, Tensor):
        return weight
    weight = spec.rows_first(weight).contiguous()
    return weight if quantization is None else rounded_weight(weight, quantization, ranks)


def expert_activation(config: ModelConfig, ops: LayerOps) -> Activation:
    """The activation of a model's experts."""
    assert config.experts is not None
    clamp = config.experts.clamp
    if clamp is None:
        return activation_of(config, ops)
    return Activation("clamped_swiglu", partial(clamped_swiglu, **vars(clamp)))


def qkv_order(config: ModelConfig, layer: int = 0) -> list[int] | None:
    """The row of a checkpoint's projection for each row of the decoder's; None: the same rows.

    The decoder has all q, all k, all v, then the gate of attention's result, and pairs half a head
    apart.
    """
    num_q, their = config.num_q_heads, config.heads[layer]
    num_kv, size = their.num_kv_heads, their.head_dim
    group = num_q // num_kv
    heads, gates = list(range(num_q + 2 * num_kv)), list[int]()
    if config.output_gate:  # behind each query head
        heads = [*range(0, 2 * num_q, 2), *range(2 * num_q, 2 * (num_q + num_kv))]
        gates = [(2 * h + 1) * size + i for h in range(num_q) for i in range(size)]
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
    order += gates
    return None if order == list(range(len(order))) else order


def delta_parts(builder: Builder, specs: ByRole) -> dict[str, Any]:
    """A layer's parts for the delta rule: rows in the order q, k, v, z, and b, a."""
    rule = builder.config.delta
    assert rule is not None
    fused = Role.DELTA_QKVZ in specs
    products, rates = delta_orders(rule) if fused else (None, None)
    projected = (Role.DELTA_QKVZ, Role.DELTA_QKV, Role.DELTA_Z)
    return {
        "qkv": builder.linear(specs, *projected, order=products),
        "heads": None,
        "output": builder.linear(specs, Role.DELTA_OUTPUT),
        "delta": DeltaLayer(
            rule=rule,
            rates=builder.linear(specs, Role.DELTA_BA, Role.DELTA_B, Role.DELTA_A, order=rates),
            filter=builder.tensor(specs[Role.DELTA_FILTER], taps_first),
            decay=builder.tensor(specs[Role.DELTA_DECAY]),
            step=builder.tensor(specs[Role.DELTA_STEP]),
            norm=builder.tensor(specs[Role.DELTA_NORM]),
            eps=builder.config.norm_eps,
            ops=resolve_delta(builder.target.device, deterministic=builder.target.deterministic),
        ),
    }


def taps_first(weight: Tensor) -> Tensor:
    """A convolution's weight `[channels, 1, width]` as `[channels, width]`, with a place's weights
    of all channels next to each other in memory, as kernels read them."""
    return weight.squeeze(1).t().contiguous().t()


def delta_orders(rule: DeltaRule) -> tuple[list[int], list[int]]:
    """The rows of fused projections of the delta rule for each row of the decoder's: q, k, v, z,
    and b, a. Files have them by key head: its q and k, its value heads' v and z, or b and a."""
    keys, group = range(rule.num_key_heads), rule.num_value_heads // rule.num_key_heads
    values = group * rule.value_dim
    counts = (rule.key_dim, rule.key_dim, values, values)
    line, order, first = sum(counts), list[int](), 0
    for count in counts:
        order += [head * line + first + i for head in keys for i in range(count)]
        first += count
    rates = [
        head * 2 * group + part * group + i
        for part in (0, 1)
        for head in keys
        for i in range(group)
    ]
    return order, rates
