"""One model on one device and on several, in turns: steps of decodes, a job, the host's time.

    python -m onestem_lab.tensor_parallel --out FILE [--size 2] [--model shape:llama3.1-8b]
    python -m onestem_lab.tensor_parallel --out FILE --tiny     # tiny sizes, on a CPU

Each turn is a process of its own, which has the devices to itself. Steps are those of rows that
decode behind one prefix: milliseconds of a step, and those of its host, less what is waited for the
device (`onestem_lab.step` has how). The job's prompts come shuffled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onestem import LLM, SamplingParams
from onestem.engine.engine import Engine
from onestem.request import Request
from onestem_lab.results import write
from onestem_lab.step import time_waits

FIRST = 12  # steps that are left out
VOCAB = 256  # prompts are of these ids


@dataclass(frozen=True)
class Sizes:
    """Of what is measured, in tokens.

    Attributes:
        rows, prefix: of the steps: numbers of rows, and what they share.
        steps: that count.
        groups, degree, shared, own, answer: of the job.
    """

    rows: tuple[int, ...] = (256, 1)
    prefix: int = 8000
    steps: int = 100
    groups: int = 40
    degree: int = 16
    shared: int = 2000
    own: int = 200
    answer: int = 100


TINY = Sizes(rows=(4, 1), prefix=40, steps=8, groups=2, degree=3, shared=40, own=10, answer=4)


def main() -> None:
    options = parse()
    if options.child is not None:
        print(json.dumps(measure(options, options.child)))
        return
    turns: dict[int, list[dict[str, Any]]] = {1: [], options.size: []}
    for _ in range(options.repeats):
        for size, found in turns.items():
            found.append(in_child(size))
            print(size, found[-1], flush=True)
    result: dict[str, Any] = {
        "command": " ".join(["python -m onestem_lab.tensor_parallel", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "model": options.model,
        "dtype": options.dtype,
        "sizes": asdict(options.sizes),
    }
    medians = {}
    for size, found in turns.items():
        medians[size] = {name: statistics.median(one[name] for one in found) for name in found[0]}
        result[f"on {size}"] = {"median": medians[size], "turns": found}
    one, several = medians[1], medians[options.size]
    result["times as fast"] = {
        name: one[name] / several[name] for name in one if not name.startswith("host")
    }
    result["host ms more"] = {
        name: several[name] - one[name] for name in one if name.startswith("host")
    }
    print(result["times as fast"], result["host ms more"])
    write(options.out, result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=2, help="devices")
    parser.add_argument("--model", default="shape:llama3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="30GiB", help="of each device")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = Sizes()
    if options.tiny:
        options.sizes, options.repeats = TINY, 1
        options.model, options.device, options.dtype = "embedded", "cpu", "float32"
        options.kv_memory = "8MiB"
    return options


def in_child(size: int) -> dict[str, float]:
    """One turn."""
    command = [sys.executable, "-m", "onestem_lab.tensor_parallel", *sys.argv[1:]]
    out = subprocess.run([*command, "--child", str(size)], stdout=subprocess.PIPE, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(command)} --child {size} failed")
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace, size: int) -> dict[str, float]:
    """Everything, on so many devices."""
    llm = LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        tensor_parallel_size=size,
        seed=0,
    )
    sizes, found = options.sizes, dict[str, float]()
    for _ in range(2):  # the first one warms up
        found["job seconds"] = job_seconds(llm, sizes)
    for rows in sizes.rows:
        found[f"step ms, {rows} rows"] = step_ms(llm.engine, sizes, rows)
    waited = time_waits(llm.engine, llm.device)
    for rows in sizes.rows:
        found[f"host ms, {rows} rows"] = host_ms(llm.engine, sizes, rows, waited)
    llm.close()
    return found


def job_seconds(llm: LLM, sizes: Sizes) -> float:
    """Of the job, from nothing in the cache."""
    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    documents = [draw(sizes.shared) for _ in range(sizes.groups)]
    prompts = [document + draw(sizes.own) for document in documents for _ in range(sizes.degree)]
    rng.shuffle(prompts)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=sizes.answer, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def start(engine: Engine, sizes: Sizes, rows: int) -> None:
    """Rows that decode behind one prefix; the first steps are done."""
    prefix = [3 + i % (VOCAB - 3) for i in range(sizes.prefix)]
    params = SamplingParams(max_tokens=FIRST + sizes.steps + 40, temperature=0, ignore_eos=True)
    for i in range(rows):
        ids = [*prefix, 3 + i % 200, 3 + i // 200]
        engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, params=params))
    while len(engine.batch_rows) < rows:
        engine.step()
    for _ in range(FIRST):
        engine.step()


def end(engine: Engine, rows: int) -> None:
    for i in range(rows):
        engine.abort(str(i))


def step_ms(engine: Engine, sizes: Sizes, rows: int) -> float:
    """Milliseconds of a step, over many in a row."""
    start(engine, sizes, rows)
    began = time.perf_counter()
    for _ in range(sizes.steps):
        engine.step()
    seconds = time.perf_counter() - began
    end(engine, rows)
    return 1e3 * seconds / sizes.steps


def host_ms(engine: Engine, sizes: Sizes, rows: int, waited: list[float]) -> float:
    """Median milliseconds of a step, less what is waited for the device."""
    start(engine, sizes, rows)
    found = []
    for _ in range(sizes.steps):
        waited[0] = 0.0
        began = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began - waited[0])
    end(engine, rows)
    return 1e3 * statistics.median(found)


if __name__ == "__main__":
    main()
