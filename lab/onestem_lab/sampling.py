"""What sampling costs: kernels alone, answers of many sequences, and one odd neighbour.

    python -m onestem_lab.sampling [--parts kernels,answers,neighbour,grammar] [--shape llama3.1-8b]

`kernels`: milliseconds for rows of 128,256 float32 logits, flat and peaked, beside one pass that
takes maximum, exponentials and their sum. `answers`: tokens per second of 64 prompts with 16
answers each through `LLM.generate`, for each way to sample. `neighbour`: seconds of 256 decodes
behind one prefix, all plain or one of them with options. Kinds take turns within a repeat; medians.
"Flat" logits are those of random weights as they are, "peaked" those with the head's weights six
times larger. `long`: answers of 1,024 tokens, for which memory is short.

`products`: the GPU's milliseconds for a decode step of those answers, by kind of kernel. Greedy
answers to one prompt are alike, so rows are alike, and a GPU that its power limits multiplies them
faster: what the matrix products take longer at temperature 1 no sampler can save.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import onestem
from onestem.engine.engine import Engine
from onestem.llm import LLM
from onestem.models.linear import held_tensors
from onestem.request import Request, SamplingParams
from onestem.shapes import find_shape
from onestem_lab.results import RESULTS, machine, write

VOCAB = 128_256
PEAKED = 6.0

# How names of kernels begin.
KERNELS = {
    "products": ("nvjet", "void cublas", "void cutlass", "sm90_xmma"),
    "attention": ("attend_", "merge_kernel"),
    "layers": ("_add_rms_norm", "_rope_write", "_gate_mul"),
    "drawing": ("_race", "_settle"),
}

GREEDY: dict[str, Any] = {"temperature": 0}
# name -> (fields of SamplingParams, whether logits are peaked)
ANSWERS: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": (GREEDY, False),
    "temperature 1": ({}, False),
    "log-probabilities": ({"logprobs": 0}, False),
    "top 5 log-probabilities": ({"logprobs": 5}, False),
    "top_p 0.95": ({"top_p": 0.95}, False),
    "top_k 50": ({"top_k": 50}, False),
    "top_k, top_p, min_p": ({"top_k": 50, "top_p": 0.95, "min_p": 0.02}, False),
    "penalties": ({"presence_penalty": 0.5, "repetition_penalty": 1.1}, False),
    "greedy, peaked": (GREEDY, True),
    "temperature 1, peaked": ({}, True),
    "log-probabilities, peaked": ({"logprobs": 0}, True),
    "top_p 0.95, peaked": ({"top_p": 0.95}, True),
}
ODD: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs 5": {"logprobs": 5},
    "penalty": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "min_tokens": {"min_tokens": 50, "stop_token_ids": [5, 6]},
    "top_p": {"temperature": 1, "top_p": 0.95},
}


def main() -> None:
    options = _options()
    result: dict[str, Any] = {
        "command": "python -m onestem_lab.sampling " + options.said,
        "machine": machine(),
        "onestem": onestem.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if options.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    parts = options.parts.split(",")
    if "kernels" in parts:
        result["kernels"] = kernels(torch.device(options.device), options.repeats)
        _write(options.out, result)
    if {"answers", "products", "long", "neighbour"} & set(parts):
        llm = LLM(f"shape:{options.shape}", device=options.device, dtype="bfloat16")
        if "answers" in parts:
            result["answers"] = answers(llm, options.kinds.split(","), options.repeats)
            _write(options.out, result)
        if "products" in parts:
            result["products"] = products(llm)
            _write(options.out, result)
        if "neighbour" in parts:
            result["neighbour"] = neighbour(llm, options)
            _write(options.out, result)
        if "long" in parts:
            result["long"] = long_answers(llm)
            _write(options.out, result)
    if "grammar" in parts:
        result["grammar"] = grammar(options)
        _write(options.out, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="kernels,answers,neighbour")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--kinds", default="all", help="of `answers`, by name")
    parser.add_argument("--prefix", type=int, default=2000, help="of `neighbour`, tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of `neighbour`, sampled")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "sampling.json")
    options = parser.parse_args()
    told = vars(options).items()
    options.said = " ".join(
        f"--{name} '{value}'" for name, value in told if value != parser.get_default(name)
    )
    return options


def _write(path: Path, result: dict[str, Any]) -> None:
    write(path, result)


# --------------------------------------------------------------------------------- kernels


def kernels(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    from onestem.ops import resolve_sampling
    from onestem.ops.sampling import IDLE, RowTable

    sampling = resolve_sampling(device)
    found = []
    for rows in (64,) if device.type == "cpu" else (256, 1024):
        for peak in (1.0, PEAKED):
            logits = peak * torch.randn(rows, VOCAB, device=device)
            index = torch.arange(rows, device=device)
            records = np.full(rows, IDLE)
            records["seed_low"], records["temperature"] = np.arange(rows), 1

            def draw(
                logits: torch.Tensor = logits, records: np.ndarray = records, **fields: float
            ) -> Callable[[], object]:
                mine = records.copy()
                for name, value in fields.items():
                    mine[name] = value
                table = RowTable(mine, device)
                return lambda: sampling.draw(logits, table)

            calls: dict[str, Callable[[], object]] = {
                "max, exp, sum": lambda x=logits, i=index: sampling.log_sums(x, i),
                "greedy": draw(temperature=0),
                "temperature 1": draw(),
                "top_p 0.95": draw(top_p=0.95),
                "top_k 50": draw(top_k=50),
                "top_k, top_p, min_p": draw(top_k=50, top_p=0.95, min_p=0.02),
                "top 5": lambda x=logits, i=index: sampling.leading(x, i, 5),
            }
            took = _in_turns(calls, device, max(repeats, 15))
            entry = {"rows": rows, "peaked": peak != 1, "ms": took}
            entry["against_one_pass"] = {k: ms / took["max, exp, sum"] for k, ms in took.items()}
            found.append(entry)
            print(entry["rows"], entry["peaked"], _short(took), flush=True)
    return found


def _in_turns(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            _wait(device)
            begun = time.perf_counter()
            call()
            _wait(device)
            if repeat >= 2:
                times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------- answers


def answers(llm: LLM, kinds: list[str], repeats: int) -> list[dict[str, Any]]:
    """Tokens per second of each kind."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llm.config.vocab_size, 512).tolist() for _ in range(64)]
    asked = {name: ANSWERS[name] for name in ANSWERS if kinds == ["all"] or name in kinds}
    rates: dict[str, list[float]] = {name: [] for name in asked}
    head = next(held_tensors(llm.decoder.head))
    for repeat in range(-1, repeats):
        for name, (fields, peaked) in asked.items():
            if repeat < 0 and name != next(iter(asked)):
                continue  # once, so that all is warm
            if peaked:
                _scale(head, PEAKED)
            rate = _rate(llm, prompts, fields, 256)
            if peaked:
                _scale(head, 1 / PEAKED)
            if repeat >= 0:
                rates[name].append(rate)
                print(f"{name}: {rate:.0f} tokens/s", flush=True)
    return [
        {"kind": name, "tokens_per_s": statistics.median(each), "all": each}
        for name, each in rates.items()
    ]


