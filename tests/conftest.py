"""One thread: tiny models gain nothing from more, and barriers between threads cost milliseconds
on a machine that does something else as well."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
