"""Prefill without any sharing against `transformers` with SDPA, same weights, interleaved.

python lab/onestem_lab/prefill.py [--shape 0.1b] [--tokens 1024] [--prompts 4] [--pairs 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem.shapes import find_shape
from onestem_lab.results import RESULTS, machine, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.1b")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    name = f"prefill-{options.shape}-{options.dtype}.json"
    write(RESULTS / name, result)
    print(json.dumps({k: result[k] for k in ("seconds", "ratio")}))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    dtype = getattr(torch, options.dtype)
    peer = save_random_model(find_shape(options.shape), folder, dtype)
    llm = LLM(
        folder, dtype=options.dtype, share="off", device="cpu", max_step_tokens=options.tokens
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        0, llm.config.vocab_size, (options.prompts, options.tokens), generator=generator
    )
    times: dict[str, list[float]] = {"onestem_off": [], "transformers_sdpa": []}
    check_equal(peer, llm, prompts)
    for pair in range(options.pairs):
        order = list(times) if pair % 2 == 0 else list(times)[::-1]
        for name in order:
            run = run_onestem if name == "onestem_off" else run_peer
            times[name].append(run(llm if name == "onestem_off" else peer, prompts))
    pairs = [b / a for a, b in zip(times["onestem_off"], times["transformers_sdpa"], strict=True)]
    return {
        "command": f"python -m onestem_lab.prefill --shape {options.shape} "
        f"--tokens {options.tokens} --prompts {options.prompts} "
        f"--pairs {options.pairs} --dtype {options.dtype}",
        "machine": machine(),
        "transformers": transformers.__version__,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)},
        "all_seconds": times,
    }


def save_random_model(shape: Path, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa"
    )
    model.save_pretrained(folder)
    return model.eval()


def run_onestem(llm: LLM, prompts: torch.Tensor) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts.tolist(), params)
    return time.perf_counter() - started


@torch.inference_mode()
def run_peer(model: torch.nn.Module, prompts: torch.Tensor) -> float:
    """One prompt after the other, logits of the last token only: what a prefill needs."""
    started = time.perf_counter()
    for prompt in prompts:
        model(prompt[None], logits_to_keep=1).logits[0, -1].argmax()
    return time.perf_counter() - started


@torch.inference_mode()
def check_equal(model: torch.nn.Module, llm: LLM, prompts: torch.Tensor) -> None:
    want = [int(model(prompt[None], logits_to_keep=1).logits[0, -1].argmax()) for prompt in prompts]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    got = [output.outputs[0].token_ids[0] for output in llm.generate(prompts.tolist(), params)]
    if llm.dtype == torch.float32:
        assert got == want, (got, want)


if __name__ == "__main__":
    main()
