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
from onestem.ops.layers import Angles, Heads, LayerOps, TorchLayers, add_layer_norm
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.state import State, merge_states

__all__ = [
    "Angles",
    "AttentionImpl",
    "AttentionPlan",
    "Heads",
    "LayerOps",
    "PlanBuilder",
    "PreparedAttention",
    "State",
    "TorchLayers",
    "add_layer_norm",
    "allocate_pages",
    "attention",
    "available",
    "merge_states",
    "read_kv",
    "resolve",
    "resolve_layers",
    "resolve_sampling",
    "slot_index",
    "windowed",
    "write_kv",
]
