"""Scores of a job in the shape of MMLU: subjects with examples in common, questions, options.

    python -m benchmarks.scores [--model shape:0.1b] [--device cpu] [--subjects 10]
        [--questions 2000] [--prefix mmlu] [--question mmlu] [--options 4] [--option-tokens 1]
        [--peer hf] [--batch-size 8] [--out benchmarks/results/scores.json]

Each subject's examples stand before all of its questions; lengths are those of `onestem.lengths`.
`--question` counts all of a question's own tokens. `--peer hf` scores the same pairs with lm-eval's
`hf` model, on the same weights: a directory's, since a shape has none on the disk. Beside seconds,
rows are told: what was computed, and the different tokens that there are, behind which options are
read. What lm-eval's model computes is counted as its forward passes are called.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batch import machine
from onestem.lengths import Lengths, draw_length, named, parse_lengths
from onestem.llm import LLM
from onestem.models.find import find_model
from onestem.shapes import is_shape

Pair = tuple[list[int], list[list[int]]]  # a prompt and its options


def main() -> None:
    options = parse()
    with LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        max_model_len=options.max_model_len,
        seed=options.seed,
    ) as llm:
        pairs = exam(options, llm.config.vocab_size)
        limit = llm.engine.max_model_len
        longest = max(len(prompt) + len(some[0]) - 1 for prompt, some in pairs)
        if longest > limit:
            sys.exit(f"the longest prompt takes {longest} tokens, the model has room for {limit}")
        warm(llm)
        result = measure(llm, pairs)
        if options.peer is not None:
            result["peer"] = measure_hf(llm, pairs, options)
    result = {
        "command": f"python -m benchmarks.scores {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": str(date.today()),
        "model": options.model,
        "device": str(options.device),
        "dtype": options.dtype,
        "subjects": options.subjects,
        "questions": options.questions,
        "lengths": {"prefix": named(options.prefix), "question": named(options.question)},
        "options": options.options,
        "option_tokens": options.option_tokens,
        **result,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:0.1b", help="a directory, or shape:NAME")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--subjects", type=int, default=10)
    parser.add_argument("--questions", type=int, default=2000, help="of all subjects together")
    parser.add_argument("--prefix", type=prefix_lengths, default="mmlu", help="of 5 examples")
    parser.add_argument("--question", type=question_lengths, default="mmlu")
    parser.add_argument("--options", type=int, default=4)
    parser.add_argument("--option-tokens", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", choices=("hf",))
    parser.add_argument("--batch-size", type=int, default=8, help="of the peer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.peer is not None and is_shape(options.model):
        parser.error("--peer hf needs a model's directory: a shape has no weights on the disk")
    return options


def prefix_lengths(text: str) -> Lengths:
    return parse_lengths("--prefix", text, "prefix")


def question_lengths(text: str) -> Lengths:
    return parse_lengths("--question", text, "question")


def exam(options: argparse.Namespace, vocab_size: int) -> list[Pair]:
    """Questions in random order of subjects. All of a question's options are different."""
    rng = np.random.default_rng(options.seed)

    def drawn(count: int) -> list[int]:
        return rng.integers(8, vocab_size, count).tolist()

    heads = [drawn(draw_length(options.prefix, rng)) for _ in range(options.subjects)]
    first = rng.choice(np.arange(8, vocab_size), options.options, replace=False).tolist()
    choices = [[token, *drawn(options.option_tokens - 1)] for token in first]
    return [
        (heads[i % options.subjects] + drawn(draw_length(options.question, rng)), choices)
        for i in rng.permutation(options.questions).tolist()
    ]


def warm(llm: LLM) -> None:
    """Kernels are compiled and memory is there before anything is timed."""
    llm.score([[8, 9, 10], [8, 9, 11]], [[[8], [9, 10]]] * 2)
    llm.engine.cache.clear()
    llm.engine.reset_stats()


def measure(llm: LLM, pairs: list[Pair]) -> dict[str, Any]:
    began = time.perf_counter()
    scores = llm.score([prompt for prompt, _ in pairs], [some for _, some in pairs])
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "questions_per_second": len(pairs) / seconds,
        "distinct_rows": distinct_rows(pairs),
        "computed_rows": llm.engine.stats.processed_prompt_tokens,
        "pair_tokens": sum(len(prompt) + len(one) for prompt, some in pairs for one in some),
        "mean_logprob": float(np.mean([one.logprob for some in scores for one in some])),
    }


def distinct_rows(pairs: list[Pair]) -> int:
    """Different tokens behind different beginnings, but for the last one of each option: neighbours
    in order share as much as anybody."""
    paths = sorted({tuple(prompt + one[:-1]) for prompt, some in pairs for one in some})
    shared = 0
    for before, path in pairwise(paths):
        same = zip(before, path, strict=False)
        shared += next((i for i, (a, b) in enumerate(same) if a != b), min(len(before), len(path)))
    return sum(map(len, paths)) - shared


def measure_hf(llm: LLM, pairs: list[Pair], options: argparse.Namespace) -> dict[str, Any]:
    """lm-eval's `hf` model on the same pairs of token ids."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        str(find_model(options.model)), device=str(llm.device), dtype=options.dtype,
        batch_size=options.batch_size, max_length=llm.engine.max_model_len, backend="causal",
    )  # fmt: skip
    asked = [(("", ""), prompt, one) for prompt, some in pairs for one in some]
    model._loglikelihood_tokens(asked[: options.batch_size], disable_tqdm=True)
    rows, call = 0, model._model_call

    def counted(inputs: Any, *others: Any, **named: Any) -> Any:
        nonlocal rows
        rows += inputs.numel()
        return call(inputs, *others, **named)

    model._model_call = counted
    began = time.perf_counter()
    answers = model._loglikelihood_tokens(asked, disable_tqdm=True)
    seconds = time.perf_counter() - began
    return {
        "engine": "lm-eval hf",
        "batch_size": options.batch_size,
        "seconds": seconds,
        "questions_per_second": len(pairs) / seconds,
        "computed_rows": rows,
        "mean_logprob": float(np.mean([logprob for logprob, _ in answers])),
    }


if __name__ == "__main__":
    main()
