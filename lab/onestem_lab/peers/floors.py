"""What a job costs at least: FLOPs at the measured matrix rate, bytes at the measured memory rate.

    python -m onestem_lab.peers.floors DTYPE

prints the two rates of this machine.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass

from onestem.models.config import ModelConfig
from onestem.models.tensors import Kind, Tensors
from onestem_lab.peers.cases import kv_bytes_per_token
from onestem_lab.peers.runners.job import Job

__all__ = ["Floor", "Rates", "floor"]


@dataclass(frozen=True)
class Rates:
    """Measured: matrix products in FLOP/s, memory in bytes/s."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Floor:
    """Of any engine that computes and stores each distinct token once.

    `flops` counts the two products of attention over what each row sees, so sharing saves none
    there, and three with a recurrent state for each row (6 FLOP for each of its 4 bytes). `bytes`
    counts, for each of the `output_tokens` steps that must follow each other, all
    weights once and every distinct token's keys and values once; and each request's recurrent state
    twice, which is written again.
    """

    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> dict[str, float]:
        flops, memory = self.flops / rates.flops, self.bytes / rates.bytes
        return {"flops": flops, "bytes": memory, "floor": max(flops, memory)}


def floor(config: ModelConfig, job: Job) -> Floor:
    layer_weights, head_weights = _weights(config)
    prompt_rows = _distinct_prompt_tokens(job)
    requests, steps = len(job.prompts), job.output_tokens
    rows = prompt_rows + requests * (steps - 1)
    sizes = [one.head_dim for i, one in enumerate(config.heads) if not config.has_state(i)]
    flops = 2.0 * layer_weights * rows + 2.0 * head_weights * requests * steps
    flops += 4.0 * config.num_q_heads * sum(sizes) * _pairs(job)
    token_bytes = kv_bytes_per_token(config, job.dtype)
    itemsize = 4 if job.dtype == "float32" else 2
    kv_reads = prompt_rows * (steps - 1) + requests * steps * (steps - 1) // 2
    num_bytes = float(itemsize) * (layer_weights + head_weights) * steps
    if config.delta is not None:
        flops += 1.5 * config.delta.state_bytes(0) * rows
        num_bytes += 2.0 * config.delta.state_bytes(itemsize) * requests * (steps - 1)
    return Floor(flops, num_bytes + float(token_bytes) * (kv_reads + rows))


def _weights(config: ModelConfig) -> tuple[int, int]:
    """Elements of all layers' matrices, and of the head."""
    matrices = [math.prod(one.shape) for one in Tensors(config) if one.kind is Kind.MATRIX]
    return sum(matrices), config.vocab_size * config.hidden_size


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
    """Of products, see `product_rate`; of memory, the better of a read and a copy of 1 GiB. A floor
    is a bound, so the fastest repeat of each counts."""
    import torch

    from onestem_lab.attention.rates import product_rate
    from onestem_lab.timing import least_seconds

    big = torch.ones(2**28, dtype=torch.float32)
    other = torch.empty_like(big)
    read = big.nbytes / least_seconds(big.sum)
    copy = 2 * big.nbytes / least_seconds(lambda: other.copy_(big))
    return Rates(product_rate(getattr(torch, dtype)), max(read, copy))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_rates(sys.argv[1]))))
