"""A model in several formats, one after the other on one device: memory, and seconds of a decode.

    python -m onestem_lab.format_steps [--model shape:qwen3-30b-a3b] [--forms int4,none]
        [--rows 1,16,64,256] [--device cuda] [--out FILE]

`none` are weights of 16 bits. A decode is the time of `--tokens` further tokens of `LLM.generate`
for so many prompts of 32 tokens, divided by them; the median of `--turns`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from onestem.build import pick_device
from onestem.llm import LLM
from onestem.request import SamplingParams
from onestem_lab.results import RESULTS, device_name, machine, write

PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--forms", default="int4,none")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-memory", default="4GB")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "format-steps.json")
    options = parser.parse_args()
    device = pick_device(options.device)
    result: dict[str, Any] = {
        "command": f"python -m onestem_lab.format_steps {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "device": device_name(device),
        "model": options.model,
        "forms": {},
    }
    for form in options.forms.split(","):
        result["forms"][form] = measured(form, options)
        print(form, result["forms"][form], flush=True)
        write(options.out, result)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measured(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds until the model stands, its bytes, and milliseconds of decodes."""
    began = time.perf_counter()
    llm = LLM(
        options.model,
        device=options.device,
        dtype="bfloat16",
        quantization=None if form == "none" else form,
        kv_memory=options.kv_memory,
    )
    found = {
        "load_s": time.perf_counter() - began,
        "weights_gb": llm.decoder.weight_bytes / 1e9,
        "allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    for rows in map(int, options.rows.split(",")):
        decode_ms(llm, rows, tokens=4, turns=1)
        found[f"decode_{rows}_ms"] = decode_ms(llm, rows, options.tokens, options.turns)
    llm.close()
    return found


def decode_ms(llm: LLM, rows: int, tokens: int, turns: int) -> float:
    """The median of `turns`."""
    generator = torch.Generator().manual_seed(0)
    most = llm.decoder.config.vocab_size
    found = []
    for _ in range(turns):
        seconds = []
        for count in (1, tokens + 1):
            prompts = torch.randint(0, most, (rows, PROMPT), generator=generator).tolist()
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, params)
            seconds.append(time.perf_counter() - began)
        found.append(1e3 * (seconds[1] - seconds[0]) / tokens)
    return statistics.median(found)


if __name__ == "__main__":
    main()
