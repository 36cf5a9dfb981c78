"""A synthetic job of prompts that share text, and its measurement: `onestem bench`."""

from __future__ import annotations

import hashlib
import math
import re
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from onestem.errors import ConfigError
from onestem.request import Request, SamplingParams

if TYPE_CHECKING:
    from onestem.llm import LLM
    from onestem.options import EngineOptions
    from onestem.planner import JobPlan

MOST_REQUESTS = 10**7
MOST_TOKENS = 10**7

Part = Literal["prefix", "question", "answer"]
"""What is counted: a shared prefix, a request's own prompt tokens, or its sampled ones."""

FEWEST: Mapping[Part, int] = {"prefix": 0, "question": 1, "answer": 1}


class Distribution(Protocol):
    """Token counts that a seed draws, `least` or more; as text, how an option gives it."""

    @property
    def least(self) -> int:
        """A lower bound of what is drawn."""
        ...

    def draw(self, rng: np.random.Generator) -> int:
        """One count."""
        ...


Lengths = int | Distribution


def draw_length(lengths: Lengths, rng: np.random.Generator) -> int:
    """One count. A number gives itself and draws nothing from the generator."""
    return lengths if isinstance(lengths, int) else lengths.draw(rng)


def named(lengths: Lengths) -> int | str:
    """As an option gives it, for results."""
    return lengths if isinstance(lengths, int) else str(lengths)


def token_count(option: str, text: str, part: Part) -> int:
    """The number that an option gives.

    Raises:
        ConfigError: it is no number from `FEWEST` to `MOST_TOKENS`; one line that names the option.
    """
    count = int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else -1
    if not FEWEST[part] <= count <= MOST_TOKENS:
        raise ConfigError(
            f"{option} is {text!r}: expected a number from {FEWEST[part]} to {MOST_TOKENS:,}"
        )
    return count


