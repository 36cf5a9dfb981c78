"""Attention and fused layer operations in C++ for the CPU (`csrc/`)."""

from onestem.ops.cpu.attention import CpuAttention, CpuCost
from onestem.ops.cpu.extension import chosen_isa, is_built, isas, native, status
from onestem.ops.cpu.layers import CpuLayers
from onestem.ops.cpu.sampling import CpuSampling

__all__ = [
    "CpuAttention",
    "CpuCost",
    "CpuLayers",
    "chosen_isa",
    "CpuSampling",
    "is_built",
    "isas",
    "native",
    "status",
]
