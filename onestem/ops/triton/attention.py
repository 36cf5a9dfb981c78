"""`TritonAttention`: the Triton kernels with the interface of `ops.dispatch`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from onestem.ops.copies import on_device
from onestem.ops.kv import page_parts, page_strides
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.state import State
from onestem.ops.triton.config import KernelConfig
from onestem.ops.triton.launch import Kernels, States
from onestem.ops.work.lists import KeptChoice

LINE_BYTES = 128  # read from a GPU's memory at a time


@dataclass(frozen=True)
class TritonAttention:
    """Triton implementation of `AttentionImpl`. `config` replaces the device's own. Plans that are
    prepared one after the other are steps of one engine: similar ones keep a `Choice`."""

    name: str = "triton"
    config: KernelConfig | None = None
    deterministic: bool = False
    takes_parts = True
    choices: defaultdict[tuple[object, ...], KeptChoice] = field(
        default_factory=lambda: defaultdict(KeptChoice), init=False, compare=False, repr=False
    )

    def head_major(self, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether a token's head is not whole lines of memory: a line would then hold parts of two
        heads, and the programs of both would read it."""
        return head_dim * dtype.itemsize % LINE_BYTES != 0

    def prepare(self, plan: AttentionPlan, *, share: bool = True) -> PreparedTriton:
        return PreparedTriton(plan, share, self)


class PreparedTriton:
    """A plan. Its work list is made at the first layer, when the heads are known, and serves all
    layers. One object must not run on two streams at a time: its layers share partial states."""

    def __init__(self, plan: AttentionPlan, share: bool, impl: TritonAttention) -> None:
        self.plan = plan
        self.share = share
        self.impl = impl
        self._ready: dict[tuple[object, ...], Callable[..., None]] = {}

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scores: Scores = PLAIN) -> State:
        """See `PreparedAttention`."""
        page_strides(k_pages, v_pages)  # one of the two layouts
        k_pages, v_pages = page_parts(k_pages, v_pages, self.plan.page_size)
        scores.check(q)
        key = (q.device, q.dtype, q.shape[1:], k_pages.shape[2])
        if key not in self._ready:
            choice = self.impl.choices[(*key, self.plan.window)]
            self._ready[key] = self._make(q, k_pages.shape[2], choice)
        out = torch.empty(self.plan.num_rows, *q.shape[1:], dtype=q.dtype, device=q.device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        self._ready[key](q.contiguous(), k_pages, v_pages, out, lse, scores)
        return State(out, lse)

    def _make(self, q: Tensor, num_kv_heads: int, choice: KeptChoice) -> Callable[..., None]:
        """The launch of the plan's list."""
        kernels = Kernels.make(
            num_q_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=q.shape[2],
            page_size=self.plan.page_size,
            dtype=q.dtype,
            device=q.device,
            windowed=self.plan.window is not None,
            config=self.impl.config,
            deterministic=self.impl.deterministic,
        )
        work = kernels.listed(self.plan, choice, share=self.share)
        words = np.zeros(work.num_words, np.int32)
        work.pack(words)
        states = States.empty(max(1, work.num_states), q.shape[1], q.shape[2], q.device)
        return partial(
            kernels.launch,
            on_device(words, q.device),
            states,
            num_merges=len(work.merges),
            wide=work.num_wide > 0,
        )
