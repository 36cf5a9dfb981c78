"""Fields that several families have: sizes, RoPE, windows, activations, and the text part of image
models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from onestem.models.description import (
    LayerRotary,
    LongRope,
    Proportional,
    RopeScaling,
    Rotary,
    Yarn,
)
from onestem.models.fields import Fields

_GELU: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def sizes(
    fields: Fields,
    architecture: str,
    *,
    tied: bool,
    names: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Arguments of a `Description` that nearly all families read alike, without windows.

    Args:
        tied: where the file does not say whether head and embedding are one.
        names: what the family calls the hidden size, the number of layers and that of heads.
        head_dim: None: the hidden size divided by the heads.
    """
    hidden, layers, heads = names
    num_layers = fields.positive(layers)
    return {
        "architecture": architecture,
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": fields.positive(hidden),
        "num_layers": num_layers,
        "num_q_heads": fields.positive(heads),
        "head_dim": fields.head_dim(hidden, heads) if head_dim is None else head_dim,
        "tie_embeddings": fields.boolean("tie_word_embeddings", tied),
        "sliding_windows": (None,) * num_layers,
        "initializer_range": fields.number("initializer_range", 0.02),
    }


def gelu(fields: Fields, name: str, default: str) -> Literal["gelu", "gelu_tanh"]:
    """The activation of an MLP without a gate."""
    return _GELU[fields.one_of(name, *_GELU, default=default)]


def rotary(
    fields: Fields,
    head_dim: int,
    max_position_embeddings: int,
    factor: float | None = None,
    theta: float = 10000.0,
) -> Rotary:
    """RoPE from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    `factor` and `theta` are defaults for files that do not say. `factor`: the share of a head's
    dimensions that turns; None: all turn, and a file that says otherwise is refused.
    """
    _refuse_both(fields)
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = fields.within(name)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.unsupported(name, "one kind of RoPE for all layers")
    return _rotary(fields, rope, head_dim, max_position_embeddings, factor, theta)


def window_rotaries(
    fields: Fields,
    head_dim: int,
    max_position_embeddings: int,
    *,
    theta: float,
    windowed_theta: float | None = None,
) -> tuple[Rotary, Rotary]:
    """RoPE of layers that see all, and of those with a window.

    It is read from `rope_parameters` for each kind, or from the older fields, whose scaling is for
    layers that see all. `theta` is the default; `windowed_theta` is for layers with a window in
    older files; None: the same.
    """
    _refuse_both(fields)
    new = fields.mapping("rope_parameters")
    if new and not any(isinstance(value, dict) for value in new.values()):
        raise fields.unsupported("rope_parameters", "an object for each kind of layers")
    full = nested_rotary(fields, "full_attention", head_dim, max_position_embeddings)
    windowed = nested_rotary(fields, "sliding_attention", head_dim, max_position_embeddings)
    if full is not None and windowed is not None:
        return full, windowed
    full = rotary(fields, head_dim, max_position_embeddings, theta=theta)
    return full, Rotary(head_dim, windowed_theta or full.theta)


