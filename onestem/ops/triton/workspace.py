"""`Workspace`: the Triton kernels over fixed buffers, so that a CUDA graph can replay them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.copies import HostWords
from onestem.ops.plan import AttentionPlan
from onestem.ops.scores import PLAIN, Scores
from onestem.ops.triton.launch import Kernels, States
from onestem.ops.work import WorkList
from onestem.ops.work.lists import AT_RECORDS, RECORD, KeptChoice


@dataclass(eq=False)
class Workspace:
    """Attention over plans in fixed buffers.

    In a step, `write(plan)` makes the work list and packs it into a host buffer. `upload()` copies
    it to the device (asynchronously, on the current stream). `launch(...)` runs the two kernels,
    once for each layer. `upload` and `launch` may be captured in a CUDA graph, `launch` best alone:
    it reads everything about the plan from `control`. So it always launches both kernels: a plan
    without merges may be followed by one with merges. Two host buffers are used in turn: a step can
    be written during the copy of the one before it, and `write` waits for the copy before that.

    Between two steps that differ in lengths alone, `advance` replaces `write`.

    Layers with different windows need a workspace each (with the same `states`, since they run in
    turn).

    Attributes:
        states: memory for partial states. If a plan needs more, less is shared and cut.
        max_rows: rows of `q`, `out` and `lse`. A plan may have fewer; `num_rows` of `write` decides
            whether the others are written.
        max_words: int32 words of the control buffer. A plan takes about 16 words per item, 8 per
            run, 3 per row and one per page.
        share: False: a shared run is read once per sequence.
    """

    kernels: Kernels
    states: States
    max_rows: int
    max_words: int = 1 << 18
    share: bool = True
    control: Tensor = field(init=False)
    lse: Tensor = field(init=False)
    work: WorkList | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        device = self.states.lse.device
        self.control = torch.zeros(self.max_words, dtype=torch.int32, device=device)
        self.clear()
        shape = (self.max_rows, self.kernels.num_q_heads)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)
        words = (self.max_words,)
        self._hosts = [HostWords.make(words, torch.int32, device) for _ in range(2)]
        self._turn = 0
        self._words = 0
        self._grow: np.ndarray | None = None
        self._choice = KeptChoice()

    def clear(self) -> None:
        """Take the uploaded list back: until the next one there are no items."""
        self.control.zero_()
        # A kernel that looks ahead reads the record before the first one, which must be inside the
        # buffer.
        self.control[AT_RECORDS] = RECORD

    def _next_host(self) -> np.ndarray:
        self._turn = 1 - self._turn
        return self._hosts[self._turn].writable()

    def write(self, plan: AttentionPlan, *, num_rows: int | None = None) -> WorkList:
        """Make and pack a step's work list. Rows after the plan's, up to `num_rows` in all, become
        `(0, -inf)` (default: they are not written). `launch` must get as many."""
        self.work = self.kernels.listed(
            plan, self._choice, share=self.share, num_rows=num_rows, max_states=len(self.states)
        )
        self._words = self.work.pack(self._next_host())
        self._grow = None
        return self.work

    def advance(
        self, spans: np.ndarray, page_words: np.ndarray | None = None, pages: object = None
    ) -> None:
        """Advance to the next decode step: `end` of the one-row `spans` (int `[n]`) and all rows'
        positions grow by one. `spans` must be the same since the last `write`. The plan itself is
        not changed. `pages[i]` goes to word `page_words[i]` (`WorkList.page_word`)."""
        if self.work is None:
            raise ConfigError("advance before write: write a plan first")
        if self._grow is None:
            self._grow = self.work.growing_words(spans)
        before = self._hosts[self._turn].array
        array = self._next_host()
        array[: self._words] = before[: self._words]
        array[self._grow] += 1
        if page_words is not None:
            array[page_words] = pages

    def upload(self) -> None:
        """Copy the written buffer to the device."""
        self._hosts[self._turn].upload(self.control[: self._words])

    def launch(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        *,
        lse: Tensor | None = None,
        scores: Scores = PLAIN,
        wide: bool = True,
    ) -> None:
        """Launch the plan's attention on the current stream, without synchronisation.

        Args:
            q, out: `[max_rows or fewer, num_q_heads, head_dim]`, contiguous, of one dtype.
            k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]`, contiguous.
            lse: float32 `[as q, num_q_heads]`, natural log; default: the workspace's own `lse`.
            wide: False: the work list has no items of the widest tiles (`WorkList.num_wide`), and
                the launch begins sooner.
        """
        lse = self.lse if lse is None else lse
        tensors = (q, k_pages, v_pages, out, lse)
        self.kernels.launch(self.control, self.states, *tensors, scores, wide=wide)
