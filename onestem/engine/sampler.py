"""From logits to token ids.

The order of operations on a row, as in vLLM and Hugging Face: repetition, presence and frequency
penalties; logit bias; stop ids before `min_tokens`; the grammar's mask; temperature; top-k; top-p;
min-p. What is left is sampled by inverting the cumulative distribution with one number in (0, 1)
that depends on (seed, sequence index, token index) alone (`onestem.engine.random`).

Tokens have one order: more probable first, equal ones by id. Top-k, top-p and min-p each keep a
leading part of it, and the inverse walks along it. Probabilities are integer weights
(`exp((logit - max) / temperature)` in units of 2^-b), because integer sums do not depend on the
order of addition: what a row samples cannot depend on the rows beside it, nor on how a device
splits a sum.

Sorting a vocabulary costs more than everything else here, so the walk goes along the leading
tokens first; a row that needs more of the order than that walks again with more of it, in the end
with all, and the same result. On a CPU the C++ extension does the same in one pass over the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onestem.engine.random import uniform
from onestem.errors import OnestemError, RequestError
from onestem.ops.cpu import draw_tokens, is_built
from onestem.request import SamplingParams, TokenLogprobs

__all__ = [
    "Drawing",
    "MaskedRowError",
    "NonFiniteLogitsError",
    "Pending",
    "Sampled",
    "Sampler",
    "SamplingDefaults",
    "SamplingRow",
    "logprobs_of",
    "token_logprobs",
]

_CANDIDATES = (256, 8192)  # leading tokens to look at, before the whole vocabulary
# float64 copies of logits are made in pieces: such that stay in a CPU's cache, or that fit beside
# what else is in a GPU's memory.
_CHUNK_ELEMENTS_CPU = 2**17
_CHUNK_ELEMENTS_GPU = 2**25
_CACHE_ENTRIES = 8192
_NEGATIVE_INFINITY = float("-inf")
_MASK_64 = 0xFFFFFFFFFFFFFFFF


class MaskedRowError(RequestError):
    """Nothing may be sampled in `rows` (indices into the step's rows); the others are untouched."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"row {_list(rows)} of the step may sample no token: its response_format (with "
            "min_tokens, if set) forbids all of them"
        )


class NonFiniteLogitsError(OnestemError):
    """The model gave NaN or infinite logits in `rows`; the others are untouched."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"row {_list(rows)} of the step has logits that are NaN or infinite, expected finite "
            "ones: the weights are damaged, or overflow in this dtype (try bfloat16 or float32)"
        )


def _list(rows: Sequence[int]) -> str:
    return ", ".join(str(row) for row in rows)


class SamplingDefaults(Protocol):
    """The model's own defaults (`generation_config.json`); None where it is silent."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


@dataclass(slots=True)
class SamplingRow:
    """One sequence that samples in this step. The engine may keep it and update what changed.

    Attributes:
        params: the request's; the same object at every step (what it means is cached by identity).
        seed: the request's 64-bit seed, `params.seed` or drawn.
        sequence_index: which of the request's n sequences.
        token_index: how many tokens it has sampled so far.
        prompt_token_ids: of the request; the same object at every step, never changed.
        output_token_ids: sampled so far. A list, `array`, or numpy array; both are read only where
            a penalty is set.
        stop_ids: ids that may not be sampled before `params.min_tokens` (end of sequence unless
            `ignore_eos`, and `stop_token_ids`).
        reads_output: whether `output_token_ids` is to be kept up to date (`Sampler.reads_output`).
        allowed_mask: from the grammar: bool `[vocab]`, or bits packed in int32
            `[ceil(vocab / 32)]`, lowest bit first; what a mask does not reach is forbidden.
    """

    params: SamplingParams
    seed: int
    sequence_index: int = 0
    token_index: int = 0
    prompt_token_ids: Sequence[int] | NDArray[np.integer] = ()
    output_token_ids: Sequence[int] | NDArray[np.integer] = ()
    stop_ids: Collection[int] = ()
    allowed_mask: Tensor | None = None
    reads_output: bool = False


