"""Decoding throughput behind one prefix, without the time of prompts (Hydragen, appendix E.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from onestem.llm import LLM
from onestem.options import ShareMode
from onestem.request import Request, SamplingParams
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step
from onestem_lab.papers.needles import Asked, Needles, is_right

__all__ = ["DecodeSweep", "decode"]

# While later prompts are computed, the first of a batch decode already. For these steps sequences
# may sample extra tokens: a step per STEP_TOKENS of prompts, at most MOST_STEPS.
STEP_TOKENS, MOST_STEPS = 256, 4096
# A rate is measured over this many seconds, but at least these steps.
ENOUGH_SECONDS, FEWEST_STEPS = 2.0, 4
QUESTION_TOKENS = 20  # where ids are drawn
MODES: tuple[ShareMode, ...] = ("full", "storage", "off", "no-attention")


@dataclass(frozen=True)
class DecodeSweep:
    """Thousands of tokens per second, or seconds, of batches that decode behind one prefix.

    Attributes:
        new: tokens sampled by each sequence; a rate uses fewer where they take long.
        needles: what is asked of a model with weights of its own, whose right answers are counted;
            None: nothing, and each sequence has one token of its own.
    """

    model: str
    batches: tuple[int, ...]
    prefixes: tuple[int, ...]
    new: int
    modes: tuple[ShareMode, ...] = MODES
    metric: Literal["thousand tokens/s", "seconds"] = "thousand tokens/s"
    needles: Needles | None = None

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
        at, new = {"batch": batch, "prefix": prefix}, bench.size(self.new, 4)
        own = 1 if self.needles is None else QUESTION_TOKENS
        longest = bench.size(max(self.prefixes), 2) + own + new + MOST_STEPS
        llm = bench.llm(self.model, longest, mode)
        asked = self._asked(bench, llm, batch, prefix)
        ran = {"batch": len(asked.prompts), "prefix": asked.prefix, "new": new}
        if own_tokens(llm, asked, mode, new) > llm.kv_tokens - asked.prefix:
            yield Cell(at, mode, None, ran, note="does not fit KV memory")
            return
        enough = ENOUGH_SECONDS if self.metric == "thousand tokens/s" else math.inf
        found = decode(llm, asked, new, enough)
        if not found.tokens:
            note = "the whole batch never decodes at once"
            yield Cell(at, mode, None, ran, found.counts, note)
            return
        thousands = found.tokens / found.seconds / 1000
        value = found.seconds if self.metric == "seconds" else thousands
        counts, note = self._judged(llm, asked, mode, found)
        ran["new"] = found.tokens // ran["batch"]
        yield Cell(at, mode, value, ran, counts, note)

    def _asked(self, bench: Bench, llm: LLM, batch: int, prefix: int) -> Asked:
        count, tokens = bench.size(batch, 2), bench.size(prefix, 2)
        if self.needles is None:
            return drawn(llm, count, tokens, count, own=1)
        facts = bench.size(self.needles.facts)
        if llm.options.random_weights or llm.tokenizer is None:
            return drawn(llm, count, tokens, facts, own=QUESTION_TOKENS)
        return self.needles.asked(llm.tokenizer, count, tokens, facts)

    def _judged(
        self, llm: LLM, asked: Asked, mode: ShareMode, found: Decoded
    ) -> tuple[dict[str, float], str]:
        """The counts of a run, and a note on its answers."""
        if self.needles is None or mode == "no-attention":
            return found.counts, ""
        if not asked.right or llm.tokenizer is None:
            return found.counts, "no answers were counted: weights are random, or without tokenizer"
        pairs = zip(found.answers, asked.right, strict=True)
        right = sum(is_right(llm.tokenizer, *pair) for pair in pairs)
        asks = len(asked.right)
        counts = {**found.counts, "questions": asks, "right_answers": right}
        return counts, f"{right:,} of {asks:,} answers are right"


def own_tokens(llm: LLM, asked: Asked, mode: ShareMode, new: int) -> int:
    """KV tokens that sequences do not share, in whole pages."""
    page = llm.engine.cache.pool.page_size
    shared = 0 if mode == "off" else asked.prefix
    lengths = (len(ids) + new - shared for ids in asked.prompts)
    return sum((-(-tokens // page) + 1) * page for tokens in lengths)


@dataclass(frozen=True)
class Decoded:
    """`tokens` that were sampled in `seconds` in which the whole batch decoded; 0: there were no
    such. `answers`: the first tokens that each sequence sampled."""

    seconds: float
    tokens: int
    counts: dict[str, float]
    answers: list[list[int]]


def decode(llm: LLM, asked: Asked, new: int, enough: float = math.inf) -> Decoded:
    """Let a batch decode for `new` steps, without the time of its prompts; steps end after `enough`
    seconds."""
    engine, batch = llm.engine, len(asked.prompts)
    prompts = sum(map(len, asked.prompts))
    if engine.options.share != "off":
        prompts -= (batch - 1) * asked.prefix
    most = new + 2 + min(MOST_STEPS, prompts // STEP_TOKENS)
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    for i, ids in enumerate(asked.prompts):
        engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    outputs = engine.step()
    while engine.has_unfinished() and not _all_decode(llm, batch):
        outputs += engine.step()
    before, started = engine.stats.to_dict(), time.perf_counter()
    for step in range(new):
        late = step >= FEWEST_STEPS and time.perf_counter() - started > enough
        if late or not _all_decode(llm, batch):
            break
        outputs += engine.step()
    seconds, after = time.perf_counter() - started, engine.stats.to_dict()
    outputs += [one for i in range(batch) if (one := engine.abort(str(i))) is not None]
    by_id = {one.request_id: one.outputs[0].token_ids[:new] for one in outputs}
    answers = [list(by_id[str(i)]) for i in range(batch)]
    counts = {name: after[name] for name in ("logical_prompt_tokens", "processed_prompt_tokens")}
    counts["shared_read_tokens"] = after["shared_read_tokens"] - before["shared_read_tokens"]
    tokens = int(after["output_tokens"] - before["output_tokens"])
    return Decoded(seconds, tokens, counts, answers)


def _all_decode(llm: LLM, batch: int) -> bool:
    """Whether the last step was a decode of the whole batch, without chunks of prompts."""
    return len(llm.engine.batch_rows) == batch and not llm.engine.batch_rows.chunks


def drawn(llm: LLM, batch: int, prefix: int, kinds: int, own: int) -> Asked:
    """Prompts of random ids, `own` of which are not of the prefix; after `kinds` they repeat."""
    vocabulary = llm.config.vocab_size
    rng = np.random.default_rng(prefix)
    head = rng.integers(0, vocabulary, prefix).tolist()
    if own == 1:
        return Asked([[*head, i % vocabulary] for i in range(batch)], prefix)
    tails = rng.integers(0, vocabulary, (kinds, own)).tolist()
    return Asked([head + tails[i % kinds] for i in range(batch)], prefix)