@torch.inference_mode()
def _scale(weights: torch.Tensor, factor: float) -> None:
    weights.mul_(factor)


def _rate(llm: LLM, prompts: list[list[int]], fields: dict[str, Any], tokens: int) -> float:
    """Sampled tokens per second, 16 answers to each prompt."""
    params = SamplingParams(**{"temperature": 1, **fields}, n=16, max_tokens=tokens, seed=1,
                            ignore_eos=True)  # fmt: skip
    llm.engine.cache.clear()
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begun
    count = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert count == 16 * tokens * len(prompts)
    return count / seconds


def products(llm: LLM) -> list[dict[str, Any]]:
    """Milliseconds of a step of 1,024 decodes, of matrix products, drawing and the rest."""
    engine, rng, steps, found = llm.engine, np.random.default_rng(0), 20, []
    prompts = [rng.integers(0, llm.config.vocab_size, 512).tolist() for _ in range(64)]
    for kind in ("greedy", "temperature 1"):
        fields = {"temperature": 1, **ANSWERS[kind][0]}
        params = SamplingParams(**fields, n=16, max_tokens=400, seed=1, ignore_eos=True)
        engine.cache.clear()
        for i, ids in enumerate(prompts):
            engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, params=params))
        while engine.num_running < 1024:
            engine.step()
        for _ in range(100):  # until the GPU is as warm as it gets
            engine.step()
        took = step_kernels(engine, steps)
        for i in range(len(prompts)):
            engine.abort(str(i))
        while engine.has_unfinished():
            engine.step()
        found.append({"kind": kind, "step_ms": took})
        print(kind, _short(took), flush=True)
    return found


