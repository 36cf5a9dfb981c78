"""What a decode step costs behind prefixes of 1K to 16K tokens, against the same step without
attention.

    python -m onestem_lab.decode [--shape 0.1b] [--dtype bfloat16] [--batch 64] [--own 128]
        [--prefixes 1024,2048,4096,8192,16384]

Allowed is 1.15 times what the shared FLOPs take at 60% of the matrix rate plus what the own bytes
take at 85% of the memory rate, both measured in the same run. Also Hydragen's two percentages: the
rate against that at 1K, and the share of the rate without attention, beside what those FLOPs and
bytes alone would allow at the measured rates. Random weights; steps of the two engines take turns.
On a CPU a pass of the step's products of matrices alone has turns too; what the other FLOPs and
bytes allow of its rate counts recurrent states as read and written once, at the rate of a
multiplication in place. `engine_gpu` measures the same on a GPU. Written to
lab/results/decode-SHAPE-DTYPE.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from onestem.engine.engine import Engine
from onestem.llm import LLM
from onestem.models.config import GenerationDefaults
from onestem.models.decoder import Decoder
from onestem.options import EngineOptions, ShareMode
from onestem.request import Request, SamplingParams
from onestem_lab.attention.rates import measure_rates
from onestem_lab.results import RESULTS, machine, write
from onestem_lab.timing import least_seconds

PREFIXES = (1024, 2048, 4096, 8192, 16384)
FIRST, STEPS = 4, 32  # steps of decodes that are not timed, and that are


class Rates(Protocol):
    """Measured ceilings: FLOP/s of a matrix product, bytes/s of memory."""

    @property
    def flops(self) -> float: ...
    @property
    def bytes(self) -> float: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--own", type=int, default=128, help="tokens of each sequence, on average")
    parser.add_argument("--prefixes", default=",".join(map(str, PREFIXES)))
    options = parser.parse_args()
    llm = LLM(f"shape:{options.shape}", device="cpu", dtype=options.dtype)
    rates = measure_rates(llm.device, llm.dtype)
    result = {
        "command": f"python -m onestem_lab.decode --shape {options.shape} --dtype {options.dtype} "
        f"--batch {options.batch} --own {options.own} --prefixes {options.prefixes}",
        "machine": machine(),
        "matrix_flops_per_s": rates.flops,
        "memory_bytes_per_s": rates.bytes,
        "decode": measure_decode(
            llm.decoder,
            rates,
            batch=options.batch,
            own=options.own,
            prefixes=tuple(map(int, options.prefixes.split(","))),
        ),
    }
    name = f"decode-{options.shape}-{options.dtype}.json"
    write(RESULTS / name, result)


def measure_decode(
    decoder: Decoder,
    rates: Rates,
    *,
    batch: int,
    own: int,
    prefixes: tuple[int, ...] = PREFIXES,
) -> list[dict[str, float]]:
    """An entry for each prefix. On a CPU the engine with attention and the one without take turns,
    step by step, so that both see the same moments of the machine; on a GPU steps of one engine are
    in flight while the next is made, so one runs behind the other."""
    tokens = max(prefixes) + batch * (own + 2 * STEPS) + 16 * batch
    engines = [make_engine(decoder, share, tokens, batch) for share in ("full", "no-attention")]
    found: list[dict[str, float]] = []
    for prefix in prefixes:
        turns = [steps(engine, prefix, batch, own) for engine in engines]
        alone: list[float] = []
        if decoder.device.type == "cpu":
            rounds = list(zip(*turns, products(decoder, batch), strict=False))
            pairs, alone = [one[:2] for one in rounds], [one[2] for one in rounds]
        else:
            pairs = list(zip(*map(list, turns), strict=True))
        full, bare = (
            statistics.median(one.seconds for one in side) for side in zip(*pairs, strict=True)
        )
        mean_own = statistics.mean(one.own_tokens for one, _ in pairs)
        least, allowed = attention_seconds(decoder, rates, batch, prefix, mean_own)
        found.append(
            {
                "prefix": prefix,
                "own_tokens": mean_own,
                "step_ms": 1e3 * full,
                "no_attention_step_ms": 1e3 * bare,
                "attention_ms": 1e3 * (full - bare),
                "allowed_ms": 1e3 * allowed,
                "share_of_no_attention_rate": bare / full,
                "share_flops_allow": bare / (bare + least),
                "rate_against_1k": found[0]["step_ms"] / (1e3 * full) if found else 1.0,
            }
        )
        if alone:
            found[-1] |= against_products(decoder, statistics.median(alone), full, least, batch)
        print({key: round(value, 3) for key, value in found[-1].items()}, flush=True)
    return found


def products(decoder: Decoder, batch: int) -> Iterator[float]:
    """Seconds of all products of matrices of a step of `batch` rows, again and again."""
    linears: list[Any] = [one for layer in decoder.layers for one in layer.linears]
    linears.append(decoder.head)
    rows = {
        size: torch.randn(batch, size, dtype=decoder.dtype)
        for size in {one.in_features for one in linears}
    }
    while True:
        started = time.perf_counter()
        for one in linears:
            one(rows[one.in_features])
        yield time.perf_counter() - started


def against_products(
    decoder: Decoder, alone: float, full: float, least: float, batch: int
) -> dict[str, float]:
    """The step's rate against that of its products, which take `alone` seconds, and what that is
    at best where attention takes `least`."""
    states = torch.ones(batch * decoder.state_bytes // 4)
    moving = least_seconds(lambda: states.mul_(1.0))
    return {
        "products_ms": 1e3 * alone,
        "states_least_ms": 1e3 * moving,
        "share_of_products_rate": alone / full,
        "share_products_allow": alone / (alone + least + moving),
    }


def make_engine(decoder: Decoder, share: ShareMode, tokens: int, batch: int = 0) -> Engine:
    return Engine(
        decoder,
        None,
        GenerationDefaults(),
        EngineOptions(share=share, max_step_tokens=8192),
        num_pages=tokens // 16,
        num_states=2 * batch if decoder.state_bytes else 0,  # some are for kept ones
    )


def attention_seconds(
    decoder: Decoder, rates: Rates, batch: int, prefix: int, own: float
) -> tuple[float, float]:
    """What a step's shared FLOPs and own bytes take at the measured rates, and what is allowed."""
    config = decoder.config
    layers = sum(not config.has_state(layer) for layer in range(config.num_layers))
    flops = 4.0 * layers * config.num_q_heads * config.head_dim * batch * prefix
    own_bytes = decoder.kv_bytes_per_token * batch * own
    products, reading = flops / rates.flops, own_bytes / rates.bytes
    return products + reading, 1.15 * (products / 0.6 + reading / 0.85)


