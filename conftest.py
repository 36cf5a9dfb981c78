"""One thread: tiny models gain nothing from more, and barriers between threads cost milliseconds
on a machine that does something else as well.

Without a GPU, Triton's kernels run under its interpreter, which must be chosen before anything
imports Triton.
"""

from __future__ import annotations

import os
import signal

import torch

# A shell's background jobs ignore Ctrl-C from their start, and what they start does too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
