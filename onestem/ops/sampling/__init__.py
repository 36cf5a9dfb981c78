"""Sampling: tokens, log-probabilities and penalties, on the logits' device.

The draw is an exponential race (docs/sampling.md). It needs no order of the vocabulary and no sums,
so its cost does not depend on the distribution, and equal logits give the same token in any batch.
"""

from onestem.ops.sampling.rows import (
    IDLE,
    ROW,
    STATUS_MASKED,
    STATUS_NOT_FINITE,
    STATUS_OK,
    RowTable,
)
from onestem.ops.sampling.torch_impl import Drawn, Penalties, Sampling, processed
