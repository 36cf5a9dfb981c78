"""From logits to token ids.

The order of operations on a row, as in vLLM and Hugging Face: repetition, presence and frequency
penalties; logit bias; stop ids before `min_tokens`; the grammar's mask
(`onestem.engine.logit_changes`); temperature; top-k; top-p; min-p. What is left is sampled by
inverting the cumulative distribution with one number in (0, 1) that depends on (seed, sequence
index, token index) alone (`onestem.engine.random`, `onestem.engine.draw`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onestem.engine.draw import Draw, draw_tokens, needs_much_of_the_order
from onestem.engine.drawing import Drawing
from onestem.engine.logit_changes import LogitChanges, is_changed
from onestem.engine.logprobs import logprobs_of
from onestem.engine.sampling_row import SamplingRow, SamplingSettings
from onestem.errors import OnestemError, RequestError
from onestem.request import SamplingParams, TokenLogprobs

__all__ = [
    "MaskedRowError",
    "NonFiniteLogitsError",
    "Sampled",
    "Sampler",
    "SamplingDefaults",
]

_CACHE_ENTRIES = 8192


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
        self._settings: dict[int, tuple[SamplingParams, SamplingSettings]] = {}
        self._changes = LogitChanges(vocab_size)

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
            if setting.temperature > 0.0 or is_changed(row, setting)
        ]
        if wanted:
            sampled = self._sample_processed(logits, rows, settings, wanted)
            for index, token in zip(wanted, sampled, strict=True):
                token_ids[index] = token
        return _with_logprobs(logits, token_ids, [setting.logprobs for setting in settings])

    def drawing(self, rows: Sequence[SamplingRow], device: torch.device) -> Drawing | None:
        """How rows sample at step after step without the host between; None if what one of them
        may sample depends on its last token (a grammar, `min_tokens`, or see `draws`)."""
        if not all(self.draws(row.params) for row in rows):
            return None
        settings = [self._settings_of(row.params) for row in rows]
        if any(is_changed(row, setting) for row, setting in zip(rows, settings, strict=True)):
            return None
        return Drawing(rows, settings, device, self.vocab_size)

    def draws(self, params: SamplingParams) -> bool:
        """Whether a `Drawing` may have rows of such parameters: no penalties, no bias, and no need
        of more of the order than is looked at (a top-k between the two)."""
        setting = self._settings_of(params)
        much = needs_much_of_the_order(setting.top_k, self.vocab_size)
        return not setting.changes_logits and not (much and setting.temperature > 0)

    def join(self, drawing: Drawing, places: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """Have a drawing sample further rows, of which `drawing` would accept each."""
        drawing.put(places, rows, [self._settings_of(row.params) for row in rows])

    def _sample_processed(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        settings: Sequence[SamplingSettings],
        wanted: list[int],
    ) -> list[int]:
        """Tokens of the rows `wanted`, those that are not plainly greedy."""
        rows = [rows[index] for index in wanted]
        settings = [settings[index] for index in wanted]
        work = logits[torch.tensor(wanted, device=logits.device)].float()  # [m, vocab], a copy
        self._changes.apply(work, rows, settings)
        highest, best = work.max(dim=-1)
        _refuse(highest == -math.inf, MaskedRowError, wanted)
        token_ids: list[int] = best.tolist()
        drawn = [index for index, setting in enumerate(settings) if setting.temperature > 0.0]
        if drawn:
            if len(drawn) < len(rows):
                work = work[torch.tensor(drawn, device=work.device)]
            draw = Draw.of([rows[i] for i in drawn], [settings[i] for i in drawn], work.device)
            for index, token in zip(drawn, draw_tokens(work, draw).tolist(), strict=True):
                token_ids[index] = token
        return token_ids

    def _settings_of(self, params: SamplingParams) -> SamplingSettings:
        known = self._settings.get(id(params))
        if known is None:
            if len(self._settings) >= _CACHE_ENTRIES:
                self._settings.clear()
            known = self._settings[id(params)] = (params, self._resolve(params))
        return known[1]

    def _resolve(self, params: SamplingParams) -> SamplingSettings:
        self.check(params)

        def value(name: str, neutral: float) -> float:
            for source in (params, self._defaults):
                found = getattr(source, name) if source is not None else None
                if found is not None:
                    return float(found)
            return neutral

        top_k = int(value("top_k", 0))
        bias = params.logit_bias or {}
        return SamplingSettings(
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


def _refuse(
    bad: Tensor,
    error: type[MaskedRowError] | type[NonFiniteLogitsError],
    row_of: Sequence[int] | None = None,
) -> None:
    """Raise `error` with the rows where `bad` bool `[m]` holds (`row_of`: their indices)."""
    if bool(bad.any()):
        rows: list[int] = bad.nonzero().flatten().tolist()
        raise error(rows if row_of is None else [row_of[row] for row in rows])


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
