"""Attention over plans: tensors in, tensors out."""

from onestem.ops.delta import DeltaOps, PartRows
from onestem.ops.dispatch import (
    AttentionImpl,
    PreparedAttention,
    available,
    resolve,
    resolve_delta,
    resolve_layers,
    resolve_sampling,
)
from onestem.ops.kv import allocate_pages, read_kv, write_kv
from onestem.ops.layers import Angles, Heads, LayerOps, Queries, add_layer_norm
from onestem.ops.plan import AttentionPlan, PlanBuilder, windowed
from onestem.ops.scores import Scores
from onestem.ops.state import State
from onestem.ops.state_rows import StateRows
