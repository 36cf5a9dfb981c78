"""What equal bits cost: jobs with `deterministic` and without, in turns.

    python -m onestem_lab.deterministic [--models shape:0.1b,shape:qwen2.5-0.5b] [--turns 3]
        [--threads N] [--dtype bfloat16] [--device cpu] [--kv-memory 1GiB] [--out FILE]

Both engines are in one process. Each turn has random prompts of its own, so that nothing is cached,
and both get the same. Written to lab/results/deterministic-cpu.json, or deterministic-gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from onestem import LLM, SamplingParams
from onestem_lab.results import RESULTS, machine, processor, write


@dataclass(frozen=True)
class Job:
    """`groups` x `degree` prompts: tokens that a group shares, own ones, and answered ones."""

    groups: int
    degree: int
    shared: int
    own: int
    answered: int
    temperature: float = 0.0
    n: int = 1

    def prompts(self, seed: int) -> list[dict[str, list[int]]]:
        random = np.random.default_rng(seed)

        def draw(count: int) -> list[int]:
            return random.integers(100, 30000, count).tolist()

        heads = [draw(self.shared) for _ in range(self.groups)]
        return [
            {"prompt_token_ids": head + draw(self.own)}
            for head in heads
            for _ in range(self.degree)
        ]


ON_CPU = {
    "4x16 800/50/50": Job(4, 16, 800, 50, 50),
    "1x64 2000/64/16": Job(1, 64, 2000, 64, 16),
    "4 problems x 16 answers, temperature 1": Job(4, 1, 0, 200, 64, 1.0, 16),
    "32 prompts that share nothing, 250/32": Job(32, 1, 0, 250, 32),
    "one stream, 600/64": Job(1, 1, 0, 600, 64),
}
ON_GPU = {
    "one stream, 600/64": Job(1, 1, 0, 600, 64),
    "256x1 512/64": Job(256, 1, 0, 512, 64),
    "20x16 2000/200/100": Job(20, 16, 2000, 200, 100),
    "64 problems x 16 answers, 256/128, temperature 1": Job(64, 1, 0, 256, 128, 1.0, 16),
    "1x256 8000/64/128": Job(1, 256, 8000, 64, 128),
}


def seconds(llm: LLM, job: Job, seed: int) -> float:
    params = SamplingParams(
        max_tokens=job.answered, temperature=job.temperature, n=job.n, seed=seed, ignore_eos=True
    )
    prompts = job.prompts(seed)
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="shape:0.1b,shape:qwen2.5-0.5b")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", default="", help="only those whose names begin so")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    out = options.out or RESULTS / f"deterministic-{'cpu' if on_cpu else 'gpu'}.json"
    device = processor(options.threads or 0) if on_cpu else {"gpu": torch.cuda.get_device_name()}
    command = " ".join(["python -m onestem_lab.deterministic", *sys.argv[1:]])
    about = {"command": command, **machine(), **device}
    rows = []
    for model in options.models.split(","):
        engines = {
            strict: LLM(
                model,
                dtype=options.dtype,
                device=options.device,
                threads=options.threads,
                kv_memory=options.kv_memory,
                deterministic=strict,
            )
            for strict in (False, True)
        }
        for name, job in (ON_CPU if on_cpu else ON_GPU).items():
            if not name.startswith(options.jobs):
                continue
            for llm in engines.values():
                seconds(llm, job, 0)
            taken: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(1, options.turns + 1):
                for strict, llm in engines.items():
                    taken[strict].append(seconds(llm, job, turn))
            speeds = [plain / strict for plain, strict in zip(*taken.values(), strict=True)]
            row = {
                "model": model,
                "job": {"name": name, **asdict(job)},
                "default_seconds": taken[False],
                "deterministic_seconds": taken[True],
                "speed": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
            }
            rows.append(row)
            print(
                f"{model} {name}: {row['speed']:.3f} of the default's speed "
                f"({min(taken[False]):.2f} s, {min(taken[True]):.2f} s)",
                flush=True,
            )
            write(out, {**about, "dtype": options.dtype, "rows": rows})
        for llm in engines.values():
            llm.close()


if __name__ == "__main__":
    main()
