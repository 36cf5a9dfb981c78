"""Attention over plans: tensors in, tensors out."""

from onestem.ops.dispatch import (
    AttentionImpl,
    PreparedAttention,
    attention,
    available,
    resolve,
    resolve_layers,
    resolve_sampling,
)
from onestem.ops.kv import allocate_pages, read_kv, slot_index, write_kv
from onestem.ops.layers import Angles, Heads, LayerOps, add_layer_norm
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.scores import Scores
from onestem.ops.state import State

__all__ = [
    "Angles",
    "AttentionImpl",
    "AttentionPlan",
    "Heads",
    "LayerOps",
    "PlanBuilder",
    "PreparedAttention",
    "Scores",
    "State",
    "add_layer_norm",
    "allocate_pages",
    "attention",
    "available",
    "read_kv",
    "resolve",
    "resolve_layers",
    "resolve_sampling",
    "slot_index",
    "windowed",
    "write_kv",
]
