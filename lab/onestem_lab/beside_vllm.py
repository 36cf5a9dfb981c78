"""Onestem and vLLM on one device, one after the other: a model's shape with random weights.

    python -m onestem_lab.beside_vllm --model shape:llama3.1-8b --work 'job 40x16 2000/200/100'
        --work 'samples 64x16 512/512' --work 'exam 10x2000' [--quantization fp8] [--share storage]
        [--repeats 3] [--peer-repeats 2] [--peer-questions 100] [--device cuda] [--deterministic]
        [--alone] [--out FILE]

Work, in tokens:

    job GxR P/S/D       G prefixes of P, R requests behind each with S of their own, D sampled
                        greedily, shuffled; requests per second
    samples GxN P/D     G prompts of P, N answers to each of D, temperature 1, with the
                        log-probabilities of the sampled tokens; tokens per second
    exam GxQ            Q questions in the shape of MMLU behind G heads, four options of one token
                        each; questions per second. vLLM is asked as lm-eval's adapter asks it
                        (each context with each option, `prompt_logprobs=1`, one token sampled, the
                        longest first), and so slow that `--peer-questions` of them have to do:
                        for all it takes as much longer as their tokens are more

vLLM runs first, in a process of its own (of the interpreter that ONESTEM_VLLM_PYTHON names), with
prefix caching, compiled, and the settings that the result holds; then it ends, and Onestem has the
device. Loading counts for neither, an engine's first job is discarded, a small job of each kind
goes before the clock, and caches are empty. `--quantization` rounds the weights of both; Onestem
then runs in 16 bits too, unless `--share` names other modes of sharing that it is to run in beside
`full`, or it is `--alone`. `--deterministic` is ours and the batch-invariant mode of vLLM. Both
have the KV memory of `--kv-memory`, if it is given. `--wait` imports, and goes on when a line comes
on stdin: a driver has others prepare while one measures.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import transformers

import onestem
from onestem.bench import BatchCase
from onestem.errors import OnestemError
from onestem.llm import LLM
from onestem.models.config import ModelConfig
from onestem.models.find import find_model
from onestem.options import parse_memory
from onestem.request import SamplingParams
from onestem_lab import scores
from onestem_lab.cases import prompts_of
from onestem_lab.lengths import parse_lengths
from onestem_lab.peers.vllm_process import Vllm, absent_vllm
from onestem_lab.results import UNFINISHED, device_name, machine, write

ROOM = 16  # positions beside the longest request
MEMORY_SECONDS = 20.0  # for memory of a process that ended


@dataclass(frozen=True)
class Work:
    """One kind of work, at a size (see above)."""

    name: str
    vocab_size: int
    peer_questions: int

    @cached_property
    def _numbers(self) -> tuple[str, list[int]]:
        kind, sizes = self.name.split(" ", 1)
        return kind, [int(size) for size in re.findall(r"\d+", sizes)]

    @property
    def unit(self) -> str:
        units = {"job": "requests/s", "samples": "tokens/s", "exam": "questions/s"}
        return units[self._numbers[0]]

    @cached_property
    def prompts(self) -> list[list[int]]:
        kind, sizes = self._numbers
        if kind == "job":
            groups, degree, prefix, own, output = sizes
            case = BatchCase(groups, (degree,), (prefix,), own, output, "shuffled", 0)
        else:
            groups, _, prompt, output = sizes
            case = BatchCase(groups, (1,), (0,), prompt, output, "shuffled", 0)
        return prompts_of(case, self.vocab_size)

    @property
    def params(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that both have."""
        kind, sizes = self._numbers
        if kind == "job":
            return {"temperature": 0.0, "ignore_eos": True}
        return {"temperature": 1.0, "n": sizes[1], "logprobs": 0, "ignore_eos": True}

    @cached_property
    def pairs(self) -> list[scores.Pair]:
        _, (subjects, questions) = self._numbers
        options = argparse.Namespace(
            seed=0, subjects=subjects, questions=questions, options=4, option_tokens=1,
            prefix=parse_lengths("prefix", "mmlu", "prefix"),
            question=parse_lengths("question", "mmlu", "question"),
        )  # fmt: skip
        return scores.exam(options, self.vocab_size)

    @property
    def is_exam(self) -> bool:
        return self._numbers[0] == "exam"

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        if self.is_exam:
            return max(len(prompt) for prompt, _ in self.pairs) + 2
        return max(map(len, self.prompts)) + self._numbers[1][-1]

    # ------------------------------------------------------------------------- runs

    def run(self, llm: LLM) -> dict[str, Any]:
        llm.engine.cache.clear()
        llm.engine.reset_stats()
        if self.is_exam:
            found = scores.measure(llm, self.pairs)
            return {**found, "rate": found["questions_per_second"]}
        output = self._numbers[1][-1]
        params = SamplingParams(**self.params, max_tokens=output, seed=1)
        prompts = self.prompts
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        count = sum(len(one.token_ids) for each in outputs for one in each.outputs)
        assert count == len(prompts) * params.n * output
        stats = llm.engine.stats
        return {
            "seconds": seconds,
            "rate": (count if self._numbers[0] == "samples" else len(prompts)) / seconds,
            "output_tokens": count,
            "processed_prompt_tokens": stats.processed_prompt_tokens,
            "num_preempted": stats.num_preempted,
            "steps": stats.steps,
        }

    def warm(self, llm: LLM) -> None:
        """A full step of it, and some steps of decodes."""
        if self.is_exam:
            llm.score(*map(list, zip(*self.pairs[:64], strict=True)))
            return
        params = SamplingParams(**self.params, max_tokens=min(8, self._numbers[1][-1]))
        llm.generate(self.prompts[:64], params)

    def run_peer(self, vllm: Vllm) -> dict[str, Any]:
        if self.is_exam:
            some = self.pairs[: self.peer_questions]
            asked = [prompt + option for prompt, options in some for option in options]
            asked.sort(key=lambda ids: (-len(ids), ids))
            params: dict[str, Any] = {"temperature": 0, "prompt_logprobs": 1}
            found = vllm.generate(asked, params, [1] * len(asked))
            tokens, every = (sum(len(ids) for ids, _ in each) for each in (some, self.pairs))
            count = len(self.pairs) * tokens / every  # as if they were of the mean length
        else:
            prompts, output = self.prompts, self._numbers[1][-1]
            found = vllm.generate(prompts, self.params, [output] * len(prompts))
            count = found["output_tokens"] if self._numbers[0] == "samples" else len(prompts)
        return {**found, "rate": count / found["seconds"]}


