"""Peak memory of `onestem batch` on a large job, and its time.

    python -m onestem_lab.memory [--requests 100000] [--groups 50] [--prefix 1994] [--own 6]
        [--kv-memory 1GiB] [--out lab/results/memory.json]

Prompts of random token ids behind `groups` prefixes, in turn (question-major), one token sampled of
each, on the embedded model in float32. The limit is the model, KV memory and 2 GB. The peak counts
pages of mapped files too, which the system takes back at need; what the process allocated itself
(anonymous) stands beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import onestem
from onestem.options import parse_memory
from onestem_lab.results import write

MODEL = Path(onestem.__file__).parent / "embedded" / "model" / "model.safetensors"
VOCAB_SIZE = 2560
SLACK_BYTES = 2_000_000_000
INTERVAL = 0.1  # seconds between two looks at the process


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as directory:
        job, output = Path(directory) / "job.jsonl", Path(directory) / "out.jsonl"
        write_job(job, options)
        command = [sys.executable, "-m", "onestem", "batch", str(job), "-o", str(output)]
        command += ["--dtype", "float32", "--kv-memory", options.kv_memory, "--quiet"]
        seconds, peak, anonymous = run(command)
        answers = sum(json.loads(line)["error"] is None for line in output.open())
        job_bytes = job.stat().st_size
    model, kv = 2 * MODEL.stat().st_size, parse_memory(options.kv_memory)  # bf16 on disk
    limit = model + kv + SLACK_BYTES
    result = {
        "command": f"python -m onestem_lab.memory {' '.join(sys.argv[1:])}".strip(),
        "requests": options.requests,
        "prompt_tokens": options.requests * (options.prefix + options.own),
        "answers": answers,
        "job_bytes": job_bytes,
        "seconds": seconds,
        "model_bytes": model,
        "kv_bytes": kv,
        "peak_bytes": peak,
        "peak_anonymous_bytes": anonymous,
        "limit_bytes": limit,
        "good": answers == options.requests and peak <= limit,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        write(options.out, result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=50)
    parser.add_argument("--prefix", type=int, default=1994)
    parser.add_argument("--own", type=int, default=6)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def write_job(path: Path, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)

    def draw(count: int) -> str:
        return ",".join(map(str, rng.integers(3, VOCAB_SIZE, count)))

    prefixes = [draw(options.prefix) for _ in range(options.groups)]
    with path.open("w") as file:
        for i in range(options.requests):
            prompt = f"[{prefixes[i % options.groups]},{draw(options.own)}]"
            body = f'{{"prompt":{prompt},"max_tokens":1,"temperature":0}}'
            head = f'"custom_id":"r{i}","method":"POST","url":"/v1/completions"'
            file.write(f'{{{head},"body":{body}}}\n')


def run(command: list[str]) -> tuple[float, int, int]:
    """Run a command: seconds; bytes at the peak, of all memory and of anonymous memory."""
    started, peak, anonymous = time.perf_counter(), 0, 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            status = memory_of(process.pid)
            peak = max(peak, status.get("VmHWM", 0))
            anonymous = max(anonymous, status.get("RssAnon", 0))
            time.sleep(INTERVAL)
    if process.returncode != 0:
        sys.exit(f"onestem batch ended with exit code {process.returncode}")
    return time.perf_counter() - started, peak, anonymous


def memory_of(pid: int) -> dict[str, int]:
    """Bytes, by the names of /proc/PID/status; nothing of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in fields}


if __name__ == "__main__":
    main()
