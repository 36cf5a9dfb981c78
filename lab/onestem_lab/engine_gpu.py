"""The engine on one GPU, shape of Llama-3.1-8B: jobs end to end, and what a decode step costs.

    python -m onestem_lab.engine_gpu --out lab/results/engine-gpu.json [--repeats 3]
    python -m onestem_lab.engine_gpu --parts row,jobs --jobs 40x16 --quantization fp8
    python -m onestem_lab.engine_gpu --parts jobs --shape llama3.1-70b --tensor-parallel-size 2

Jobs: requests per second, beside the sum of what their FLOPs and bytes take at the rates measured
in the same run, through `LLM.generate`. Decode: a step at prefixes of 1K to 16K tokens against the
same step without attention. Row: a step that decodes one sequence. Random weights in bf16 or as
`--quantization` rounds them; every token is sampled greedily and none ends a sequence.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import transformers
import triton

import onestem
from onestem.llm import LLM
from onestem.models.decoder import Decoder
from onestem.options import Quantize, ShareMode
from onestem.planner import RunningOrder, planned
from onestem.request import Request, SamplingParams
from onestem_lab.decode import all_decode, make_engine, measure_decode, steps
from onestem_lab.results import write

HERE = Path(__file__).parent
BATCH = 256  # sequences of the decode measurement
OWN_TOKENS = 128  # ... and about how many tokens each has of its own


@dataclass(frozen=True)
class Job:
    """`groups` prefixes, `degree` requests each; tokens."""

    groups: int
    degree: int
    prefix: int
    distinct: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.groups}x{self.degree} {self.prefix}/{self.distinct}/{self.output}"


TINY_JOBS = (Job(2, 3, 40, 10, 4), Job(1, 4, 60, 8, 4))
JOBS = (
    Job(40, 16, 2000, 200, 100),
    Job(10, 16, 16000, 200, 100),
    Job(200, 3, 1570, 30, 50),
    Job(1, 256, 8000, 64, 128),
)


@dataclass(frozen=True)
class Rates:
    """Measured ceilings: a bf16 matrix product of 8192^3 in FLOP/s, a copy in bytes/s."""

    flops: float
    bytes: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        return max(flops / self.flops, num_bytes / self.bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine-gpu.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--max-step-tokens", type=int, help="default: the engine's")
    parser.add_argument("--parts", default="jobs,decode", help="some of jobs, row, decode")
    parser.add_argument("--quantization", choices=get_args(Quantize), help="of the weights")
    parser.add_argument("--jobs", default="", help="only those whose names begin so (a comma list)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs")
    parser.add_argument("--share", choices=get_args(ShareMode), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a trial: tiny jobs, no figures")
    options = parser.parse_args()
    rates = measure_rates(options.device)
    llm = LLM(
        f"shape:{options.shape}",
        device=options.device,
        max_step_tokens=options.max_step_tokens,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
        share=options.share,
    )
    result: dict[str, object] = {
        "command": " ".join(["python -m onestem_lab.engine_gpu", *sys.argv[1:]]),
        "weights": llm.decoder.layers[0].qkv.kind,
        "gpu": torch.cuda.get_device_name() if llm.device.type == "cuda" else "none",
        "devices": options.tensor_parallel_size,
        "share": options.share,
        "versions": {
            "onestem": onestem.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "max_step_tokens": llm.engine.limits.step_tokens,
        "matrix_flops_per_s": rates.flops,
        "copy_bytes_per_s": rates.bytes,
    }
    if "jobs" in options.parts:
        result["jobs"] = [
            run_job(llm, job, rates, options.repeats)
            for job in (TINY_JOBS if options.tiny else JOBS)
            if job.name.startswith(tuple(options.jobs.split(",")))
        ]
    if "row" in options.parts:
        result["row_ms"] = row_ms(llm, options.repeats)
        print(f"a step of one row: {result['row_ms']:.3f} ms", flush=True)
    write(options.out, result)
    if "decode" not in options.parts:
        return
    decoder = llm.decoder
    del llm
    gc.collect()  # an engine refers to itself; its KV memory makes room for two others
    torch.cuda.empty_cache()
    result["decode"] = measure_decode(decoder, rates, batch=BATCH, own=OWN_TOKENS)
    result["host"] = measure_host(decoder)
    write(options.out, result)


def row_ms(llm: LLM, repeats: int) -> float:
    """Of a step that decodes one sequence: the difference of two lengths."""

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        llm.generate([list(range(16))], params)
        return time.perf_counter() - started

    times = [seconds(272) - seconds(16) for _ in range(repeats + 1)]
    return 1e3 * statistics.median(times[1:]) / 256


def measure_rates(device: str = "cuda") -> Rates:
    if device == "cpu":
        return Rates(1e12, 1e10)  # of a trial
    rates = _measured_rates(device)
    torch.cuda.empty_cache()  # for KV memory
    return rates


def _measured_rates(device: str) -> Rates:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    big = torch.randn(1 << 30, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(big)
    product = median_seconds(lambda: a @ b)
    copy = median_seconds(lambda: other.copy_(big))
    return Rates(2 * 8192**3 / product, 2 * big.nbytes / copy)


def median_seconds(call: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


# --- jobs --------------------------------------------------------------------------------------


def run_job(llm: LLM, job: Job, rates: Rates, repeats: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    vocab = llm.config.vocab_size
    prefixes = [rng.integers(0, vocab, job.prefix).tolist() for _ in range(job.groups)]
    prompts = [
        prefixes[i % job.groups] + rng.integers(0, vocab, job.distinct).tolist()
        for i in rng.permutation(job.groups * job.degree)
    ]
    params = SamplingParams(max_tokens=job.output, temperature=0, ignore_eos=True)
    times, inner, hosts, steps = [], [], [], 0
    for _ in range(repeats + 1):
        llm.engine.cache.clear()
        llm.engine.reset_stats()
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        times.append(time.perf_counter() - started)
        assert all(len(output.outputs[0].token_ids) == job.output for output in outputs)
        hosts.append(llm.engine.stats.host_seconds)
        steps = llm.engine.stats.steps
        # Where prompts have the most tokens for each second.
        if job.groups == 1 and llm.options.tensor_parallel_size == 1:
            inner.append(inner_seconds(llm, prompts, params))
    seconds = statistics.median(times[1:])
    floor = job_floor(llm, job, rates)
    measured = products_floor(llm, job, rates)
    result = {
        "job": job.name,
        "requests": len(prompts),
        "requests_per_s": len(prompts) / seconds,
        "seconds": seconds,
        "all_seconds": times[1:],
        "floor_seconds": floor,
        "share_of_floor": floor / seconds,
        "floor_with_measured_products_seconds": measured,
        "steps": steps,
        "host_seconds": statistics.median(hosts[1:]),
        "processed_prompt_tokens": llm.engine.stats.processed_prompt_tokens,
    }
    if inner:
        ratios = [outer / run for outer, run in zip(times[1:], inner[1:], strict=True)]
        result["engine_run_seconds"] = statistics.median(inner[1:])
        result["against_engine_run"] = statistics.median(ratios)
        print(f"LLM.generate / Engine.run: {result['against_engine_run']:.3f}", flush=True)
    print(
        f"{job.name}: {result['requests_per_s']:.1f} requests/s, {seconds:.2f} s, "
        f"floor {floor:.2f} s",
        flush=True,
    )
    return result


def inner_seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds of `Engine.run` alone, of requests that are planned already."""
    llm.engine.cache.clear()
    requests = [
        Request(request_id=f"inner-{i}", prompt_token_ids=ids, params=params)
        for i, ids in enumerate(prompts)
    ]
    ordered = list(planned(requests, RunningOrder(llm.plan(prompts, [params] * len(prompts)))))
    started = time.perf_counter()
    assert sum(1 for _ in llm.engine.run(ordered)) == len(prompts)
    return time.perf_counter() - started