def main() -> None:
    options = parse()
    vllm = None if options.without_vllm else Vllm(invariant=options.deterministic)
    config = ModelConfig.from_directory(find_model(options.model))
    works = [Work(name, config.vocab_size, options.peer_questions) for name in options.work]
    longest = max(work.longest for work in works) + ROOM
    if options.wait and not sys.stdin.readline():
        sys.exit("nobody waits for this any more")
    founds: list[dict[str, Any]] = [
        {"work": work.name, "unit": work.unit, "engines": {}} for work in works
    ]
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.beside_vllm {' '.join(map(quoted, sys.argv[1:]))}",
        "machine": machine(),
        "model": options.model,
        "deterministic": options.deterministic,
        "versions": {
            "onestem": onestem.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "works": founds,
    }
    if vllm is not None:
        late = Timer(options.peer_seconds, vllm.stop)
        late.start()
        try:
            began = time.perf_counter()
            settings = peer_settings(options, longest)
            result["vllm"] = vllm.load(find_model(options.model), settings)
            result["vllm"]["settings"]["model"] = options.model  # a path of this machine there
            result["vllm"]["load_seconds"] = time.perf_counter() - began
            for work, found in zip(works, founds, strict=True):
                runs: list[dict[str, Any]] = []
                for _ in range(options.peer_repeats):  # what there is counts where it is ended
                    runs.append(work.run_peer(vllm))
                    found["vllm"] = {"median": medians(runs), "runs": runs}
                tell(f"vLLM {work.name}: {medians(runs):.1f} {work.unit}")
        except OnestemError as error:
            result["peer_error"] = str(error)
            tell(f"vLLM failed: {error}")
        finally:
            late.cancel()
            vllm.close()
        wait_for_memory(options.device)
    engines = our_engines(options)
    for name, settings in engines.items():
        if options.out is not None:
            write(options.out, result | {UNFINISHED: True})  # should this be cut short
        began = time.perf_counter()
        with LLM(
            options.model, device=options.device, dtype="bfloat16", kv_memory=options.kv_memory,
            max_model_len=longest, seed=0, deterministic=options.deterministic, **settings,
        ) as llm:  # fmt: skip
            loaded = time.perf_counter() - began
            result["device"] = device_name(llm.device)
            works[0].run(llm)
            for work, found in zip(works, founds, strict=True):
                work.warm(llm)
                runs = [work.run(llm) for _ in range(options.repeats)]
                found["engines"][name] = {
                    "median": medians(runs), "load_seconds": loaded, "kv_tokens": llm.kv_tokens,
                    "runs": runs,
                }  # fmt: skip
                tell(f"{name} {work.name}: {medians(runs):.1f} {work.unit}")
    for found in founds:
        tell(summary(options.model.removeprefix("shape:"), found))
    if options.out is not None:
        write(options.out, result)


