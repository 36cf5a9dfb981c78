"""The rates of this device, measured in a few seconds with the code that engines run.

Linear layers, attention and sampling are those of a model of the same shape with random weights. It
has more layers than a cache holds; in place of experts it has MLPs of the size that a row takes.
The host is measured on engines whose model computes next to nothing.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import onestem
from onestem.cost.rates import Curve, Rates
from onestem.cost.step import ModelShape, StepCost
from onestem.cost.timing import events_ms, graph_ms
from onestem.engine.engine import Engine
from onestem.engine.step.inputs import StepInputs
from onestem.engine.step.launch import make_runner
from onestem.engine.step.runner import Runner, StepRunner
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.weights import random_decoder
from onestem.ops import (
    AttentionImpl,
    AttentionPlan,
    PlanBuilder,
    PreparedAttention,
    resolve,
    resolve_sampling,
)
from onestem.ops.sampling import IDLE, RowTable
from onestem.options import EngineOptions, Quantize
from onestem.request import Request, SamplingParams
from onestem.shapes import find_shape
from onestem.threads import ram_bytes

CACHE_BYTES = 192 << 20  # more than most processors' caches hold
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A step that takes longer, and at least so much longer than the one of fewer rows, is the last
# measured: the rate stays from there.
SLOW_SECONDS, GROWTH = 0.3, 1.5
ENOUGH_SECONDS, MOST_REPEATS = 0.1, 5  # of a measurement
SLOW_CALL_SECONDS, WARM_SECONDS = 2e-3, 1.0  # slower GPU calls are timed for the latter
# Rows that see a run together, number of runs, and tokens of each.
WALKS = ((1, 64, 512), (2, 32, 512), (4, 16, 512), (16, 4, 512), (64, 1, 1024), (256, 1, 1024))
GPU_WALKS = (
    (1, 256, 2048), (4, 64, 2048), (16, 16, 2048), (64, 8, 4096), (256, 4, 8192), (1024, 1, 8192),
)  # fmt: skip
# Decodes, tokens of the run that they share, and of each one's own. They do not fill the tiles of a
# kernel, as with most prompts.
DECODES = (48, 120, 25)
SAMPLED_ROWS = (1, 8, 64, 256)
PAGE_SIZE = 16
# Requests, prompt tokens and answers' tokens of the host's jobs.
HOST_JOBS = ((1, 8, 128), (64, 8, 32), (32, 512, 1), (128, 8, 1))
Clock = Callable[[], float]


def device_name(device: torch.device) -> str:
    """The device's common name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


