"""Runs a step: the decoder over its rows, with attention over KV pages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onestem.engine.inputs import StepInputs
from onestem.models.decoder import Decoder
from onestem.ops import AttentionImpl, PreparedAttention, allocate_pages, slot_index, write_kv

__all__ = ["Runner", "ShareMode"]

ShareMode = Literal["full", "storage", "off", "no-attention"]


class Runner:
    """Holds the model and its KV pages.

    Args:
        decoder: the model.
        impl: the attention implementation.
        share: `no-attention` writes K and V but attends to nothing (the ceiling).
    """

    def __init__(
        self,
        decoder: Decoder,
        impl: AttentionImpl,
        *,
        num_pages: int,
        page_size: int,
        share: ShareMode,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.impl = impl
        self.share = share
        self.windows = config.sliding_windows
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.pages = [
            tuple(
                allocate_pages(*shape, dtype=decoder.dtype, device=decoder.device) for _ in range(2)
            )
            for _ in range(config.num_layers)
        ]

    def prepare(self, inputs: StepInputs) -> dict[int | None, PreparedAttention]:
        """Make the step's plans ready; the same for all layers."""
        if self.share == "no-attention":
            return {}
        together = self.share != "storage"
        return {
            window: self.impl.prepare(plan, share=together) for window, plan in inputs.plans.items()
        }

    @torch.inference_mode()
    def run(self, inputs: StepInputs, prepared: dict[int | None, PreparedAttention]) -> Tensor:
        """Logits float32 `[num_logits, vocab_size]` of the rows that want them."""
        device = self.decoder.device
        slots = slot_index(inputs.slots, device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_pages, v_pages = self.pages[layer]
            write_kv(k_pages, slots, k)
            write_kv(v_pages, slots, v)
            if not prepared:
                return q
            return prepared[self.windows[layer]].attend(q, k_pages, v_pages).out.to(q.dtype)

        hidden = self.decoder.forward(
            torch.from_numpy(inputs.token_ids).to(device),
            torch.from_numpy(inputs.positions).to(device),
            attend,
        )
        return self.decoder.logits(hidden[torch.from_numpy(inputs.logit_rows).to(device)])