def our_engines(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of ours that differ; the first is compared with all others."""
    kind = options.quantization
    found: dict[str, dict[str, Any]] = {kind or "bfloat16": {"quantization": kind}}
    if options.alone:
        return found
    if options.share:
        return found | {share: {"quantization": kind, "share": share} for share in options.share}
    return found | {"bfloat16": {}}


def summary(model: str, found: dict[str, Any]) -> str:
    """One line; notes what the ratios are."""
    engines, parts = found["engines"], []
    first, *others = engines
    ours = engines[first]["median"]
    parts.append(f"{model} {found['work']}: {first} {ours:.1f} {found['unit']}")
    found["against"] = {}
    for name in others:
        found["against"][name] = ours / engines[name]["median"]
        parts.append(f"{name} {engines[name]['median']:.1f}: {found['against'][name]:.2f}x")
    if "vllm" in found:
        found["against"]["vllm"] = ours / found["vllm"]["median"]
        parts.append(f"vLLM {found['vllm']['median']:.1f}: {found['against']['vllm']:.2f}x")
    rows = engines[first]["runs"][-1]
    if "distinct_rows" in rows:
        parts.append(f"{rows['computed_rows'] / rows['distinct_rows']:.4f} of distinct tokens")
    return ", ".join(parts)


def peer_settings(options: argparse.Namespace, longest: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": longest}
    if options.quantization is not None:
        settings["quantization"] = options.quantization
    if options.kv_memory != "auto":
        settings["kv_cache_memory_bytes"] = parse_memory(options.kv_memory)
    return settings | json.loads(options.peer_settings)


def wait_for_memory(device: str) -> None:
    """A process that ended may have it a moment longer."""
    late = time.monotonic() + MEMORY_SECONDS
    while device != "cpu" and torch.cuda.is_available() and time.monotonic() < late:
        free, there = torch.cuda.mem_get_info()
        if free > 0.9 * there:
            return
        time.sleep(0.5)


def medians(runs: list[dict[str, Any]]) -> float:
    return statistics.median(float(run["rate"]) for run in runs)


def quoted(word: str) -> str:
    return f"'{word}'" if " " in word or "{" in word else word


def tell(line: str) -> None:
    print(line, flush=True)


def work_name(text: str) -> str:
    if not re.fullmatch(r"job \d+x\d+ \d+/\d+/\d+|samples \d+x\d+ \d+/\d+|exam \d+x\d+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected 'job GxR P/S/D', 'samples GxN P/D' or 'exam GxQ'"
        )
    return text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="shape:NAME")
    parser.add_argument("--work", type=work_name, action="append", required=True)
    parser.add_argument("--quantization", help="of both, as fp8")
    parser.add_argument("--share", action="append", default=[], help="another mode of ours")
    parser.add_argument("--alone", action="store_true", help="one engine of ours")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-repeats", type=int, default=2)
    parser.add_argument("--peer-questions", type=int, default=100)
    parser.add_argument("--peer-seconds", type=float, default=240, help="then it is ended")
    parser.add_argument("--peer-settings", default="{}", help="of vllm.LLM, JSON")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--wait", action="store_true", help="for a line on stdin, once imported")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.without_vllm and (absent := absent_vllm()) is not None:
        parser.error(f"vLLM {absent}")
    return options


if __name__ == "__main__":
    main()