@torch.inference_mode()
def measure(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: Quantize | None = None,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Measure the rates of this device for a model's shape; takes some seconds.

    Args:
        quantization: the format of the layers' weights; rates in bytes are as if they had 16 bits.
        clock: the clock on a CPU; `time.process_time` of one thread gives the seconds of a machine
            that nobody else uses.
    """
    config = config.without_experts()
    layer_bytes = ModelShape.of(config, dtype.itemsize).layer_parameters * dtype.itemsize
    layers = -(-CACHE_BYTES * config.num_layers // layer_bytes)
    layers = min(config.num_layers, max(2, layers))
    some = config.first_layers(layers)
    decoder = random_decoder(some, dtype=dtype, device=device, quantization=quantization)
    shape = ModelShape.of(some, dtype.itemsize)
    impl = resolve("auto", device, heads=some.head_shapes)
    step, row, token, request = _host(device, clock)
    rates = Rates(
        device=device_name(device),
        source=f"measured with onestem {onestem.__version__}, torch {torch.__version__}",
        dtype=str(dtype).removeprefix("torch."),
        linear=linear_rates(decoder, shape, impl, clock),
        attention=_attention(decoder, shape, impl, clock),
        head=_head(decoder, shape, clock),
        call_seconds=_decode_seconds(decoder, impl, clock, 1, 1, PAGE_SIZE) / layers,
        step_seconds=step,
        row_seconds=row,
        token_seconds=token,
        request_seconds=request,
        overlaps=device.type == "cuda",
        step_tokens=decoder.step_rows,
        memory_bytes=_memory_bytes(device),
    )
    if rates.overlaps:  # what a decode takes beside its bytes overlaps with reading them
        return rates
    decodes, shared, own = DECODES
    seconds = _decode_seconds(decoder, impl, clock, decodes, 1, shared, own)
    rest = seconds - StepCost(shape, rates).attention([(shared, decodes)], own, decodes)
    return replace(rates, walk_seconds=max(0.0, rest) / decodes / layers)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return ram_bytes()


def _seconds(
    call: Callable[[], object], device: torch.device, clock: Clock, *, cold: bool = True
) -> float:
    """The median of some calls. On a GPU launches follow each other as an engine's do. On a CPU,
    `cold` fills the caches with something else before each call."""
    if device.type == "cuda":
        call()
        times = events_ms(call, MOST_REPEATS)
        if min(times) / 1e3 > SLOW_CALL_SECONDS:
            # Under a lasting load, the power limit lowers the clock.
            times = events_ms(call, round(WARM_SECONDS * 1e3 / min(times)))[-MOST_REPEATS:]
        return statistics.median(times) / 1e3
    other = torch.zeros(CACHE_BYTES // 4, device="cpu")
    call()
    found: list[float] = []
    while len(found) < MOST_REPEATS and sum(found) < ENOUGH_SECONDS:
        if cold:
            other.add_(1)
        began = clock()
        call()
        found.append(clock() - began)
    return statistics.median(found)


def linear_rates(decoder: Decoder, shape: ModelShape, impl: AttentionImpl, clock: Clock) -> Curve:
    """Rates of steps of the model without attention and logits."""
    rows = [count for count in ROWS if count <= decoder.step_rows]
    pages = -(-rows[-1] // PAGE_SIZE)
    runner = make_runner(decoder, impl, num_pages=pages, page_size=PAGE_SIZE, share="no-attention")
    measured, before = dict[int, float](), math.inf
    for count in rows:
        call = _runs(runner, count, sampled=0)
        measured[count] = seconds = _seconds(call, decoder.device, clock)
        if seconds > max(SLOW_SECONDS, GROWTH * before):
            break
        before = seconds
    return _curve(measured, 2.0 * shape.layer_parameters, shape.layer_parameters * shape.itemsize)


def _runs(runner: StepRunner, rows: int, sampled: int) -> Callable[[], object]:
    """A call that runs a step of `rows` rows that see nothing."""
    # Random ids: products of equal rows take less power, so a GPU's clock would stay higher.
    ids = np.random.default_rng(0).integers(0, runner.decoder.config.vocab_size, rows)
    positions, wanted = np.zeros(rows, np.int64), np.arange(sampled)
    # All rows are read, so that they go through the whole last layer.
    read = np.arange(rows)
    inputs = StepInputs(ids, positions, np.arange(rows), {}, wanted, [], read, [], 0)
    prepared = runner.prepare(inputs, None)
    return lambda: runner.run(inputs, prepared, None)


def _curve(seconds: dict[int, float], flops_per_row: float, num_bytes: float) -> Curve:
    """The curve of products that took `seconds`, by rows; the shortest gives the bytes' rate."""
    rates = tuple(flops_per_row * rows / taken for rows, taken in seconds.items())
    return Curve(tuple(seconds), rates, num_bytes / min(seconds.values()))


def _attention(decoder: Decoder, shape: ModelShape, impl: AttentionImpl, clock: Clock) -> Curve:
    """Rates of decodes after runs of several lengths."""
    measured = {}
    for rows, count, tokens in GPU_WALKS if decoder.device.type == "cuda" else WALKS:
        seconds = _decode_seconds(decoder, impl, clock, rows, count, tokens)
        measured[round(rows * shape.group)] = seconds / (count * tokens)
    return _curve(measured, shape.token_flops, shape.read_bytes)


def _decode_seconds(
    decoder: Decoder,
    impl: AttentionImpl,
    clock: Clock,
    rows: int,
    count: int,
    tokens: int,
    own: int = 0,
) -> float:
    """Seconds of attention over all layers, of decodes: `rows` after each of `count` runs.

    Args:
        tokens: of each run. own: tokens of each decode's own run.
    """
    plan, num_pages = _decodes(rows, count, tokens, own)
    runner = Runner(decoder, impl, num_pages=num_pages, page_size=PAGE_SIZE, share="full")
    pages = list(runner.pages.values())
    for k_pages, v_pages in pages:
        k_pages[:] = torch.randn_like(k_pages[:1])
        v_pages[:] = torch.randn_like(v_pages[:1])
    config = decoder.config
    q = {
        size: torch.randn(
            plan.num_rows, config.num_q_heads, size, dtype=decoder.dtype, device=decoder.device
        )
        for size in {heads.head_dim for heads in config.heads}
    }

    def attend(ready: PreparedAttention) -> None:
        for k_pages, v_pages in pages:
            ready.attend(q[k_pages.shape[3]], k_pages, v_pages, decoder.scores)

    if decoder.device.type == "cuda":
        ready = impl.prepare(plan)
        return graph_ms(lambda: attend(ready)) / 1e3
    return _seconds(lambda: attend(impl.prepare(plan)), decoder.device, clock)


def _decodes(rows: int, count: int, tokens: int, own: int) -> tuple[AttentionPlan, int]:
    """The plan of `_decode_seconds`, and the number of its pages."""
    builder, used = PlanBuilder(PAGE_SIZE), 0
    each, alone = (-(-size // PAGE_SIZE) for size in (tokens, own))
    num_pages = count * (each + rows * alone)
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    for i in range(count):
        run = builder.add_run(order[used : used + each], 0, tokens, 0)
        builder.add_span(i * rows, rows, run, tokens)
        used += each
        for row in range(i * rows, (i + 1) * rows if own else 0):
            run = builder.add_run(order[used : used + alone], 0, own, tokens)
            builder.add_span(row, 1, run, own)
            used += alone
    return builder.build(np.full(rows * count, tokens + own - 1)), num_pages


def _head(decoder: Decoder, shape: ModelShape, clock: Clock) -> Curve:
    """Rates of logits and draws at temperature 1."""
    draw, measured = resolve_sampling(decoder.device).draw, {}
    for rows in SAMPLED_ROWS:
        records = np.full(rows, IDLE)
        records["temperature"], records["seed_low"] = 1, np.arange(rows)
        table = RowTable(records, decoder.device)
        hidden = torch.randn(rows, shape.hidden_size, dtype=decoder.dtype, device=decoder.device)

        def call(hidden: Tensor = hidden, table: RowTable = table) -> object:
            return draw(decoder.logits(hidden), table)

        measured[rows] = _seconds(call, decoder.device, clock)
    weights = shape.hidden_size * shape.vocab_size
    return _curve(measured, 2.0 * weights, weights * shape.itemsize)


def _host(device: torch.device, clock: Clock) -> tuple[float, float, float, float]:
    """Host seconds of a step, of a row that decodes, of a prompt's token and of a request: least
    squares of the relative errors over some jobs."""
    config = ModelConfig.from_directory(find_shape("nothing"))
    nothing = random_decoder(config, dtype=torch.float32, device=device)
    most = max(count * (prompt + tokens + PAGE_SIZE) for count, prompt, tokens in HOST_JOBS)
    options = EngineOptions(max_step_tokens=512, page_size=PAGE_SIZE, seed=0)
    engine = Engine(nothing, None, GenerationDefaults(), options, num_pages=most // PAGE_SIZE)
    runner = engine.launcher.runner
    model = 0.0
    if runner.depth == 1:  # the model's part is already in linear layers
        model = _seconds(_runs(runner, 1, sampled=1), device, clock, cold=False)
    counted = []
    for count, prompt, tokens in HOST_JOBS:
        seconds, steps = min(_host_run(engine, count, prompt, tokens, clock))
        parts = (steps, count * (tokens - 1), count * prompt, count)
        counted.append([part / (seconds - steps * model) for part in parts])
    engine.close()
    found = np.linalg.lstsq(np.array(counted), np.ones(len(counted)), rcond=None)[0]
    step, row, token, request = np.maximum(found, 0.0).tolist()
    return step, row, token, request


def _host_run(
    engine: Engine, count: int, prompt: int, tokens: int, clock: Clock
) -> Iterator[tuple[float, int]]:
    """Seconds and steps of each of several runs of a job."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    ids = np.random.default_rng(0).integers(0, 64, (count, prompt)).tolist()
    for _ in range(3):
        requests = [
            Request(request_id=str(i), prompt_token_ids=one, params=params)
            for i, one in enumerate(ids)
        ]
        engine.cache.clear()
        engine.reset_stats()
        began = clock()
        for _ in engine.run(requests):
            pass
        yield clock() - began, engine.stats.steps