def step_kernels(engine: Engine, steps: int) -> dict[str, float]:
    """The GPU's milliseconds for a step, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    took = dict.fromkeys((*KERNELS, "rest"), 0.0)
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            name = event.name()
            kinds = (kind for kind, starts in KERNELS.items() if name.startswith(starts))
            took[next(kinds, "rest")] += event.duration_ns() / 1e6 / steps
    return took


def long_answers(llm: LLM) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llm.config.vocab_size, 512).tolist() for _ in range(64)]
    llm.engine.reset_stats()
    rate = _rate(llm, prompts, {}, 1024)
    found = {
        "tokens_per_s": rate,
        "num_preempted": llm.engine.stats.num_preempted,
        "kv_tokens": llm.kv_tokens,
    }
    print(f"512 + 1,024: {found}", flush=True)
    return found


# --------------------------------------------------------------------------------- neighbour


def neighbour(llm: LLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of 256 decodes, of which one has options, against those of all plain."""
    rng = np.random.default_rng(1)
    vocab = llm.config.vocab_size
    head = rng.integers(0, vocab, options.prefix).tolist()
    prompts = [[*head, *rng.integers(0, vocab, 8).tolist()] for _ in range(256)]
    base = {**GREEDY, "max_tokens": options.tokens, "ignore_eos": True}
    times: dict[str, list[float]] = {name: [] for name in ODD}
    for repeat in range(-1, 3 * options.repeats):
        for name, fields in ODD.items():
            params = [SamplingParams(**base) for _ in prompts]
            params[100] = SamplingParams(**{**base, **fields})
            llm.engine.cache.clear()
            begun = time.perf_counter()
            llm.generate(prompts, params)
            if repeat >= 0:
                times[name].append(time.perf_counter() - begun)
    found = []
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each, times["plain"], strict=True)]
        found.append(
            {
                "one": name,
                "seconds": statistics.median(each),
                "against_plain": statistics.median(ratios),
                "all": each,
            }
        )
        print({key: found[-1][key] for key in ("one", "seconds", "against_plain")}, flush=True)
    return found


# --------------------------------------------------------------------------------- grammar

SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "place", "reason")},
    "required": ["name", "place", "reason"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "three", "schema": SCHEMA}}


def grammar(options: argparse.Namespace) -> list[dict[str, Any]]:
    """256 decodes: until all that have no schema have finished where one has; and tokens/s where
    all have one, against none. A random model hardly ever ends a string."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shutil.copy(find_shape(options.shape) / "config.json", path)
        config = json.loads((path / "config.json").read_text())
        _make_tokenizer(path, config["vocab_size"])
        llm = LLM(path, device=options.device, dtype="bfloat16", random_weights=True)
    rng = np.random.default_rng(1)
    head = rng.integers(300, llm.config.vocab_size, options.prefix).tolist()
    prompts = [[*head, *rng.integers(300, llm.config.vocab_size, 8).tolist()] for _ in range(256)]
    kinds = {"none": (), "one": (100,), "all": range(256)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for repeat in range(-1, 2 * options.repeats):
        for name, which in kinds.items():
            one = _grammar_run(llm, prompts, which, options.tokens)
            if repeat >= 0:
                found[name].append(one)
    result = []
    for name, runs in found.items():
        pairs = list(zip(runs, found["none"], strict=True))
        result.append(
            {
                "with a schema": name,
                "tokens_per_s": statistics.median(one["tokens_per_s"] for one in runs),
                "rate_against_none": statistics.median(
                    a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs
                ),
                "others_against_none": statistics.median(
                    a["others_seconds"] / b["others_seconds"] for a, b in pairs
                ),
            }
        )
        print(result[-1], flush=True)
    return result


def _grammar_run(
    llm: LLM, prompts: list[list[int]], which: Container[int], tokens: int
) -> dict[str, float]:
    base = {"max_tokens": tokens, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    params = [
        SamplingParams(**base, response_format=JSON if i in which else None)
        for i in range(len(prompts))
    ]
    llm.engine.cache.clear()
    begun = time.monotonic()
    outputs = llm.generate(prompts, params)
    seconds = time.monotonic() - begun
    ends = [one.metrics.finished_time for i, one in enumerate(outputs) if i not in which]
    total = sum(len(one.outputs[0].token_ids) for one in outputs)
    return {
        "tokens_per_s": total / seconds,
        "others_seconds": max(ends, default=begun + seconds) - begun,
    }


def _make_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level BPE of so many tokens, each of two that are shorter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [c for c in alphabet if c.isascii() and c.isalpha()]
    rng, words, merges = random.Random(0), [*letters, "Ġ"], []
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    while len(vocabulary) < vocab_size - 2:
        a, b = rng.choice(words), rng.choice(words)
        if len(a + b) <= 9 and a + b not in vocabulary:
            vocabulary[a + b] = len(vocabulary)
            merges.append((a, b))
            words.append(a + b)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(special))


def _short(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in values.items())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
