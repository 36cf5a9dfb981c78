"""From logits to token ids.

The order of operations on a row, as in vLLM and Hugging Face: repetition, presence and frequency
penalties; logit bias; stop ids before `min_tokens`; the grammar's mask; temperature; top-k; top-p;
min-p. What is left is drawn by an exponential race (`onestem.ops.sampling`). Everything runs where
the logits are, and nothing is waited for until a step's tokens are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.sampling.pending import Chosen, Pending, PendingLogprobs, Sampled
from onestem.engine.sampling.rows import SamplingRow, SamplingSettings
from onestem.models.config import GenerationDefaults
from onestem.ops import resolve_sampling
from onestem.ops.copies import on_device
from onestem.ops.sampling import IDLE, ROW, RowTable, processed
from onestem.options import LogprobsMode
from onestem.request import SamplingParams

_MOST_TOKENS = 2**31 - 1  # no sequence has more
# A lower one is greedy: float32 logits have no smaller differences.
LOWEST_TEMPERATURE = 1e-6


class Sampler:
    """Samples all rows of a step.

    Args:
        vocab_size: columns of the logits.
        defaults: the model's sampling defaults, used where a request leaves them open.
        device: where the logits are.
        logprobs_mode: of sampled tokens: `raw_logprobs`, or `processed_logprobs`, after all that
            changes what is drawn from.

    Attributes:
        tells_ranks: log-probabilities are `RankedLogprobs`, which costs a pass over the logits.
    """

    def __init__(
        self,
        vocab_size: int,
        defaults: GenerationDefaults | None = None,
        device: torch.device | str = "cpu",
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.vocab_size = vocab_size
        self._is_raw = logprobs_mode == "raw_logprobs"
        self.device = torch.device(device)
        self.tells_ranks = False
        self._defaults = defaults or GenerationDefaults()
        self._ops = resolve_sampling(self.device)
        self._penalties = self._ops.penalties(vocab_size, self.device)
        self._noted = np.zeros(0, np.int64)  # sampled tokens that the state of a place has
        self._free: list[int] = []
        # By identity. An entry goes with its object: parameters may be as large as a request's
        # body, and a prompt as long as the model allows.
        self._settings: dict[int, tuple[ref[SamplingParams], SamplingSettings]] = {}
        self._prompts: WeakValueDictionary[int, NDArray[np.int64]] = WeakValueDictionary()

    def tell_ranks(self) -> None:
        """Give log-probabilities as `RankedLogprobs` from now on."""
        self.tells_ranks = True

    def warm_up(self) -> None:
        """Sample in every way, so that no request waits until a GPU's kernels are compiled."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"top_k": 50},
            {"top_p": 0.9},
            {"logprobs": 2},
            {"repetition_penalty": 1.1, "presence_penalty": 0.1},
        ]
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        # Kernels are compiled again for one row, and for multiples of 16.
        for few in (*([kind] for kind in kinds), kinds, [kinds[i % len(kinds)] for i in range(16)]):
            rows = [
                SamplingRow(SamplingParams(**{**plain, **kind}), seed=0, prompt_token_ids=(0,))
                for kind in few
            ]
            logits = torch.zeros(len(rows), self.vocab_size, device=self.device)
            self.tells_ranks = True
            self.sample(logits, rows)
            self.tells_ranks = False
            for row in rows:
                self.release(row)

    def settings_of(self, params: SamplingParams) -> SamplingSettings:
        """What parameters mean for this model."""
        settings, name = self._settings, id(params)
        known = settings.get(name)
        if known is None:
            gone = ref(params, lambda _: settings.pop(name, None))
            known = settings[name] = (gone, self._resolve(params))
        return known[1]

    def _resolve(self, params: SamplingParams) -> SamplingSettings:
        def value(name: str, neutral: float) -> float:
            for source in (params, self._defaults):
                if (found := getattr(source, name)) is not None:
                    return float(found)
            return neutral

        record, top_k, heat = IDLE.copy(), value("top_k", 0), value("temperature", 1.0)
        record["temperature"] = heat if heat >= LOWEST_TEMPERATURE else 0.0
        record["top_k"] = int(top_k) if 0 < top_k < self.vocab_size else 0
        record["top_p"] = _not_above(value("top_p", 1.0))
        record["min_p"] = value("min_p", 0.0)
        record["repetition"] = value("repetition_penalty", 1.0)
        record["presence"] = params.presence_penalty
        record["frequency"] = params.frequency_penalty
        record["min_tokens"] = min(params.min_tokens, _MOST_TOKENS)
        record["told"] = 0 if params.logprobs is None else params.logprobs + 1
        bias = params.logit_bias or {}
        record["biased"] = len(bias) > 0
        return SamplingSettings(
            record,
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )

    def release(self, row: SamplingRow) -> None:
        """Free the state of penalties of a sequence that has ended."""
        if row.place >= 0:
            self._free.append(row.place)
            self._penalties.release(row.place)
            row.place, row.record = -1, b""

    @torch.inference_mode()
    def records(self, rows: Sequence[SamplingRow]) -> NDArray[np.void]:
        """Rows as the device gets them, `ROW` `[n]`."""
        records = np.frombuffer(b"".join([self._record(row) for row in rows]), ROW).copy()
        records["token"] = [row.token_index for row in rows]
        return records

    def _record(self, row: SamplingRow) -> bytes:
        if not row.record:
            row.record = self._new_record(row)
        if row.place >= 0 and self._noted[row.place] != row.token_index:
            self._assign(row)
        return row.record

    def _new_record(self, row: SamplingRow) -> bytes:
        settings = self.settings_of(row.params)
        if settings.penalised:
            row.place = self._free.pop() if self._free else self._new_place()
            self._noted[row.place] = -1
        record = settings.record.copy()
        record["seed_low"] = row.seed & 0xFFFFFFFF
        record["seed_high"] = (row.seed >> 32) & 0xFFFFFFFF
        record["sequence"] = row.sequence_index
        record["penalty"] = row.place
        return record.tobytes()

    def _assign(self, row: SamplingRow) -> None:
        """Tell the device what a row has seen: at first, and after a failed step."""
        repeats = self.settings_of(row.params).record["repetition"] != 1
        prompt = self._prompt_ids(row) if repeats else None
        self._penalties.assign(row.place, prompt, np.asarray(row.output_token_ids(), np.int64))
        self._noted[row.place] = row.token_index

    def _new_place(self) -> int:
        first = len(self._noted)
        more = max(8, first)
        self._noted = np.append(self._noted, np.zeros(more, np.int64))
        self._free.extend(range(first + more - 1, first, -1))
        return first

    def _prompt_ids(self, row: SamplingRow) -> NDArray[np.int64]:
        """The prompt's distinct ids, shared by its n sequences: they go with the last row."""
        if row.prompt_ids is None:
            name = id(row.prompt_token_ids)  # its own: each row that has these ids has the prompt
            ids = self._prompts.get(name)
            if ids is None:
                ids = np.unique(np.asarray(row.prompt_token_ids, np.int64))
                self._prompts[name] = ids
            row.prompt_ids = ids
        return row.prompt_ids

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """One token for each row of `logits` float32 `[n, vocab]`, which may be changed."""
        masked = [i for i, row in enumerate(rows) if row.allowed_mask is not None]
        step = Step(self.records(rows), rows.__getitem__, self, masked=masked)
        return self.launch(logits, step).take()

    @torch.inference_mode()
    def launch(self, logits: Tensor, step: Step) -> Pending:
        """Sample the next token of each row of `logits` float32 `[n, vocab]`, which may be changed.
        Nothing is waited for."""
        if logits.shape != (len(step.table), self.vocab_size):
            raise ValueError(
                f"logits have shape {list(logits.shape)}, expected "
                f"[{len(step.table)}, {self.vocab_size}]"
            )
        table = step.table
        told = None
        if len(step.told) and step.changes and self._is_raw:
            told = logits[step.told_there]
        if step.changes:
            self._change(logits, step)
        if len(step.told) and not self._is_raw:
            told = processed(logits[step.told_there], table.rows[step.told])
        drawn = self._ops.draw(logits, table)
        chosen = None
        if len(step.told):
            ids = drawn.ids[step.told_there]
            chosen = self._chosen(logits, step.told_there, ids, step.most_told, told)
        if len(table.penalised):
            self._penalties.note(table, drawn.ids)
            self._noted[table.rows["penalty"][table.penalised]] += 1
        table.steps += 1
        return Pending(drawn, chosen, step.told, step.told_counts)

    def _change(self, logits: Tensor, step: Step) -> None:
        """Penalties, bias, stop ids and masks, in place."""
        self._penalties.apply(logits, step.table)
        if step.bias is not None:
            rows, ids, values = step.bias
            logits[rows, ids] += values
        if step.stops is not None and step.table.steps < step.last_stop:
            rows, ids, until = step.stops
            early = until > step.table.steps
            logits[rows, ids] = logits[rows, ids].masked_fill(early, -math.inf)
        if step.masked is not None:
            _mask(logits, *step.masked)

    def _chosen(
        self, logits: Tensor, index: Tensor, ids: Tensor, most: int, told: Tensor | None
    ) -> Chosen:
        """Log-probabilities of tokens `ids`, by rows `index` of the logits or all of `told`."""
        if told is not None:
            logits, index = told, torch.arange(len(told), device=told.device)
        own = logits[index, ids]
        sums = self._ops.log_sums(logits, index)
        values, top_ids = self._ops.leading(logits, index, min(most, self.vocab_size))
        before = self._ops.ranks(logits, index, ids) if self.tells_ranks else ids[:0]
        return Chosen(own - sums, top_ids, values - sums[:, None], before)

    @torch.inference_mode()
    def logprobs(
        self,
        blocks: Iterable[Tensor],
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        most: int | None = None,
    ) -> PendingLogprobs:
        """Natural-log probabilities of given tokens under the model's own distribution, and of the
        most probable ones beside each: highest first, equal ones by id. Nothing is waited for.

        Args:
            blocks: logits float32 `[n_i, vocab]`, of which one is there at a time.
            rows: int64 `[m]`, ascending, and `tokens`: row `rows[i]` of all blocks scores
                `tokens[i]`.
            most: how many of the most probable ones, with ranks if they are asked for; None: one.
        """
        parts, first_row, at = [], 0, 0
        for logits in blocks:
            end = int(np.searchsorted(rows, first_row + len(logits)))
            which = on_device(rows[at:end] - first_row, logits.device)
            ids = on_device(tokens[at:end], logits.device)
            parts.append(self._scored(logits, which, ids, most))
            first_row, at = first_row + len(logits), end
        return PendingLogprobs(Chosen(*map(torch.cat, zip(*parts, strict=True))))

    def _scored(self, logits: Tensor, which: Tensor, ids: Tensor, most: int | None) -> Chosen:
        """Of a block: row `which[i]` scores token `ids[i]`."""
        every = torch.arange(len(logits), device=logits.device)
        sums = self._ops.log_sums(logits, every)
        values, top_ids = self._ops.leading(logits, every, min(max(1, most or 0), self.vocab_size))
        ranked = self.tells_ranks and most is not None
        before = self._ops.ranks(logits, which, ids) if ranked else ids[:0]
        own = logits[which, ids] - sums[which]
        return Chosen(own, top_ids[which], values[which] - sums[which, None], before)


