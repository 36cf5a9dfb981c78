"""Attention written out over a dense mask, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onestem.models.config import ModelConfig
from onestem.models.decoder import Attend, Decoder
from onestem.models.delta import LayerStates, StatesOf
from onestem.models.description import Alibi
from onestem.ops import Angles, Heads, PartRows, StateRows
from onestem.ops.cpu import is_built
from onestem.ops.cpu.extension import chosen_isa
from onestem.ops.layers import rotated
from tests.models.tiny import load_oracle

__all__ = ["dense_attend", "fresh_states", "log_probabilities", "oracle", "prompt"]


# (layer, row, key)
Triple = tuple[int, int, int]


def most_off() -> float:
    """How much further log-probabilities may be off, with weights that stay in their blocks, than
    with their numbers in 16 bits. Products of bytes round rows to 8 bits: a digit less."""
    slack = 1.5
    return slack * (1 + rows_are_bytes())


def rows_are_bytes() -> bool:
    """Whether products with codes round their rows to 8 bits on this machine."""
    return is_built() and chosen_isa() in ("avx512_bf16", "amx_bf16")


def prompt(length: int, vocab_size: int, seed: int = 0) -> Tensor:
    """[length] int64 token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator)


def visible(positions: Tensor, window: int | None) -> Tensor:
    """[num_rows, num_rows] bool: the row sees the key."""
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < (window or len(positions) + 1))


def dense_attend(
    config: ModelConfig, positions: Tensor, hidden: Sequence[Triple | None] = (None,)
) -> Attend:
    """`attend` of whole sequences that stand one behind the other, all with `positions`.

    Each of them has its entry in `hidden`: a (layer, row, key) that is taken out of what is seen.
    """
    copies, rows = len(hidden), len(positions)
    held: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer
    biases = torch.zeros(config.num_q_heads, 1, 1)
    if isinstance(config.positions, Alibi):
        slopes = torch.tensor(config.positions.slopes)[:, None, None]
        biases = slopes * (positions[None, :] - positions[:, None])

    def mask_of(layer: int) -> Tensor:
        """[copies, 1, rows, rows] bool."""
        mask = visible(positions, config.sliding_windows[layer]).repeat(copies, 1, 1)
        for copy, triple in enumerate(hidden):
            if triple is not None and triple[0] == layer:
                mask[copy, triple[1], triple[2]] = False
        return mask[:, None]

    def attend(layer: int, qkv: Tensor, heads: Heads, angles: Angles) -> Tensor:
        q, k, v = rotated(qkv, heads, angles)
        their, read = config.heads[layer], config.kv_layers[layer]
        if read == layer:
            held[layer] = k, v
        k, v = held[read]
        group = config.num_q_heads // their.num_kv_heads
        assert q.shape == (copies * rows, config.num_q_heads, their.head_dim)
        assert k.shape == v.shape == (copies * rows, their.num_kv_heads, their.head_dim)
        queries, keys, values = (x.float().unflatten(0, (copies, rows)) for x in (q, k, v))
        keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))
        scale = config.score_scale or config.head_dim**-0.5
        scores = torch.einsum("crhd,ckhd->chrk", queries, keys) * scale
        if config.score_softcap is not None:
            scores = config.score_softcap * torch.tanh(scores / config.score_softcap)
        scores += biases
        scores = scores.masked_fill(~mask_of(layer), float("-inf"))
        if heads.sinks is not None:
            sinks = heads.sinks[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :rows]
        return torch.einsum("chrk,ckhd->crhd", weights, values).flatten(0, 1).to(q.dtype)

    return attend


def fresh_states(decoder: Decoder, copies: int, rows: int) -> StatesOf | None:
    """States of whole sequences that stand one behind the other, from their beginning; None: the
    model has none."""
    rule = decoder.part.delta
    if rule is None:
        return None
    each = np.arange(copies, dtype=np.int32)
    zeros = np.zeros_like(each)
    parts = StateRows(each * rows, zeros + rows, zeros, zeros - 1, each)
    matrices = copies, rule.num_value_heads, rule.key_dim, rule.value_dim
    inputs = copies, rule.width - 1, rule.channels
    made = {
        layer: LayerStates(
            torch.full(inputs, float("nan"), dtype=decoder.dtype),
            torch.full(matrices, float("nan")),
            PartRows.of(parts, decoder.device),
        )
        for layer in range(decoder.config.num_layers)
        if decoder.config.has_state(layer)
    }
    return made.__getitem__


def log_probabilities(
    decoder: Decoder, token_ids: Tensor, hidden: Sequence[Triple | None] = (None,)
) -> Tensor:
    """[len(hidden), num_rows, vocab_size] float32, of one sequence from position 0, per mask."""
    positions = torch.arange(len(token_ids))
    attend = dense_attend(decoder.config, positions, hidden)
    copies = len(hidden)
    states = fresh_states(decoder, copies, len(token_ids))
    rows = token_ids.repeat(copies), positions.repeat(copies)
    logits = decoder.logits(decoder.forward(*rows, attend, states=states)).unflatten(
        0, (copies, len(token_ids))
    )
    return logits.log_softmax(dim=-1)


@torch.inference_mode()
def oracle(path: Path, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same of transformers' model in that directory."""
    model = load_oracle(path, dtype)
    logits: Tensor = model(token_ids[None]).logits[0].float()
    return logits.log_softmax(dim=-1)
