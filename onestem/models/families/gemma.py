"""Gemma 2 (arXiv 2408.00118), and the text part of Gemma 3 (arXiv 2503.19786) and 4.

All have norms before and after attention and MLP, and windows in most layers. Gemma 2 has
softcaps, Gemma 3 one RoPE base for layers with a window and one for those without. In Gemma 4 heads
have two sizes. Its layers that see all use keys as values (26B-A4B, 31B); each layer has vectors of
tokens, and layers share keys and values (E2B, E4B); experts are beside the MLP (26B-A4B).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onestem.models.description import Description, Experts, LayerHeads, Rotary
from onestem.models.families.shared import (
    layer_windows,
    nested_rotary,
    rotary,
    rotary_by_window,
    text_fields,
    window_rotaries,
    windowed_kinds,
)
from onestem.models.fields import Fields, is_integer

_GEMMA4_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def read_gemma2(fields: Fields, architecture: str) -> Description:
    """Description of Gemma 2. It has softcaps unless the file says null."""
    base = _read(fields, architecture, vocab_size=256000, max_position_embeddings=8192, every=2)
    return replace(
        base,
        positions=rotary(fields, base.head_dim, base.max_position_embeddings),
        score_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields, architecture: str) -> Description:
    """Description of Gemma 3's text part: a RoPE for each kind of layer, and norms over heads."""
    fields = text_fields(fields)
    if fields.values.get("attn_logit_softcapping") is not None:
        # transformers reads this field and does not apply it.
        raise fields.unsupported("attn_logit_softcapping", "None, as in all of Gemma 3")
    if architecture == "Gemma3ForConditionalGeneration":  # nor this one in models that read images
        fields.refuse_others(final_logit_softcapping=None)
    every = fields.positive("sliding_window_pattern", 6)
    base = _read(
        fields, architecture, vocab_size=262208, max_position_embeddings=131072, every=every
    )
    full, windowed = window_rotaries(
        fields,
        base.head_dim,
        base.max_position_embeddings,
        theta=1e6,
        windowed_theta=fields.number("rope_local_base_freq", 10000.0),
    )
    return replace(
        base,
        positions=rotary_by_window(base.sliding_windows, full, windowed),
        logit_softcap=_softcap(fields, "final_logit_softcapping", None),
        qk_norm=True,
    )


