"""One thread: tiny models gain nothing from more, and barriers between threads cost milliseconds
on a machine that does something else as well.

Without a GPU, Triton's kernels run under its interpreter, which must be chosen before anything
imports Triton.
"""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
