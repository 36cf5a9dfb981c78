"""Fields that several families have: RoPE and activations."""

from __future__ import annotations

from typing import Literal

from onestem.models.description import RopeScaling, Rotary
from onestem.models.fields import Fields

__all__ = ["gelu", "rotary"]

_GELU: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def gelu(fields: Fields, name: str, default: str) -> Literal["gelu", "gelu_tanh"]:
    """The activation of an MLP without a gate."""
    value = fields.values.get(name)
    value = default if value is None else value
    if value not in _GELU:
        raise fields.unsupported(name, ", ".join(_GELU))
    return _GELU[value]


def rotary(
    fields: Fields,
    head_dim: int,
    max_position_embeddings: int,
    factor: float | None = None,
    *,
    theta: float = 10000.0,
) -> Rotary:
    """RoPE from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    `factor`: the share of a head's dimensions that turns where the file does not say; None: all
    turn, and a file that says otherwise is refused. `theta`: where the file does not say.
    """
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = Fields(fields.mapping(name), f"{fields.source}: {name}")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.unsupported(name, "one kind of RoPE for all layers")
    if factor is None:
        fields.refuse_others(partial_rotary_factor=1.0)
        rope.refuse_others(partial_rotary_factor=1.0)
        factor = 1.0
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", factor))
    if share > 1:
        raise fields.wrong("partial_rotary_factor", "at most 1")
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    trained = fields.optional_integer("original_max_position_embeddings")
    scaling = _rope_scaling(rope, trained or max_position_embeddings)
    return Rotary(int(head_dim * share), theta, scaling)


def _rope_scaling(rope: Fields, trained_positions: int) -> RopeScaling | None:
    # `type` is the name that files older than Llama 3.1 give it.
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.values.get(name, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return _llama3_scaling(rope, trained_positions)
    raise rope.unsupported(name, "default, linear, llama3")


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