def _common(
    fields: Fields,
    architecture: str,
    windows: tuple[int | None, ...],
    *,
    num_layers: int,
    vocab_size: int,
    max_position_embeddings: int,
) -> Description:
    """What Gemma 2, 3 and 4 have in common. Files leave out values that equal the defaults."""
    fields.refuse_others(hidden_activation="gelu_pytorch_tanh")
    hidden_size = fields.positive("hidden_size", 2304)
    head_dim = fields.positive("head_dim", 256)
    bias = fields.boolean("attention_bias", False)
    return Description(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size", 9216),
        num_layers=num_layers,
        num_q_heads=fields.positive("num_attention_heads", 8),
        num_kv_heads=fields.positive("num_key_value_heads", 4),
        head_dim=head_dim,
        positions=Rotary(head_dim),
        max_position_embeddings=fields.positive("max_position_embeddings", max_position_embeddings),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        mlp="gelu_tanh_gated",
        embedding_scale=hidden_size**0.5,
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=windows,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def _read(
    fields: Fields, architecture: str, *, vocab_size: int, max_position_embeddings: int, every: int
) -> Description:
    """Of Gemma 2 and 3. `every`: each `every`-th layer sees all, where the file does not say."""
    fields.refuse_others(use_bidirectional_attention=False)
    num_layers = fields.positive("num_hidden_layers", 26)
    window = fields.positive("sliding_window", 4096)
    of_all = _common(
        fields,
        architecture,
        layer_windows(fields, window, windowed_kinds(num_layers, every)),
        num_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(of_all, norm_offset=1.0, score_scale=scale)


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """A softcap: None where the file says null, `default` where it says nothing."""
    if name in fields.values and fields.values[name] is None:
        return None
    return default if name not in fields.values else fields.number(name)


def read_gemma4(fields: Fields, architecture: str) -> Description:
    """Description of Gemma 4's text part, with the defaults of transformers. `Unified` models have
    no experts and no vectors of tokens, and read images without an encoder."""
    fields = text_fields(fields)
    unified = "Unified" in architecture
    fields.refuse_others(rope_scaling=None)
    fields.one_of("use_bidirectional_attention", "vision")
    num_layers = fields.positive("num_hidden_layers", 30)
    windows = _gemma4_windows(fields, num_layers, 1024 if unified else 512)
    heads = _heads(fields, windows)
    shared = frozenset(i for i in range(num_layers) if heads[i].kv_layer is not None)
    base = _common(
        fields,
        architecture,
        windows,
        num_layers=num_layers,
        vocab_size=262144,
        max_position_embeddings=262144 if unified else 131072,
    )
    turns = _rotaries(fields, windows, heads, base.max_position_embeddings)
    return replace(
        base,
        positions=rotary_by_window(windows, *turns),
        score_scale=1.0,
        logit_softcap=_softcap(fields, "final_logit_softcapping", None),
        qk_norm=True,
        v_norm=True,
        layer_heads=heads,
        wide_mlps=shared if fields.boolean("use_double_wide_mlp", False) else frozenset(),
        token_vectors=0 if unified else _token_vectors(fields),
        experts=None if unified else _experts(fields, num_layers),
    )


def _gemma4_windows(fields: Fields, num_layers: int, window: int) -> tuple[int | None, ...]:
    """Windows by layer. The last layer sees all, whatever the file says."""
    window = fields.positive("sliding_window", window)
    windows = layer_windows(fields, window, windowed_kinds(num_layers, 6))
    if len(windows) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers}, one for each layer")
    return (*windows[:-1], None)


def _heads(fields: Fields, windows: tuple[int | None, ...]) -> tuple[LayerHeads, ...]:
    """Heads of each layer, from the makers' fields for layers that see all, or from those per layer
    that transformers writes."""
    keys_are_values = fields.boolean("attention_k_eq_v", False)
    sizes = _sizes(fields, windows, keys_are_values)
    shared = fields.optional_integer("num_kv_shared_layers") or 0
    own = len(windows) - shared
    if not 0 < own <= len(windows):
        raise fields.wrong("num_kv_shared_layers", f"0 to {len(windows) - 1}")
    last = {window: layer for layer, window in enumerate(windows[:own])}  # last layer with own keys
    if not set(windows) <= set(last):
        raise fields.wrong(
            "num_kv_shared_layers", "few enough that each of layer_types has keys of its own"
        )
    heads = []
    for layer, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        same = keys_are_values and window is None and layer < own
        read = last[window] if layer >= own else None
        heads.append(LayerHeads(*size, kv_layer=read, value_is_key=same))
    return tuple(heads)


def _sizes(
    fields: Fields, windows: tuple[int | None, ...], keys_are_values: bool
) -> list[tuple[int, int]]:
    """(KV heads, head size) of each layer."""
    common = fields.positive("num_key_value_heads", 4), fields.positive("head_dim", 256)
    if fields.values.get("per_layer_config") is None:
        count = fields.positive("num_global_key_value_heads", common[0])
        full = (count if keys_are_values else common[0], fields.positive("global_head_dim", 512))
        return [full if window is None else common for window in windows]
    sizes, where = [common] * len(windows), f"{fields.source}: per_layer_config"
    for key, value in fields.mapping("per_layer_config").items():
        if not (key.isdecimal() and int(key) < len(windows) and isinstance(value, dict)):
            raise fields.wrong("per_layer_config", "an object of objects by layer")
        one = Fields(value, f"{where}: {key}")
        known = ("head_dim", "num_key_value_heads")
        one.refuse_others(**{name: None for name in value if name not in known})
        sizes[int(key)] = (
            one.positive("num_key_value_heads", common[0]),
            one.positive("head_dim", common[1]),
        )
    return sizes


def _rotaries(
    fields: Fields,
    windows: tuple[int | None, ...],
    heads: tuple[LayerHeads, ...],
    max_positions: int,
) -> tuple[Rotary, Rotary]:
    """RoPE of layers that see all, and of those with a window."""
    given = fields
    if fields.values.get("rope_parameters") is None:
        given = Fields({**fields.values, "rope_parameters": _GEMMA4_ROPE}, fields.source)
    found = []
    for kind, windowed in (("full_attention", False), ("sliding_attention", True)):
        dims = {
            one.head_dim
            for one, window in zip(heads, windows, strict=True)
            if (window is not None) == windowed
        }
        if len(dims) > 1:
            raise fields.unsupported("per_layer_config", f"one head_dim in layers of {kind}")
        rotary = nested_rotary(given, kind, next(iter(dims), 2), max_positions)
        if rotary is None and dims:
            raise fields.wrong("rope_parameters", f"an object with {kind}")
        found.append(rotary or Rotary(2))
    return found[0], found[1]


def _token_vectors(fields: Fields) -> int:
    size: Any = fields.values.get("hidden_size_per_layer_input", 256) or 0
    if not is_integer(size) or size < 0:
        raise fields.wrong("hidden_size_per_layer_input", "an integer of at least 0")
    if size:
        vocab_size = fields.positive("vocab_size", 262144)
        if fields.positive("vocab_size_per_layer_input", 262144) != vocab_size:
            raise fields.unsupported("vocab_size_per_layer_input", f"vocab_size ({vocab_size})")
    return int(size)


def _experts(fields: Fields, num_layers: int) -> Experts | None:
    if not fields.boolean("enable_moe_block", False):
        return None
    return Experts(
        num=fields.positive("num_experts"),
        top_k=fields.positive("top_k_experts"),
        intermediate_size=fields.positive("moe_intermediate_size"),
        layers=(True,) * num_layers,
        beside_mlp=True,
        expert_scales=True,
    )
