"""Attention and fused layer operations in C++ for the CPU (`csrc/`)."""

from onestem.ops.cpu.attention import CpuAttention, CpuCost, takes_size
from onestem.ops.cpu.delta import CpuDelta
from onestem.ops.cpu.extension import DTYPES, chosen_isa, is_built, isas, native, status
from onestem.ops.cpu.layers import CpuLayers
from onestem.ops.cpu.linear import CpuCodes
from onestem.ops.cpu.sampling import CpuSampling