def _not_above(share: float) -> float:
    """The next float32 that is not larger, and above 0: equal logits at the limit stay outside."""
    nearest = np.float32(share)
    if float(nearest) > share:
        nearest = np.nextafter(nearest, np.float32(0))
    return float(max(nearest, np.finfo(np.float32).tiny))


class Step:
    """The rows of a step, as `Sampler.launch` takes them. It serves further steps of the same rows,
    each a token later.

    Args:
        records: `ROW` `[n]`.
        row_at: gives a row's `SamplingRow`; called for rows that have a bias, a mask or stop ids
            that may not come yet.

    Attributes:
        table: the rows as the device takes them.
        told: int64 `[m]`, rows whose log-probabilities are wanted; `told_counts`: of how many of
            the most probable tokens beside the sampled one.
        changes: whether logits are changed before tokens are drawn.
    """

    def __init__(
        self,
        records: NDArray[np.void],
        row_at: Callable[[int], SamplingRow],
        sampler: Sampler,
        *,
        masked: Sequence[int] = (),
    ) -> None:
        device = sampler.device
        self.table = RowTable(records, device)
        self.told = np.flatnonzero(records["told"])
        self.told_counts = records["told"][self.told] - 1
        self.most_told = int(self.told_counts.max(initial=0))
        self.told_there = self.table.index(self.told)
        left = records["min_tokens"] - records["token"].astype(np.int64)
        self.last_stop = int(left.max(initial=0))
        biased = np.flatnonzero(records["biased"]).tolist()
        self.bias = _entries([_bias(i, row_at(i), sampler) for i in biased], device)
        early = np.flatnonzero(left > 0).tolist()
        self.stops = _entries([_stops(i, row_at(i)) for i in early], device)
        masks = [(i, mask) for i in masked if (mask := row_at(i).allowed_mask) is not None]
        self.masked = _stacked(masks, device) if masks else None
        others = any(part is not None for part in (self.bias, self.stops, self.masked))
        self.changes = others or len(self.table.penalised) > 0