@dataclass(slots=True)
class Sampled:
    """What each row sampled.

    Attributes:
        token_ids: `[n]`.
        logprobs: alternatives and the sampled token, where `params.logprobs` asks for them.
        token_logprob: the sampled token's natural-log probability, for the same rows.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    token_logprob: list[float | None]


@dataclass(frozen=True, slots=True)
class _Settings:
    """`SamplingParams` with the model's defaults filled in and the neutral values named."""

    temperature: float
    top_k: int  # vocab size where off
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    min_tokens: int
    logprobs: int | None

    @property
    def counts_output(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return self.repetition_penalty != 1.0 or self.counts_output or len(self.bias_ids) > 0


class Sampler:
    """Samples all rows of a step; holds nothing that a sequence depends on, only caches.

    Args:
        vocab_size: columns of the logits.
        defaults: the model's sampling defaults, used where a request leaves them open.
    """

    def __init__(self, vocab_size: int, defaults: SamplingDefaults | None = None) -> None:
        self.vocab_size = vocab_size
        self._defaults = defaults
        # Keyed by identity; the keyed object is kept in the value, so its id stays its own.
        self._settings: dict[int, tuple[SamplingParams, _Settings]] = {}
        self._prompts: dict[int, tuple[object, NDArray[np.int64]]] = {}

    def check(self, params: SamplingParams) -> None:
        """Refuse token ids that the model does not have. For admission.

        Raises:
            RequestError: an id in `logit_bias` or `stop_token_ids` is not in the vocabulary.
        """
        for name, ids in (
            ("logit_bias", params.logit_bias or {}),
            ("stop_token_ids", params.stop_token_ids),
        ):
            beyond = [token for token in ids if token >= self.vocab_size]
            if beyond:
                raise RequestError(
                    f"{name} names token {beyond[0]}, expected ids below {self.vocab_size} "
                    "(the vocabulary's size)"
                )

    def reads_output(self, params: SamplingParams) -> bool:
        """Whether what may be sampled depends on `output_token_ids`."""
        setting = self._settings_of(params)
        return setting.counts_output or setting.repetition_penalty != 1.0

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """One token for each row of `logits` float32 `[n, vocab]`, which is left as it is.

        Raises:
            NonFiniteLogitsError: a row has NaN, +inf, or nothing but -inf.
            MaskedRowError: a row's grammar forbids every token.
            RequestError: see `check`.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits have shape {list(logits.shape)}, expected [{len(rows)}, {self.vocab_size}]"
            )
        if not rows:
            return Sampled([], [], [])
        settings = [self._settings_of(row.params) for row in rows]
        highest, best = logits.max(dim=-1)  # equal logits: the lowest id
        _refuse(~torch.isfinite(highest), NonFiniteLogitsError)
        token_ids: list[int] = best.tolist()
        wanted = [
            index
            for index, (row, setting) in enumerate(zip(rows, settings, strict=True))
            if setting.temperature > 0.0 or _is_changed(row, setting)
        ]
        if wanted:
            sampled = self._sample_processed(logits, rows, settings, wanted)
            for index, token in zip(wanted, sampled, strict=True):
                token_ids[index] = token
        return _with_logprobs(logits, token_ids, [setting.logprobs for setting in settings])

    def drawing(self, rows: Sequence[SamplingRow], device: torch.device) -> Drawing | None:
        """How rows sample at step after step without the host between; None if what one of them
        may sample depends on its last token (penalties, grammars), is biased, or needs more of the
        order than is looked at (a top-k between the two)."""
        settings = [self._settings_of(row.params) for row in rows]
        if any(s.temperature > 0 and _CANDIDATES[0] < s.top_k < self.vocab_size for s in settings):
            return None
        if any(_is_changed(row, setting) for row, setting in zip(rows, settings, strict=True)):
            return None
        return Drawing(rows, settings, device, self.vocab_size)

    def _sample_processed(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        settings: Sequence[_Settings],
        wanted: list[int],
    ) -> list[int]:
        """Tokens of the rows `wanted`, those that are not plainly greedy."""
        rows = [rows[index] for index in wanted]
        settings = [settings[index] for index in wanted]
        work = logits[torch.tensor(wanted, device=logits.device)].float()  # [m, vocab], a copy
        self._change_logits(work, rows, settings)
        highest, best = work.max(dim=-1)
        _refuse(highest == _NEGATIVE_INFINITY, MaskedRowError, wanted)
        token_ids: list[int] = best.tolist()
        drawn = [index for index, setting in enumerate(settings) if setting.temperature > 0.0]
        if drawn:
            if len(drawn) < len(rows):
                work = work[torch.tensor(drawn, device=work.device)]
            draw = _Draw.of([rows[i] for i in drawn], [settings[i] for i in drawn], work.device)
            for index, token in zip(drawn, _draw_tokens(work, draw).tolist(), strict=True):
                token_ids[index] = token
        return token_ids

    def _change_logits(
        self, work: Tensor, rows: Sequence[SamplingRow], settings: Sequence[_Settings]
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
                (i, np.fromiter(row.stop_ids, np.int64), np.float32(_NEGATIVE_INFINITY))
                for i, (row, s) in pairs
                if row.stop_ids and row.token_index < s.min_tokens
            ],
        )
        masks = [(i, row.allowed_mask) for i, (row, _) in pairs]
        _mask(work, [(i, mask) for i, mask in masks if mask is not None])

    def _penalise_repetition(
        self, work: Tensor, items: Sequence[tuple[int, SamplingRow, _Settings]]
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
        self, work: Tensor, items: Sequence[tuple[int, SamplingRow, _Settings]]
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
        return ids[ids < self.vocab_size]

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
            if len(self._prompts) >= _CACHE_ENTRIES:
                self._prompts.clear()
            known = self._prompts[id(token_ids)] = (token_ids, np.unique(self._ids(token_ids)))
        return known[1]

    def _settings_of(self, params: SamplingParams) -> _Settings:
        known = self._settings.get(id(params))
        if known is None:
            if len(self._settings) >= _CACHE_ENTRIES:
                self._settings.clear()
            known = self._settings[id(params)] = (params, self._resolve(params))
        return known[1]

    def _resolve(self, params: SamplingParams) -> _Settings:
        self.check(params)

        def value(name: str, neutral: float) -> float:
            for source in (params, self._defaults):
                found = getattr(source, name) if source is not None else None
                if found is not None:
                    return float(found)
            return neutral

        top_k = int(value("top_k", 0))
        bias = params.logit_bias or {}
        return _Settings(
            temperature=value("temperature", 1.0),
            top_k=min(top_k, self.vocab_size) if top_k > 0 else self.vocab_size,
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
        )


def _is_changed(row: SamplingRow, setting: _Settings) -> bool:
    return (
        setting.changes_logits
        or row.allowed_mask is not None
        or (row.token_index < setting.min_tokens and len(row.stop_ids) > 0)
    )


def _refuse(
    bad: Tensor,
    error: type[MaskedRowError] | type[NonFiniteLogitsError],
    row_of: Sequence[int] | None = None,
) -> None:
    """Raise `error` with the rows where `bad` bool `[m]` holds (`row_of`: their indices)."""
    if bool(bad.any()):
        rows: list[int] = bad.nonzero().flatten().tolist()
        raise error(rows if row_of is None else [row_of[row] for row in rows])


# --- changes to logits -------------------------------------------------------------------------


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
        work[rows] = chosen.masked_fill_(forbidden, _NEGATIVE_INFINITY)


def _unpack(words: Tensor) -> Tensor:
    """int32 `[m, words]`, lowest bit first, as bool `[m, 32 * words]`."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)


def _chunks(rows: Tensor, width: int) -> Iterator[Tensor]:
    """`rows` in pieces, for work that makes `width` float64 elements of each row."""
    elements = _CHUNK_ELEMENTS_CPU if rows.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, elements // width)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


# --- the draw ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draw:
    """What the draw needs of each row: float64 `[m]`, `top_k` int64 `[m]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[SamplingRow], settings: Sequence[_Settings], device: torch.device
    ) -> _Draw:
        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        numbers = uniform(
            [row.seed for row in rows],
            [row.sequence_index for row in rows],
            [row.token_index for row in rows],
        )
        return cls(
            temperature=floats([s.temperature for s in settings]),
            top_k=torch.tensor([s.top_k for s in settings], device=device),
            top_p=floats([s.top_p for s in settings]),
            min_p=floats([s.min_p for s in settings]),
            uniform=torch.from_numpy(numbers).to(device),
        )

    def rows(self, index: Tensor) -> _Draw:
        return _Draw(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
        )


def _draw_tokens(work: Tensor, draw: _Draw) -> Tensor:
    """Token ids int64 `[m]` drawn from processed logits `[m, vocab]`."""
    if _is_native(work):
        return _draw_natively(work, draw)
    vocab_size = work.shape[1]
    top = work.amax(dim=-1)
    totals = _total_weights(work, top, draw)
    token_ids, resolved = _draw_among(work, top, totals, draw, _CANDIDATES[0])
    for count in (*_CANDIDATES[1:], vocab_size):
        left = (~resolved).nonzero().flatten()
        for part in _chunks(left, vocab_size):
            token_ids[part], resolved[part] = _draw_among(
                work[part], top[part], totals[part], draw.rows(part), count
            )
    return token_ids


def _is_native(work: Tensor) -> bool:
    return work.device.type == "cpu" and is_built()


def _draw_natively(work: Tensor, draw: _Draw) -> Tensor:
    return draw_tokens(
        work,
        temperature=draw.temperature,
        top_k=draw.top_k,
        top_p=draw.top_p,
        min_p=draw.min_p,
        uniform=draw.uniform,
        weight_bits=_weight_bits(work.shape[1]),
    )


def _draw_among(
    work: Tensor, top: Tensor, totals: Tensor, draw: _Draw, count: int
) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[m]` if the `count` leading tokens suffice, and bool `[m]` whether."""
    values, ids, trusted = _leading(work, count)
    rank, resolved = _walk(_weights(values, top, draw, work.shape[1]), trusted, totals, draw)
    return _at(ids, rank.clamp(max=ids.shape[1] - 1)), resolved


def _leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` leading tokens of each row: higher logits first, equal ones by id.

    Returns values and ids `[m, count]`, and for each row how many of them are sure: where equal
    values were cut off at the end, which of them stand here is arbitrary.
    """
    vocab_size = logits.shape[1]
    if count >= vocab_size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids, torch.full_like(ids[:, 0], vocab_size)
    values, ids = logits.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), (values > values[:, -1:]).sum(dim=-1)


def _weight_bits(vocab_size: int) -> int:
    """Bits of the top token's weight: as many as a double has, if the vocabulary's sum fits."""
    return min(52, 62 - vocab_size.bit_length())


def _weights(values: Tensor, top: Tensor, draw: _Draw, vocab_size: int) -> Tensor:
    """Integer weights of logits `[m, k]`, in units that make the top token's a power of two."""
    scaled = (values.double() - top.double().unsqueeze(1)) / draw.temperature.unsqueeze(1)
    return scaled.exp_().mul_(2.0 ** _weight_bits(vocab_size)).to(torch.int64)


def _total_weights(work: Tensor, top: Tensor, draw: _Draw) -> Tensor:
    """Sum of all weights of a row, int64 `[m]`; 0 where top-k makes it unnecessary."""
    return _sum_weights(work, top, draw, (draw.top_k >= work.shape[1]).nonzero().flatten())


def _sum_weights(work: Tensor, top: Tensor, draw: _Draw, rows: Tensor) -> Tensor:
    """Sum of all weights of the given rows, 0 of the others; int64 `[m]`."""
    totals = torch.zeros_like(draw.top_k)
    for part in _chunks(rows, work.shape[1]):
        weights = _weights(work[part], top[part], draw.rows(part), work.shape[1])
        totals[part] = weights.sum(dim=-1)
    return totals


def _walk(weights: Tensor, trusted: Tensor, totals: Tensor, draw: _Draw) -> tuple[Tensor, Tensor]:
    """Cut by top-k, top-p and min-p, then invert the cumulative distribution.

    Args:
        weights: int64 `[m, k]`, highest first: the leading tokens, or all of them.
        trusted: int64 `[m]`: how many of them are sure to be the leading ones.
        totals: int64 `[m]`: the weight of the whole vocabulary, where top-k is off.

    Returns:
        rank: int64 `[m]`: the drawn token's place in the order.
        resolved: bool `[m]`: whether the trusted tokens sufficed to know it.
    """
    count = weights.shape[1]
    cumulative = weights.cumsum(dim=-1)
    ranks = torch.arange(count, device=weights.device)
    top_k_inside = draw.top_k <= trusted
    mass = torch.where(top_k_inside, _at(cumulative, draw.top_k.clamp(max=count) - 1), totals)
    before = (cumulative - weights).double()
    limit = torch.where(draw.top_p < 1.0, draw.top_p * mass.double(), float("inf"))
    least = draw.min_p * weights[:, 0].double()
    kept = (
        (ranks < draw.top_k.unsqueeze(1))
        & (before < limit.unsqueeze(1))
        & (weights.double() >= least.unsqueeze(1))
    ).sum(dim=-1)
    # Whether the last kept token is known: the cut lies among the trusted tokens,
    known = top_k_inside | (totals > 0)  # the mass that top-p is a part of
    closed = top_k_inside | ((kept < trusted) & known)
    mass = torch.where(closed, _at(cumulative, (kept - 1).clamp(min=0)), mass)
    # or there is no cut, and the mass is the vocabulary's.
    uncut = (totals > 0) & (draw.top_p == 1.0) & (draw.min_p == 0.0)
    target = (draw.uniform * mass.double()).to(torch.int64).minimum(mass - 1)
    rank = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    return rank, (closed | uncut) & (rank < trusted)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values[i, index[i]]`, `[m]`."""
    return values.gather(1, index.unsqueeze(1)).squeeze(1)


class Pending:
    """Ids sampled on the device, on their way to the host.

    Attributes:
        ids: int64 `[n]`, on the device.
    """

    def __init__(self, ids: Tensor, unsure: Tensor) -> None:
        self.ids = ids
        both = torch.stack((ids, unsure.long()))
        self._arrived: torch.cuda.Event | None = None
        if both.is_cuda:
            self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._both = both

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Wait; ids int64 `[n]`, and bool `[n]`: rows whose id is not sure (their logits are not
        finite, or the draw needs more of the order than was looked at)."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids, unsure = self._both.numpy()
        return ids, unsure != 0


class Drawing:
    """Samples the same rows at step after step, without waiting for the device.

    Args:
        rows: as they are before the first step; only their `token_index` grows.
        settings: theirs.
        device: where the logits will be.
    """

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        settings: Sequence[_Settings],
        device: torch.device,
        vocab_size: int,
    ) -> None:
        drawn = [index for index, setting in enumerate(settings) if setting.temperature > 0.0]
        self._rows = [rows[index] for index in drawn]
        self._settings = [settings[index] for index in drawn]
        self._drawn = torch.tensor(drawn, dtype=torch.int64, device=device)
        self._seeds = np.array([row.seed & _MASK_64 for row in self._rows], np.uint64)
        self._indices = np.array([row.sequence_index for row in self._rows], np.int64)
        self._next = np.array([row.token_index for row in self._rows], np.int64)
        if drawn:
            self._draw = _Draw.of(self._rows, self._settings, device)
            self._weighed = (self._draw.top_k >= vocab_size).nonzero().flatten()

    def start(self, logits: Tensor) -> Pending:
        """Sample the next token of each row of `logits` float32 `[n, vocab]`."""
        highest, ids = logits.max(dim=-1)
        unsure = ~torch.isfinite(highest)
        if self._rows:
            numbers = torch.from_numpy(uniform(self._seeds, self._indices, self._next))
            self._next += 1
            if logits.is_cuda:
                numbers = numbers.pin_memory()  # from pageable memory a copy waits for the device
            draw = replace(self._draw, uniform=numbers.to(logits.device, non_blocking=True))
            work = logits[self._drawn]
            if _is_native(work):
                ids[self._drawn] = _draw_natively(work, draw)
                return Pending(ids, unsure)
            top = highest[self._drawn]
            totals = _sum_weights(work, top, draw, self._weighed)
            drawn, resolved = _draw_among(work, top, totals, draw, _CANDIDATES[0])
            ids[self._drawn] = drawn
            unsure[self._drawn] |= ~resolved
        return Pending(ids, unsure)


# --- log-probabilities -------------------------------------------------------------------------


def _normalizers(logits: Tensor) -> Tensor:
    """Natural log of the sum of exponentials of each row of `[n, vocab]`, float64 `[n]`."""
    parts = [part.double().logsumexp(dim=-1) for part in _chunks(logits, logits.shape[1])]
    return torch.cat(parts)


def token_logprobs(logits: Tensor, token_ids: Sequence[int] | Tensor) -> Tensor:
    """Natural-log probability of one token per row.

    Args:
        logits: `[n, vocab]`, unprocessed.
        token_ids: `[n]`.

    Returns:
        float64 `[n]`, on the logits' device.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    if len(ids) == 0:
        return torch.zeros(0, dtype=torch.float64, device=logits.device)
    return _at(logits, ids).double() - _normalizers(logits)


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int] | Tensor, num_alternatives: int | Sequence[int]
) -> list[TokenLogprobs]:
    """Natural-log probabilities of given tokens and of the most probable ones beside them.

    Args:
        logits: `[n, vocab]`, unprocessed: this is the model's own distribution.
        token_ids: `[n]`; always part of the result.
        num_alternatives: how many of the most probable tokens, for all rows or for each.

    Returns:
        For each row token id -> log-probability, highest first, equal ones by id.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    rows = len(ids)
    wanted = [num_alternatives] * rows if isinstance(num_alternatives, int) else num_alternatives
    if rows == 0:
        return []
    normalizers = _normalizers(logits)
    own = (_at(logits, ids).double() - normalizers).tolist()
    most = min(max(wanted), logits.shape[1])
    top_values, top_ids = _most_probable(logits, most)
    top = (top_values.double() - normalizers.unsqueeze(1)).tolist()
    return [
        _merged(dict(zip(some_ids[:count], values[:count], strict=True)), token, logprob)
        for some_ids, values, count, token, logprob in zip(
            top_ids.tolist(), top, wanted, ids.tolist(), own, strict=True
        )
    ]


def _merged(alternatives: dict[int, float], token: int, logprob: float) -> dict[int, float]:
    if token in alternatives:
        return alternatives
    # It is not among the most probable, so it stands behind them.
    return {**alternatives, token: logprob}


def _most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logits and ids `[n, count]` of the leading tokens, in their order."""
    if count == 0:
        empty = logits[:, :0]
        return empty, empty.long()
    # Some more than asked for, so that equal logits at the end seldom need a full sort.
    values, ids, trusted = _leading(logits, 2 * count + 16)
    values, ids = values[:, :count].clone(), ids[:, :count].clone()
    unsure = (trusted < count).nonzero().flatten()
    for part in _chunks(unsure, logits.shape[1]):
        all_values, all_ids, _ = _leading(logits[part], logits.shape[1])
        values[part], ids[part] = all_values[:, :count], all_ids[:, :count]
    return values, ids


def _with_logprobs(logits: Tensor, token_ids: list[int], counts: Sequence[int | None]) -> Sampled:
    """Add log-probabilities to the rows that ask for so many alternatives (None: for none)."""
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    token_logprob: list[float | None] = [None] * len(token_ids)
    asking = [(row, count) for row, count in enumerate(counts) if count is not None]
    if asking:
        rows = [row for row, _ in asking]
        found = logprobs_of(
            logits[torch.tensor(rows, device=logits.device)],
            [token_ids[row] for row in rows],
            [count for _, count in asking],
        )
        for row, alternatives in zip(rows, found, strict=True):
            logprobs[row] = alternatives
            token_logprob[row] = alternatives[token_ids[row]]
    return Sampled(token_ids, logprobs, token_logprob)
