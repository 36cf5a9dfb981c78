"""Scores of a job in the shape of MMLU: subjects with examples in common, questions, options.

    python -m onestem_lab.scores [--model shape:0.1b] [--device cpu] [--subjects 10]
        [--questions 2000] [--prefix mmlu] [--question mmlu] [--options 4] [--option-tokens 1]
        [--peer hf] [--batch-size 8,16] [--peer-questions 200] [--repeats 1]
        [--out lab/results/scores.json]

Each subject's examples stand before all of its questions; lengths are those of
`onestem_lab.lengths`. `--question` counts all of a question's own tokens. `--peer hf` scores the
same pairs with lm-eval's `hf` model, on the same weights; `--peer transformers` makes the same
forward passes without it: one for each context with all but the last token of an option, the
longest first, padded on the right. A peer's figure is that of its best batch size. It is asked the
first `--peer-questions` of the exam, and for all of them takes as much longer as its rows are more;
both take turns. Beside seconds, also those of the processor (`cpu_seconds`: for a machine that
others use too), rows are told: what was computed, and the different tokens that there are, behind
which options are read. What a peer computes is counted as its model is called. On a GPU
`products_seconds` is what the linear layers alone take for all distinct rows, measured after the
exam under a load that lasts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor

from onestem.bench import Lengths, draw_length, named
from onestem.llm import LLM
from onestem.models.find import find_model
from onestem.shapes import is_shape
from onestem_lab.lengths import parse_lengths
from onestem_lab.results import device_name, machine, write

STEP_ROWS = 8192
LASTING_SECONDS = 8.0

Pair = tuple[list[int], list[list[int]]]  # a prompt and its options
Asked = tuple[tuple[str, str], list[int], list[int]]  # texts, a prompt and an option


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
        peer = None if options.peer is None else Peer(llm, options)
        warm(llm)
        runs, theirs = [], []
        products = None
        for _ in range(options.repeats):
            runs.append(measure(llm, pairs))
            if llm.device.type == "cuda":
                products = products_seconds(llm) * runs[-1]["distinct_rows"] / STEP_ROWS
            if peer is not None:
                theirs += peer.measure(pairs, options.peer_questions)
    result = {
        "command": f"python -m onestem_lab.scores {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "transformers": transformers.__version__,
        "model": options.model,
        "device": device_name(llm.device),
        "dtype": options.dtype,
        "subjects": options.subjects,
        "questions": options.questions,
        "threads": torch.get_num_threads(),
        "lengths": {"prefix": named(options.prefix), "question": named(options.question)},
        "options": options.options,
        "option_tokens": options.option_tokens,
        **median_run(runs),
        "runs": runs,
    }
    if products is not None:
        result["products_seconds"] = products
    if theirs:
        sizes = {run["batch_size"] for run in theirs}
        best = max(
            (median_run([run for run in theirs if run["batch_size"] == size]) for size in sizes),
            key=lambda run: float(run["questions_per_second"]),
        )
        result["peer"] = {**best, "runs": theirs}
        result["against_peer"] = result["questions_per_second"] / best["questions_per_second"]
        # On a CPU that others use too seconds are those of all.
        result["against_peer_in_cpu_seconds"] = (
            best["cpu_seconds"] * best["rows_of_all"] / best["computed_rows"]
        ) / result["cpu_seconds"]
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    if options.out is not None:
        write(options.out, result)
    print(summary(result))


def summary(result: dict[str, Any]) -> str:
    """One line."""
    rows = result["computed_rows"] / result["distinct_rows"]
    line = f"exam: {result['questions_per_second']:.1f} questions/s, {rows:.4f} of distinct tokens"
    if "peer" in result:
        peer, theirs = result["peer"]["engine"], result["peer"]["questions_per_second"]
        line += f"; {peer} {theirs:.2f}: {result['against_peer']:.2f}x"
        line += f" ({result['against_peer_in_cpu_seconds']:.2f}x in CPU seconds)"
    if "products_seconds" in result:
        share = result["products_seconds"] / result["seconds"]
        line += f"; the linear layers alone take {share:.0%} of its time"
    return line


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The middle one by its rate; of an even number the slower of the two."""
    ordered = sorted(runs, key=lambda run: float(run["questions_per_second"]))
    return ordered[(len(ordered) - 1) // 2]


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
    parser.add_argument("--peer", choices=("hf", "transformers"))
    parser.add_argument("--batch-size", type=sizes, default=[8], help="of the peer, some to try")
    parser.add_argument("--peer-questions", type=int, help="of the exam; default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


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
    llm.engine.cache.clear()
    llm.engine.reset_stats()
    began, worked = time.perf_counter(), time.process_time()
    scores = llm.score([prompt for prompt, _ in pairs], [some for _, some in pairs])
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - worked,
        "questions_per_second": len(pairs) / seconds,
        "distinct_rows": distinct_rows(pairs),
        "computed_rows": llm.engine.stats.processed_prompt_tokens,
        "pair_tokens": sum(len(prompt) + len(one) for prompt, some in pairs for one in some),
        "mean_logprob": float(np.mean([one.logprob for some in scores for one in some])),
    }


@torch.inference_mode()
def products_seconds(llm: LLM) -> float:
    """Seconds that the linear layers take for `STEP_ROWS` rows, under a load that lasts: nothing
    that multiplies all distinct rows is faster."""
    decoder, config = llm.decoder, llm.config
    sizes = config.hidden_size, config.num_q_heads * config.head_dim
    x, heads = (torch.randn(STEP_ROWS, size, device=llm.device).to(decoder.dtype) for size in sizes)
    passes, began = 0, 0.0
    while passes < 2 or time.perf_counter() - began < LASTING_SECONDS:
        if passes == 1:
            began = time.perf_counter()
        for layer in decoder.layers:
            layer.qkv(x)
            layer.output(heads)
            decoder.mlp(layer, x, x)
        torch.cuda.synchronize(llm.device)
        passes += 1
    return (time.perf_counter() - began) / (passes - 1)


def distinct_rows(pairs: list[Pair]) -> int:
    """Different tokens behind different beginnings, but for the last one of each option: neighbours
    in order share as much as anybody."""
    paths = sorted({tuple(prompt + one[:-1]) for prompt, some in pairs for one in some})
    shared = 0
    for before, path in pairwise(paths):
        same = zip(before, path, strict=False)
        shared += next((i for i, (a, b) in enumerate(same) if a != b), min(len(before), len(path)))
    return sum(map(len, paths)) - shared


class Peer:
    """A model of transformers on the engine's weights: a directory's, or those of a shape that
    are made up for both."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.options = llm, options
        path = find_model(options.model)
        dtype = getattr(torch, options.dtype)
        if is_shape(options.model):
            config = transformers.AutoConfig.from_pretrained(path)
            torch.manual_seed(options.seed)
            with torch.device(llm.device):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            llm.update_weights(model.named_parameters())
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model = model.to(llm.device).eval()
        self.rows = 0

    def measure(self, every: list[Pair], count: int | None) -> list[dict[str, Any]]:
        """A run with each batch size, of the first questions."""
        pairs = every[:count]
        asked = [(("", ""), prompt, one) for prompt, some in pairs for one in some]
        score = self._lm_eval if self.options.peer == "hf" else self._batches
        found = []
        for size in self.options.batch_size:
            score(size)(asked[: 4 * size])
            self.rows, answer = 0, score(size)
            began, worked = time.perf_counter(), time.process_time()
            answers = answer(asked)
            seconds = time.perf_counter() - began
            cpu_seconds = time.process_time() - worked
            found.append(
                {
                    "engine": "lm-eval hf" if self.options.peer == "hf" else "transformers",
                    "batch_size": size,
                    "questions": len(pairs),
                    "seconds": seconds,
                    "cpu_seconds": cpu_seconds,
                    "computed_rows": self.rows,
                    "rows_of_all": batch_rows(every, size),
                    "questions_per_second": len(every)
                    * (self.rows / batch_rows(every, size))
                    / seconds,
                    "mean_logprob": float(np.mean([logprob for logprob, _ in answers])),
                }
            )
        return found

    @torch.no_grad()
    def _logits(self, inputs: Tensor) -> Tensor:
        self.rows += inputs.numel()
        logits: Tensor = self.model(inputs).logits
        return logits

    def _lm_eval(self, size: int) -> Callable[[list[Asked]], list[tuple[float, bool]]]:
        """lm-eval's `hf` model, which asks its own model for logits through `_model_call`."""
        from lm_eval.models.huggingface import HFLM

        found = HFLM(
            self.model, tokenizer=stand_in_tokenizer(), batch_size=size, backend="causal",
            max_length=self.llm.engine.max_model_len,
        )  # fmt: skip
        found._model_call = self._logits
        return lambda asked: found._loglikelihood_tokens(asked, disable_tqdm=True)

    def _batches(self, size: int) -> Callable[[list[Asked]], list[tuple[float, bool]]]:
        def answered(asked: list[Asked]) -> list[tuple[float, bool]]:
            answers: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
            alike: dict[tuple[int, ...], list[int]] = {}
            for i, (_, prompt, option) in enumerate(asked):
                alike.setdefault((*prompt, *option[:-1]), []).append(i)
            inputs = sorted(alike, key=lambda ids: (-len(ids), ids))
            for first in range(0, len(inputs), size):
                batch = inputs[first : first + size]
                padded = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
                for row, ids in zip(padded, batch, strict=True):
                    row[: len(ids)] = torch.tensor(ids)
                scores = self._logits(padded.to(self.llm.device)).log_softmax(-1)
                for ids, of_row in zip(batch, scores, strict=True):
                    for i in alike[ids]:
                        option = torch.tensor(asked[i][2], device=scores.device)
                        of_option = of_row[len(ids) - len(option) : len(ids)]
                        greedy = bool((of_option.argmax(-1) == option).all())
                        logprob = float(of_option.gather(1, option[:, None]).sum())
                        answers[i] = logprob, greedy
            return answers

        return answered


def batch_rows(pairs: list[Pair], size: int) -> int:
    """Rows of a peer's forward passes, padded."""
    inputs = {(*prompt, *option[:-1]) for prompt, some in pairs for option in some}
    lengths = sorted(map(len, inputs), reverse=True)
    batches = (lengths[first : first + size] for first in range(0, len(lengths), size))
    return sum(batch[0] * len(batch) for batch in batches)


def stand_in_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """lm-eval's model wants one, and is given token ids."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>"
    )


if __name__ == "__main__":
    main()