@dataclass(frozen=True)
class BatchCase:
    """A synthetic job: a tree of prefixes over random token ids.

    Attributes:
        groups: top prefixes.
        degrees: branches below each node of a level; the last is requests per deepest prefix.
        prefixes: tokens of each level's prefixes, as many as `degrees`.
        distinct, output: tokens of its own and sampled tokens of each request.
        input_order: `shuffled`, `sorted` (by prefix) or `round-robin` (all prefixes in turn: the
            question-major order of a data set).
    """

    groups: int
    degrees: tuple[Lengths, ...]
    prefixes: tuple[Lengths, ...]
    distinct: Lengths
    output: Lengths
    input_order: str
    seed: int

    @staticmethod
    def parse(
        *,
        groups: int,
        degree: str,
        prefix: str,
        distinct: str,
        output: str,
        input_order: str,
        seed: int,
        lengths: Callable[[str, str, Part], Lengths] = token_count,
    ) -> BatchCase:
        """A case from the command line's options.

        Args:
            lengths: reads an option's text; the first argument names the option, for errors.
        """
        degrees = _degrees(degree)
        prefixes = tuple(lengths("prefix", part, "prefix") for part in prefix.split(","))
        if len(degrees) != len(prefixes):
            raise ConfigError(
                f"degree has {len(degrees)} levels, prefix {len(prefixes)}: give as many of each"
            )
        if input_order not in ("shuffled", "sorted", "round-robin"):
            raise ConfigError(
                f"input_order is {input_order!r}, expected shuffled, sorted or round-robin"
            )
        for name, value, least in (("groups", groups, 1), ("seed", seed, 0)):
            if value < least:
                raise ConfigError(f"{name} is {value}, expected at least {least}")
        count = groups * math.prod(degrees)
        if count > MOST_REQUESTS:
            raise ConfigError(
                f"groups and degree make {count} requests, limit is {MOST_REQUESTS}: lower them"
            )
        own = lengths("distinct", distinct, "question")
        sampled = lengths("output", output, "answer")
        return BatchCase(groups, degrees, prefixes, own, sampled, input_order, seed)

    def describe(self) -> dict[str, Any]:
        """Its fields for results, and the totals that were drawn: tokens of all prefixes (each
        counts once), of all requests' own parts, and of all answers."""
        *prefixes, distinct, output = self.sizes
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "degrees": [named(degree) for degree in self.degrees],
            "prefixes": [named(lengths) for lengths in self.prefixes],
            "distinct": named(self.distinct),
            "output": named(self.output),
            "drawn": {
                "prefix_tokens": sum(map(sum, prefixes)),
                "distinct_tokens": sum(distinct),
                "output_tokens": sum(output),
            },
        }

    def requests(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """Token ids of the prompts and how many to sample, in the case's order."""
        rng = np.random.default_rng(self.seed)

        def draw(count: int) -> list[int]:
            return [int(token) for token in rng.integers(0, vocab_size, count)]

        *levels, output = self.sizes
        prompts: list[list[int]] = [[]]
        for sizes, below in zip(levels, self.branches, strict=True):
            parents = (ids for ids, count in zip(prompts, below) for _ in range(count))
            prompts = [ids + draw(size) for ids, size in zip(parents, sizes, strict=True)]
        requests = list(zip(prompts, output, strict=True))
        if self.input_order == "shuffled":
            return [requests[i] for i in rng.permutation(len(requests))]
        if self.input_order == "round-robin":
            group = np.arange(self.groups)
            for below in self.branches[1:]:
                group = np.repeat(group, below)
            place = np.arange(len(group)) - np.searchsorted(group, group)
            return [requests[i] for i in np.lexsort((group, place))]
        return requests

    @property
    def shortest(self) -> int:
        """A lower bound of the tokens of a prompt with its answer."""
        return sum(map(min, self.sizes))

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Tokens of each prefix, level by level, of each request's own part and of each answer; in
        the tree's order."""
        counts = list(map(sum, self.branches))
        parts = (*self.prefixes, self.distinct, self.output)
        sizes = []
        for i, (lengths, count) in enumerate(zip(parts, [*counts, counts[-1]], strict=True), 1):
            rng = np.random.default_rng((self.seed, i))
            sizes.append([draw_length(lengths, rng) for _ in range(count)])
        return sizes

    @cached_property
    def branches(self) -> list[list[int]]:
        """How many nodes are below each node of a level, from the root on."""
        found = [[self.groups]]
        for level, degree in enumerate(self.degrees):
            rng = np.random.default_rng((self.seed, 0, level))
            found.append([draw_length(degree, rng) for _ in range(sum(found[-1]))])
        return found


def _degrees(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text, re.ASCII):
        raise ConfigError(
            f"degree is {text!r}, expected numbers of at least 1 with commas between, like 64,2"
        )
    return tuple(map(int, text.split(",")))


def run_batch(llm: LLM, case: BatchCase, *, warm_up: bool = True) -> dict[str, Any]:
    """Run a case, and give its figures."""
    if case.shortest > llm.engine.max_model_len:  # before they are drawn
        raise ConfigError(
            f"a prompt with its answer has {case.shortest} tokens at least, max_model_len is "
            f"{llm.engine.max_model_len}: shorten prefix, distinct or output, or raise "
            "kv_memory or max_model_len"
        )
    from onestem.engine.warm_up import warm_up as run_full_step

    requests = case.requests(llm.config.vocab_size)
    prompts = [ids for ids, _ in requests]
    params = [_greedy(count) for _, count in requests]
    if warm_up:
        run_full_step(llm.engine, shares=(1.0,))
    llm.engine.reset_stats()
    started = time.perf_counter()
    outputs, plan = _answer(llm, prompts, params)
    seconds = time.perf_counter() - started
    stats = llm.engine.stats
    return {
        **case.describe(),
        "share": llm.engine.options.share,
        "levels": llm.options.levels,
        "order": llm.options.order,
        "max_num_seqs": llm.options.max_num_seqs,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "attention": llm.engine.options.impl,
        "kv_tokens": llm.kv_tokens,
        "requests": len(prompts),
        "seconds": seconds,
        "requests_per_s": len(prompts) / seconds,
        "output_tokens_per_s": stats.output_tokens / seconds,
        "planning_seconds": plan.report.planning_seconds,
        "planned_saving": plan.report.saving,
        **stats.to_dict(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens_sha256": _hash(outputs),
    }


def compare(
    options: EngineOptions, case: BatchCase, *, warm_up: bool = True
) -> dict[str, dict[str, Any]]:
    """The figures of a case in the options' own mode of sharing, and with none (`off`), each with a
    model of its own. A trace has the steps of the first."""
    from onestem.llm import LLM

    found: dict[str, dict[str, Any]] = {}
    for one in (options, options.replace(share="off", trace=None)):
        if one.share not in found:
            with LLM.from_options(one) as llm:
                found[one.share] = run_batch(llm, case, warm_up=warm_up)
    return found


def _answer(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], JobPlan]:
    """Output ids in the prompts' order, and the plan."""
    from onestem.planner import RunningOrder, planned

    requests = [
        Request(request_id=str(i), prompt_token_ids=ids, params=one)
        for i, (ids, one) in enumerate(zip(prompts, params, strict=True))
    ]
    order = RunningOrder(llm.plan(prompts, params))
    answers: list[list[int]] = [[] for _ in prompts]
    for output in llm.engine.run(planned(requests, order)):
        index = int(output.request_id)
        answers[index] = output.outputs[0].token_ids
        order.note(index, output.metrics.num_output_tokens)
    return answers, order.plan


@cache
def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def _hash(answers: list[list[int]]) -> str:
    digest = hashlib.sha256()
    for ids in answers:
        digest.update(np.array([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()