def job_floor(llm: LLM, job: Job, rates: Rates) -> float:
    """Seconds of the products and of attention alone, each at the slower of its FLOPs and bytes.

    Prefill runs as one product; all requests decode together, step by step. Devices have equal
    parts, and sums over them cost nothing.
    """
    config, requests = llm.config, job.groups * job.degree
    devices = llm.options.tensor_parallel_size
    head = config.vocab_size * config.hidden_size
    layers = (llm.decoder.num_parameters - 2 * head) / devices
    head /= devices
    token_bytes = llm.decoder.kv_bytes_per_token
    pair_flops = 4.0 * config.num_layers * config.num_q_heads * config.head_dim / devices
    prefill = job.groups * job.prefix + requests * job.distinct
    pairs = job.groups * job.prefix**2 / 2
    pairs += requests * job.distinct * (job.prefix + job.distinct / 2)
    seconds = rates.seconds(2.0 * layers * prefill, 2.0 * layers) + pair_flops * pairs / rates.flops
    for step in range(job.output):
        own = job.distinct + step
        seconds += rates.seconds(2.0 * (layers + head) * requests, 2.0 * (layers + head))
        seconds += rates.seconds(
            pair_flops * requests * (job.prefix + own),
            token_bytes * (job.groups * job.prefix + requests * own),
        )
    return seconds


def products_floor(llm: LLM, job: Job, rates: Rates) -> float | None:
    """`job_floor` with the products of decodes as they take alone, at their number of rows."""
    if llm.device.type != "cuda":
        return None
    rows = job.groups * job.degree
    parameters = (llm.decoder.num_parameters - llm.config.vocab_size * llm.config.hidden_size) / (
        llm.options.tensor_parallel_size
    )
    ideal = rates.seconds(2.0 * parameters * rows, 2.0 * parameters)
    return job_floor(llm, job, rates) + job.output * (products_seconds(llm, rows) - ideal)


@torch.inference_mode()
def products_seconds(llm: LLM, rows: int) -> float:
    """Of all products of a step on this rank, and nothing else."""
    decoder = llm.decoder
    linears = [linear for layer in decoder.layers for linear in layer.linears]
    x = {
        width: torch.randn(rows, width, dtype=llm.dtype, device=llm.device)
        for width in {one.in_features for one in (*linears, decoder.head)}
    }

    def run() -> None:
        for one in linears:
            one(x[one.in_features])
        decoder.head(x[decoder.head.in_features])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return median_seconds(graph.replay, repeats=5)


# --- decode ------------------------------------------------------------------------------------


def measure_host(decoder: Decoder) -> list[dict[str, float]]:
    """Host milliseconds of a decode step: plan and scheduling."""
    found = []
    engine = make_engine(decoder, "full", 160_000)
    for batch in (1, 256, 1000):
        engine.reset_stats()
        for _ in steps(engine, 512, batch, 64):
            pass
        hosts: list[float] = []
        engine.reset_stats()
        head = list(range(512))
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        for i in range(batch):
            ids = [*head, 600 + i % 5000, i]
            engine.add_request(Request(request_id=f"h{i}", prompt_token_ids=ids, params=params))
        while engine.has_unfinished():
            before = engine.stats.host_seconds
            engine.step()
            if all_decode(engine, batch):
                hosts.append(engine.stats.host_seconds - before)
        engine.cache.clear()
        found.append({"batch": batch, "host_ms": 1e3 * statistics.median(hosts)})
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    main()
