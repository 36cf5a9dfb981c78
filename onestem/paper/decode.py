"""Decoding throughput behind one prefix, without the time of prompts (Hydragen, appendix E.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from onestem.llm import LLM
from onestem.options import ShareMode
from onestem.paper.bench import Bench
from onestem.paper.experiment import Cell, Step
from onestem.request import Request, SamplingParams

__all__ = ["DecodeSweep", "decode"]

# While later prompts are computed, the first of a batch decode already. For these steps sequences
# may sample extra tokens: a step per STEP_TOKENS of prompts, at most MOST_STEPS.
STEP_TOKENS, MOST_STEPS = 256, 4096
# A rate is measured over this many seconds, but at least these steps.
ENOUGH_SECONDS, FEWEST_STEPS = 2.0, 4
MODES: tuple[ShareMode, ...] = ("full", "storage", "off", "no-attention")


@dataclass(frozen=True)
class DecodeSweep:
    """Thousands of tokens per second, or seconds, of batches that decode behind one prefix.

    Attributes:
        new: tokens sampled by each sequence; a rate uses fewer where they take long.
    """

    model: str
    batches: tuple[int, ...]
    prefixes: tuple[int, ...]
    new: int
    modes: tuple[ShareMode, ...] = MODES
    metric: Literal["thousand tokens/s", "seconds"] = "thousand tokens/s"

    def places(self) -> list[dict[str, int]]:
        return [
            {"batch": batch, "prefix": prefix} for batch in self.batches for prefix in self.prefixes
        ]

    def steps(self, bench: Bench) -> list[Step]:
        return [
            partial(self._measure, bench, mode, batch, prefix)
            for mode in self.modes
            for batch in bench.thin(self.batches)
            for prefix in bench.thin(self.prefixes)
        ]

    def _measure(self, bench: Bench, mode: ShareMode, batch: int, prefix: int) -> Iterable[Cell]:
        at = {"batch": batch, "prefix": prefix}
        ran = {
            "batch": bench.size(batch, 2),
            "prefix": bench.size(prefix, 2),
            "new": bench.size(self.new, 4),
        }
        longest = bench.size(max(self.prefixes), 2) + ran["new"] + MOST_STEPS + 1
        llm = bench.llm(self.model, longest, mode)
        if ran["batch"] * own_tokens(llm, mode, **ran) > llm.kv_tokens - ran["prefix"]:
            yield Cell(at, mode, None, ran, note="does not fit KV memory")
            return
        enough = ENOUGH_SECONDS if self.metric == "thousand tokens/s" else math.inf
        seconds, tokens, counts = decode(llm, **ran, enough=enough)
        if not tokens:
            yield Cell(at, mode, None, ran, counts, "the whole batch never decodes at once")
            return
        value = seconds if self.metric == "seconds" else tokens / seconds / 1000
        yield Cell(at, mode, value, ran | {"new": tokens // ran["batch"]}, counts)


def own_tokens(llm: LLM, mode: ShareMode, batch: int, prefix: int, new: int) -> int:
    """KV tokens that a sequence does not share, in whole pages."""
    page = llm.engine.cache.pool.page_size
    tokens = new + 1 + (prefix if mode == "off" else 0)
    return (-(-tokens // page) + 1) * page


def decode(
    llm: LLM, batch: int, prefix: int, new: int, enough: float = math.inf
) -> tuple[float, int, dict[str, float]]:
    """Seconds and tokens of `new` steps in which the whole batch decodes, and the engine's counts.

    0 tokens: there was no such step. Each sequence has one token of its own after the prefix.
    Steps end after `enough` seconds.
    """
    engine = llm.engine
    prompts = batch * (prefix + 1) if engine.share == "off" else prefix + batch
    most = new + 2 + min(MOST_STEPS, prompts // STEP_TOKENS)
    for request in _requests(llm, batch, prefix, most):
        engine.add_request(request)
    engine.step()
    while engine.has_unfinished() and not _all_decode(llm, batch):
        engine.step()
    before, started = engine.stats.to_dict(), time.perf_counter()
    for step in range(new):
        late = step >= FEWEST_STEPS and time.perf_counter() - started > enough
        if late or not _all_decode(llm, batch):
            break
        engine.step()
    seconds, after = time.perf_counter() - started, engine.stats.to_dict()
    for i in range(batch):
        engine.abort(str(i))
    counts = {name: after[name] for name in ("logical_prompt_tokens", "processed_prompt_tokens")}
    counts["shared_read_tokens"] = after["shared_read_tokens"] - before["shared_read_tokens"]
    return seconds, int(after["output_tokens"] - before["output_tokens"]), counts


def _all_decode(llm: LLM, batch: int) -> bool:
    """Whether the last step was a decode of the whole batch, without chunks of prompts."""
    return len(llm.engine.order) == batch and not llm.engine.order.chunks


def _requests(llm: LLM, batch: int, prefix: int, max_tokens: int) -> Iterator[Request]:
    vocabulary = llm.config.vocab_size
    head = np.random.default_rng(prefix).integers(0, vocabulary, prefix).tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for i in range(batch):
        ids = [*head, i % vocabulary]
        yield Request(request_id=str(i), prompt_token_ids=ids, params=params)
