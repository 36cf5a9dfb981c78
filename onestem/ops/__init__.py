"""Attention over plans: tensors in, tensors out."""

from onestem.ops.dispatch import AttentionImpl, PreparedAttention, attention, available, resolve
from onestem.ops.kv import allocate_pages, read_kv, slot_index, write_kv
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.state import State, merge_states

__all__ = [
    "AttentionImpl",
    "AttentionPlan",
    "PlanBuilder",
    "PreparedAttention",
    "State",
    "allocate_pages",
    "attention",
    "available",
    "merge_states",
    "read_kv",
    "resolve",
    "slot_index",
    "windowed",
    "write_kv",
]
