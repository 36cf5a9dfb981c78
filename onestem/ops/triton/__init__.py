"""Attention over plans in Triton: one fused kernel and a merge, for any sharing.

Importing this needs Triton, and running it an NVIDIA GPU or `TRITON_INTERPRET=1`.
"""

from onestem.ops.triton.attention import TritonAttention
from onestem.ops.triton.config import KernelConfig, load_config
from onestem.ops.triton.launch import Kernels, States
from onestem.ops.triton.workspace import Workspace
