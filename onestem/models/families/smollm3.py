"""SmolLM3: as Llama, with some layers without RoPE."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description, LayerRotary
from onestem.models.families import llama
from onestem.models.families.shared import layer_windows
from onestem.models.fields import Fields

__all__ = ["read"]


def read(fields: Fields, architecture: str) -> Description:
    """`no_rope_layers` has 1 for each layer with RoPE."""
    common = llama.plain(fields, architecture, theta=2e6, tied=True)
    turns = _turns(fields, common.num_layers)
    bias = fields.boolean("attention_bias", False)
    return replace(
        common,
        positions=LayerRotary(tuple(common.rotaries[0] if turn else None for turn in turns)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_windows=_windows(fields, turns),
    )


def _turns(fields: Fields, num_layers: int) -> list[int]:
    given = fields.values.get("no_rope_layers")
    if given is None:
        every = fields.positive("no_rope_layer_interval", 4)
        return [int((layer + 1) % every != 0) for layer in range(num_layers)]
    right = isinstance(given, list) and all(turn in (0, 1) for turn in given)
    if not right or len(given) != num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} numbers, 0 or 1")
    return given


def _windows(fields: Fields, turns: list[int]) -> tuple[int | None, ...]:
    """Windows, if asked for: in layers without RoPE, unless the file says which."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * len(turns)
    window = fields.optional_integer("sliding_window")
    kinds = ["sliding_attention" if window and not turn else "full_attention" for turn in turns]
    return layer_windows(fields, window, kinds)