_Entry = tuple[int, NDArray[np.int64], NDArray[np.generic]]


def _bias(i: int, row: SamplingRow, sampler: Sampler) -> _Entry:
    setting = sampler.settings_of(row.params)
    return i, setting.bias_ids, setting.bias_values


def _stops(i: int, row: SamplingRow) -> _Entry:
    """Ids that a row may not sample, and for how many steps from now on."""
    ids = np.fromiter(row.stop_ids, np.int64, len(row.stop_ids))
    until = min(row.params.min_tokens, _MOST_TOKENS) - row.token_index
    return i, ids, np.full(len(ids), until)


def _entries(entries: list[_Entry], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits that are changed one by one: rows, ids, and a value each."""
    if not any(len(ids) for _, ids, _ in entries):
        return None
    rows = np.repeat([row for row, _, _ in entries], [len(ids) for _, ids, _ in entries])
    ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    return on_device(rows, device), on_device(ids, device), on_device(values, device)


def _stacked(
    masks: list[tuple[int, Tensor]], device: torch.device
) -> tuple[NDArray[np.int64], Tensor]:
    """Rows, and their masks `[m, words]`."""
    stacked = torch.stack([mask for _, mask in masks])
    if device.type == "cuda":
        stacked = stacked.pin_memory()
    return np.array([row for row, _ in masks]), stacked.to(device, non_blocking=True)


def _mask(logits: Tensor, rows: NDArray[np.int64], masks: Tensor) -> None:
    """-inf where a row's mask does not allow the token, by xgrammar's own kernel."""
    import xgrammar

    index = on_device(rows, logits.device)
    # The kernel looks for a row's mask where it looks for its logits.
    placed = masks.new_empty((len(logits), masks.shape[1]))
    placed[index] = masks
    reached = min(32 * masks.shape[1], logits.shape[1])
    indices = rows.tolist()
    xgrammar.apply_token_bitmask_inplace(logits, placed, vocab_size=reached, indices=indices)
    if reached < logits.shape[1]:
        logits[index, reached:] = -math.inf
