"""Penalties, bias, stop ids and masks: what changes logits before a token is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.sampling_row import SamplingRow, SamplingSettings

__all__ = ["LogitChanges", "is_changed"]

_PROMPTS = 8192  # whose different ids are kept


def is_changed(row: SamplingRow, setting: SamplingSettings) -> bool:
    """Whether the row's logits are changed at all at this token."""
    return (
        setting.changes_logits
        or row.allowed_mask is not None
        or (row.token_index < setting.min_tokens and len(row.stop_ids) > 0)
    )


class LogitChanges:
    """Changes logits as their rows ask; holds nothing that a sequence depends on, only a cache.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Keyed by identity; the keyed object is kept in the value, so its id stays its own.
        self._prompts: dict[int, tuple[object, NDArray[np.int64]]] = {}

    def apply(
        self, work: Tensor, rows: Sequence[SamplingRow], settings: Sequence[SamplingSettings]
    ) -> None:
        """Penalties, bias, stop ids and masks, in place on `work` `[m, vocab]`."""
        pairs = list(enumerate(zip(rows, settings, strict=True)))
        self._penalise_repetition(
            work, [(i, row, s) for i, (row, s) in pairs if s.repetition_penalty != 1.0]
        )
        self._penalise_output(work, [(i, row, s) for i, (row, s) in pairs if s.counts_output])
        _add(work, [(i, s.bias_ids, s.bias_values) for i, (_, s) in pairs if len(s.bias_ids)])
        _add(
            work,
            [
                (i, np.fromiter(row.stop_ids, np.int64), np.float32(-math.inf))
                for i, (row, s) in pairs
                if row.stop_ids and row.token_index < s.min_tokens
            ],
        )
        masks = [(i, row.allowed_mask) for i, (row, _) in pairs]
        _mask(work, [(i, mask) for i, mask in masks if mask is not None])

    def _penalise_repetition(
        self, work: Tensor, items: Sequence[tuple[int, SamplingRow, SamplingSettings]]
    ) -> None:
        """CTRL's penalty (Keskar et al. 2019): a seen token's logit / p if positive, else * p."""
        if not items:
            return
        seen = [self._seen_ids(row) for _, row, _ in items]
        row_index, ids = _flat([index for index, _, _ in items], seen, work.device)
        penalty = _repeated([s.repetition_penalty for _, _, s in items], seen, work.device)
        values = work[row_index, ids]
        work[row_index, ids] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalise_output(
        self, work: Tensor, items: Sequence[tuple[int, SamplingRow, SamplingSettings]]
    ) -> None:
        """OpenAI's penalties: minus frequency * count + presence, over sampled tokens."""
        changes = []
        for index, row, setting in items:
            ids, counts = np.unique(self._ids(row.output_token_ids), return_counts=True)
            amount = setting.frequency_penalty * counts + setting.presence_penalty
            changes.append((index, ids, (-amount).astype(np.float32)))
        _add(work, changes)

    def _ids(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[ids < self._vocab_size]

    def _seen_ids(self, row: SamplingRow) -> NDArray[np.int64]:
        """Different ids of prompt and output."""
        prompt = self._prompt_ids(row.prompt_token_ids)
        output = np.unique(self._ids(row.output_token_ids))
        place = np.searchsorted(prompt, output)
        known = place < len(prompt)
        known[known] = prompt[place[known]] == output[known]
        return np.concatenate([prompt, output[~known]])

    def _prompt_ids(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """The prompt's different ids; asked for at every step and often long, so they are kept."""
        known = self._prompts.get(id(token_ids))
        if known is None:
            if len(self._prompts) >= _PROMPTS:
                self._prompts.clear()
            known = self._prompts[id(token_ids)] = (token_ids, np.unique(self._ids(token_ids)))
        return known[1]


def _flat(
    indices: Sequence[int], ids: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row index and token id of every (row, id), int64 `[total]`."""
    rows = np.repeat(np.asarray(indices, np.int64), [len(part) for part in ids])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _repeated(
    values: Sequence[float], ids: Sequence[NDArray[np.int64]], device: torch.device
) -> Tensor:
    """Each row's value once per id of the row, float32 `[total]`."""
    repeated = np.repeat(np.asarray(values, np.float32), [len(part) for part in ids])
    return torch.from_numpy(repeated).to(device)


def _add(
    work: Tensor,
    changes: Sequence[tuple[int, NDArray[np.int64], NDArray[np.float32] | np.float32]],
) -> None:
    """`work[row, ids] += values` for each (row, ids, values); the ids of a row are different."""
    if not changes:
        return
    row_index, ids = _flat(
        [row for row, _, _ in changes], [ids for _, ids, _ in changes], work.device
    )
    values = np.concatenate([np.broadcast_to(values, ids.shape) for _, ids, values in changes])
    work[row_index, ids] += torch.from_numpy(values).to(work.device)


def _mask(work: Tensor, masks: Sequence[tuple[int, Tensor]]) -> None:
    """-inf where a row's mask does not allow the token."""
    packed = [(row, mask) for row, mask in masks if mask.dtype == torch.int32]
    plain = [(row, mask) for row, mask in masks if mask.dtype != torch.int32]
    for some, unpack in ((packed, _unpack), (plain, Tensor.bool)):
        if not some:
            continue
        rows = torch.tensor([row for row, _ in some], device=work.device)
        stacked = torch.stack([mask.flatten() for _, mask in some]).to(work.device)
        allowed = unpack(stacked)[:, : work.shape[1]]
        chosen = work[rows]
        forbidden = torch.ones_like(chosen, dtype=torch.bool)
        forbidden[:, : allowed.shape[1]] = ~allowed
        work[rows] = chosen.masked_fill_(forbidden, -math.inf)


def _unpack(words: Tensor) -> Tensor:
    """int32 `[m, words]`, lowest bit first, as bool `[m, 32 * words]`."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)
