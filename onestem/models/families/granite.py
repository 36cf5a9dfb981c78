"""Granite 3 and 4 without experts: as Llama, with multipliers of embeddings, scores, logits and of
what a layer adds."""

from __future__ import annotations

from dataclasses import replace

from onestem.models.description import Description
from onestem.models.families import llama
from onestem.models.fields import Fields

__all__ = ["read"]


def read(fields: Fields, architecture: str) -> Description:
    """Description of Granite: as Llama, with four factors."""
    bias = fields.boolean("attention_bias", False)
    return replace(
        llama.plain(fields, architecture),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        score_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
