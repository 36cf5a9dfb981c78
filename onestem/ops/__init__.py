"""Attention over plans: tensors in, tensors out."""

from onestem.ops.delta import DeltaOps, PartRows
from onestem.ops.dispatch import (
    AttentionImpl,
    PreparedAttention,
    attention,
    available,
    resolve,
    resolve_delta,
    resolve_layers,
    resolve_sampling,
)
from onestem.ops.kv import allocate_pages, read_kv, slot_index, write_kv
from onestem.ops.layers import Angles, Heads, LayerOps, add_layer_norm
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.scores import Scores
from onestem.ops.state import State
from onestem.ops.state_rows import StateRows

__all__ = [
    "Angles",
    "AttentionImpl",
    "AttentionPlan",
    "DeltaOps",
    "Heads",
    "LayerOps",
    "PartRows",
    "PlanBuilder",
    "PreparedAttention",
    "Scores",
    "State",
    "StateRows",
    "add_layer_norm",
    "allocate_pages",
    "attention",
    "available",
    "read_kv",
    "resolve",
    "resolve_delta",
    "resolve_layers",
    "resolve_sampling",
    "slot_index",
    "windowed",
    "write_kv",
]