def _refuse_both(fields: Fields) -> None:
    """Refuse new and old fields together: only one of the two could be used."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if new and old and new != old:
        raise fields.unsupported("rope_scaling", "none beside rope_parameters: put it in there")


def rotary_by_window(windows: Sequence[int | None], full: Rotary, windowed: Rotary) -> LayerRotary:
    """`windowed` in layers that have a window, `full` in the others."""
    return LayerRotary(tuple(full if window is None else windowed for window in windows))


def nested_rotary(
    fields: Fields, kind: str, head_dim: int, max_position_embeddings: int
) -> Rotary | None:
    """RoPE of one kind of layers (`full_attention`), where `rope_parameters` is given by kind."""
    rope = fields.mapping("rope_parameters").get(kind)
    if not isinstance(rope, dict):
        return None
    rope = Fields(rope, f"{fields.source}: rope_parameters: {kind}")
    if rope.values.get("rope_theta") is None:
        raise rope.wrong("rope_theta", "a positive number")
    if rope.values.get("rope_type") == "proportional":
        return _proportional(rope, head_dim)
    return _rotary(fields, rope, head_dim, max_position_embeddings, None, 10000.0)


def _rotary(
    fields: Fields,
    rope: Fields,
    head_dim: int,
    max_position_embeddings: int,
    factor: float | None,
    theta: float,
) -> Rotary:
    if factor is None:
        fields.refuse_others(partial_rotary_factor=1.0)
        rope.refuse_others(partial_rotary_factor=1.0)
        factor = 1.0
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", factor))
    if share > 1:
        raise fields.wrong("partial_rotary_factor", "at most 1")
    owner = fields if rope.values.get("rope_theta") is None else rope
    scaling = _rope_scaling(rope, _trained_positions(fields, rope, max_position_embeddings), fields)
    return Rotary(int(head_dim * share), _theta(owner, theta), scaling)


def _proportional(rope: Fields, head_dim: int) -> Rotary:
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise rope.wrong("partial_rotary_factor", "at most 1")
    turned = Proportional(int(share * head_dim // 2), rope.number("factor", 1.0))
    return Rotary(head_dim, _theta(rope, 10000.0), turned)


def _theta(owner: Fields, default: float) -> float:
    theta = owner.number("rope_theta", default)
    if theta <= 1:
        raise owner.wrong("rope_theta", "more than 1")
    return theta


def _trained_positions(fields: Fields, rope: Fields, max_position_embeddings: int) -> int:
    """Positions before scaling. Phi-3 gives them outside of `rope_scaling`, which counts first."""
    name = "original_max_position_embeddings"
    given = fields if fields.values.get(name) is not None else rope
    return given.positive(name, max_position_embeddings)


def _rope_scaling(
    rope: Fields, trained_positions: int, fields: Fields
) -> RopeScaling | Yarn | LongRope | None:
    # `type` is the name that files older than Llama 3.1 give it.
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.values.get(name, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return _llama3_scaling(rope, trained_positions)
    stretch = fields.positive("max_position_embeddings", trained_positions) / trained_positions
    if kind == "yarn":
        return _yarn(rope, trained_positions, stretch)
    if kind in ("longrope", "su"):  # `su` in the first files of Phi-3
        return _longrope(rope, trained_positions, stretch)
    raise rope.unsupported(
        name,
        "default, linear, llama3, yarn, longrope (where angles depend on the prompt's length, as "
        "with dynamic, its KV could not be shared)",
    )


def _yarn(rope: Fields, trained_positions: int, stretch: float) -> Yarn:
    factor = rope.number("factor", stretch)
    mscale, of_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    inferred = _yarn_factor(factor)
    if mscale and of_all:
        inferred = _yarn_factor(factor, mscale) / _yarn_factor(factor, of_all)
    yarn = Yarn(
        factor=factor,
        original_max_position_embeddings=trained_positions,
        attention_factor=rope.number("attention_factor", inferred),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", "truncate" not in rope.values),
    )
    if yarn.beta_fast <= yarn.beta_slow:
        raise rope.wrong("beta_fast", f"more than beta_slow ({yarn.beta_slow})")
    return yarn


def _yarn_factor(factor: float, scale: float = 1.0) -> float:
    """arXiv 2309.00071, eq. 22."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Fields, trained_positions: int, stretch: float) -> LongRope:
    factor = rope.optional_number("attention_factor")
    if factor is None and rope.number("factor", stretch) > 1:
        if trained_positions == 1:
            raise rope.wrong("original_max_position_embeddings", "at least 2")
        logs = math.log(rope.number("factor", stretch)) / math.log(trained_positions)
        factor = math.sqrt(1 + logs)
    return LongRope(
        short=rope.positive_numbers("short_factor"),
        long=rope.positive_numbers("long_factor"),
        original_max_position_embeddings=trained_positions,
        attention_factor=1.0 if factor is None else factor,
    )


def _llama3_scaling(rope: Fields, trained_positions: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.positive(
            "original_max_position_embeddings", trained_positions
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        low = scaling.low_freq_factor
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({low})")
    return scaling


def windowed_kinds(num_layers: int, every: int) -> list[str]:
    """`layer_types` with a window in all layers except each `every`-th."""
    kinds = ["sliding_attention"] * num_layers
    kinds[every - 1 :: every] = ["full_attention"] * (num_layers // every)
    return kinds


def layer_windows(
    fields: Fields, window: int | None, default: Sequence[str]
) -> tuple[int | None, ...]:
    """Each layer's window by `layer_types`; `default` is used where the file lacks them."""
    types = fields.values.get("layer_types")
    types = list(default) if types is None else types
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or not all(kind in kinds for kind in types):
        raise fields.unsupported("layer_types", f"a list of {' and '.join(kinds)}")
    if window is None and "sliding_attention" in types:
        raise fields.wrong("sliding_window", "a positive integer, as layer_types needs it")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def text_fields(fields: Fields) -> Fields:
    """Fields of the text part, for a model that also reads images; else the fields themselves."""
    return fields.within("text_config") if "text_config" in fields.values else fields
