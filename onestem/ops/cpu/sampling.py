"""A draw from each row of logits in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops.cpu.extension import chosen_isa, native

__all__ = ["draw_tokens"]


def draw_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    weight_bits: int,
    isa: str | None = None,
) -> Tensor:
    """Token ids int64 `[n]`: the cumulative distribution of each row, its tokens in order of their
    logits (equal ones by id), inverted at `uniform`.

    Costs one pass over the row and the sorting of a few hundred tokens, also where a distribution
    is flat.

    Args:
        logits: float32 `[n, vocab]` on the CPU; no NaN, and a finite one in each row.
        temperature, top_p, min_p, uniform: float64 `[n]`; temperatures above 0, 1 and 0 where
            top-p and min-p are off, `uniform` in (0, 1).
        top_k: int64 `[n]`, the vocabulary's size where off.
        weight_bits: a probability counts in units of 2^-weight_bits of the highest, at most 52.
    """
    rows, vocab = logits.shape
    settings = (temperature, top_k, top_p, min_p, uniform)
    kinds = (torch.float64, torch.int64, *[torch.float64] * 3)
    for values, kind in zip(settings, kinds, strict=True):
        here = values.device.type == "cpu" and values.is_contiguous()
        if values.shape != (rows,) or values.dtype != kind or not here:
            raise ConfigError(
                f"got {values.dtype} {tuple(values.shape)} on {values.device}, expected {kind} "
                f"[{rows}], contiguous, on the CPU"
            )
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or weight_bits > 52:
        raise ConfigError(f"logits are {logits.dtype} on {logits.device}, expected float32 there")
    logits = logits.contiguous()
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    native().draw_tokens(
        isa or chosen_isa(),
        logits.data_ptr(),
        rows,
        vocab,
        weight_bits,
        *(values.data_ptr() for values in settings),
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return ids