class Step(NamedTuple):
    """A timed step, and the mean of its sequences' own tokens."""

    seconds: float
    own_tokens: float


def steps(engine: Engine, prefix: int, batch: int, own: int) -> Iterator[Step]:
    """Timed steps of `batch` sequences that decode behind one prefix, one at a time."""
    rng = np.random.default_rng(prefix)
    head = rng.integers(0, 1000, prefix).tolist()
    params = SamplingParams(max_tokens=STEPS + 12, temperature=0, ignore_eos=True)
    for i in range(batch):
        ids = [*head, 1000 + i % 1000, *rng.integers(0, 1000, own - STEPS // 2 - 1).tolist()]
        engine.add_request(Request(request_id=f"{prefix}-{i}", prompt_token_ids=ids, params=params))
    count = 0
    while engine.has_unfinished():
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        if not all_decode(engine, batch):
            continue
        count += 1
        if FIRST < count <= FIRST + STEPS:
            positions = engine.batch_rows.inputs.positions
            yield Step(seconds, float(positions.mean()) + 1 - prefix)
    engine.cache.clear()


def all_decode(engine: Engine, batch: int) -> bool:
    """Whether the last step was one of decodes alone, of the whole batch."""
    return len(engine.batch_rows) == batch and not engine.batch_rows.chunks


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
