"""What a job costs at least: FLOPs at the measured matrix rate, bytes at the measured memory rate.

    python -m benchmarks.peers.floors DTYPE

prints the two rates of this machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.peers.cases import kv_bytes_per_token
from benchmarks.peers.runners.job import Job

if TYPE_CHECKING:
    import torch

__all__ = ["Floor", "Rates", "floor"]

REPEATS = 7
SLOW_SECONDS = 0.2  # eight times as much for the next size


@dataclass(frozen=True)
class Rates:
    """Measured: matrix products in FLOP/s, memory in bytes/s."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Floor:
    """Of any engine that computes and stores each distinct token once.

    `flops` counts the two products of attention over what each row sees, so sharing saves none
    there. `bytes` counts, for each of the `output_tokens` steps that must follow each other, all
    weights once and every distinct token's keys and values once.
    """

    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> dict[str, float]:
        flops, memory = self.flops / rates.flops, self.bytes / rates.bytes
        return {"flops": flops, "bytes": memory, "floor": max(flops, memory)}


def floor(config: dict[str, Any], job: Job) -> Floor:
    layer_weights, head_weights = _weights(config)
    prompt_rows = _distinct_prompt_tokens(job)
    requests, steps = len(job.prompts), job.output_tokens
    rows = prompt_rows + requests * (steps - 1)
    head_size = config["hidden_size"] // config["num_attention_heads"]
    per_pair = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_size
    flops = 2.0 * layer_weights * rows + 2.0 * head_weights * requests * steps
    flops += float(per_pair) * _pairs(job)
    token_bytes = kv_bytes_per_token(config, job.dtype)
    itemsize = 4 if job.dtype == "float32" else 2
    kv_reads = prompt_rows * (steps - 1) + requests * steps * (steps - 1) // 2
    num_bytes = float(itemsize) * (layer_weights + head_weights) * steps
    return Floor(flops, num_bytes + float(token_bytes) * (kv_reads + rows))


def _weights(config: dict[str, Any]) -> tuple[int, int]:
    """Elements of all layers' matrices, and of the head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    return config["num_hidden_layers"] * layer, config["vocab_size"] * hidden


def _distinct_prompt_tokens(job: Job) -> int:
    return sum(
        g.prefix_tokens + sum(len(job.prompts[m]) - g.prefix_tokens for m in g.members)
        for g in job.groups
    )


def _pairs(job: Job) -> int:
    """Query rows times the keys that each sees, over the distinct rows."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2

    total = 0
    for group in job.groups:
        total += triangle(group.prefix_tokens)
        for member in group.members:
            # The last sampled token is never computed.
            end = len(job.prompts[member]) + job.output_tokens - 1
            total += triangle(end) - triangle(group.prefix_tokens)
    return total


def measure_rates(dtype: str) -> Rates:
    """Of products, the best of square ones and of a packed linear of 256 rows, in `dtype` or in
    float32 (where a processor emulates 16 bits, float32 is faster and as good); of memory, the
    better of a read and a copy of 1 GiB. A floor is a bound, so the fastest repeat of each counts.
    """
    import torch

    kinds = {torch.float32, getattr(torch, dtype)}
    big = torch.ones(2**28, dtype=torch.float32)
    other = torch.empty_like(big)
    read = big.nbytes / _least_seconds(big.sum)
    copy = 2 * big.nbytes / _least_seconds(lambda: other.copy_(big))
    return Rates(max(max(_square_rate(k), _packed_rate(k)) for k in kinds), max(read, copy))


def _square_rate(kind: torch.dtype) -> float:
    """FLOP/s of an n^3 product at the n that suits the processor best: small ones stay in the
    caches, large ones amortise more. Sizes that would take a second or so are left out."""
    import torch

    best = 0.0
    for size in (512, 1024, 2048, 4096):
        a, b = (torch.randn(size, size, dtype=kind) for _ in range(2))
        seconds = _least_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds > SLOW_SECONDS:
            break
    return best


def _packed_rate(kind: torch.dtype) -> float:
    """FLOP/s of 256 rows times a packed 4096 x 4096 weight; 0 where oneDNN does not pack it."""
    import torch

    if kind != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0.0
    rows = torch.randn(256, 4096, dtype=kind)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(4096, 4096, dtype=kind), 64)
    multiply = torch.ops.mkldnn._linear_pointwise
    seconds = _least_seconds(lambda: multiply(rows, packed, None, "none", [], ""))
    return 2 * 256 * 4096**2 / seconds


def _least_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(asdict(measure_rates(sys.argv[1]))))
