"""The rates of this device, measured in a few seconds with the code that engines run, and kept.

Linear layers, attention and sampling are those of a model of the same shape with random weights. It
has more layers than a cache holds; in place of experts it has MLPs of the size that a row takes.
The host is measured on engines whose model computes next to nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import onestem
from onestem.cost.rates import Curve, Rates
from onestem.cost.step import FIRST_MERGED, UNMERGED, ModelShape
from onestem.cost.timing import events_ms, graph_ms
from onestem.engine.engine import Engine
from onestem.engine.step.inputs import StepInputs
from onestem.engine.step.launch import make_runner
from onestem.engine.step.runner import Runner, StepRunner
from onestem.errors import ConfigError
from onestem.files import write_whole
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.description import Rotary
from onestem.models.weights import random_decoder
from onestem.ops import AttentionImpl, AttentionPlan, PlanBuilder, resolve, resolve_sampling
from onestem.ops.sampling import IDLE, RowTable
from onestem.options import EngineOptions, Quantize
from onestem.request import Request, SamplingParams
from onestem.threads import ram_bytes

__all__ = ["keep_rates", "known_rates", "measure", "rates_here"]

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
# Groups, chunks or decodes of each, tokens of its run, and tokens of their own: neither fills the
# tiles of a kernel, as with most prompts.
CHUNKS = (6, 8, 120, 25)
FRESH_ROWS = (19, 23, 29, 37, 43)  # that no other measurement has
SAMPLED_ROWS = (1, 8, 64, 256)
PAGE_SIZE = 16
# Requests, prompt tokens and answers' tokens of the host's jobs.
HOST_JOBS = ((1, 8, 128), (64, 8, 32), (32, 512, 1), (128, 8, 1))
Clock = Callable[[], float]


def rates_here(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None = None,
) -> Rates:
    """The rates of this device for a model: those kept, or newly measured and kept.

    Args:
        quantization: the format of the layers' weights.
    """
    rates = known_rates(config, dtype, device, quantization)
    if rates is None:
        rates = measure(config, dtype, device, quantization=quantization)
        keep_rates(config, dtype, device, rates, quantization)
    return rates


def keep_rates(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rates: Rates,
    quantization: Quantize | None = None,
) -> None:
    """Write rates where `known_rates` finds them: in XDG_CACHE_HOME, keyed by `_facts`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    facts = _facts(config, dtype, device, quantization)
    file = _file(facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(facts | {"rates": rates.to_dict()}).encode())
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: set XDG_CACHE_HOME to a folder for measured "
            "rates, or give --no-predict"
        ) from error


def known_rates(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantize | None = None,
) -> Rates | None:
    """The rates that were kept, or None."""
    try:
        kept = json.loads(_file(_facts(config, dtype, device, quantization)).read_text())
        return Rates.from_dict(kept["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: Quantize | None
) -> dict[str, Any]:
    """All that rates depend on."""
    form = {} if quantization is None else {"quantization": quantization}
    return form | {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "isa": os.environ.get("ONESTEM_CPU_ISA", ""),
        "versions": [onestem.__version__, torch.__version__],
        "shape": dataclasses.asdict(ModelShape.of(config, dtype.itemsize)),
    }


def _file(facts: Mapping[str, Any]) -> Path:
    text = json.dumps(facts, sort_keys=True)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(base) / "onestem" / "rates" / f"{name}.json"


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


# ------------------------------------------------------------------------------------ measurement


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
    attention = _attention(decoder, shape, impl, clock)
    row_bytes, walk_seconds = _rows(decoder, shape, impl, attention, clock)
    return Rates(
        device=device_name(device),
        source=f"measured with onestem {onestem.__version__}, torch {torch.__version__}",
        dtype=str(dtype).removeprefix("torch."),
        linear=_linear(decoder, shape, impl, clock),
        attention=attention,
        head=_head(decoder, shape, clock),
        row_bytes=row_bytes,
        walk_seconds=walk_seconds,
        call_seconds=_call_seconds(decoder, impl, clock),
        shape_seconds=_shape_seconds(decoder, impl, clock),
        step_seconds=step,
        row_seconds=row,
        token_seconds=token,
        request_seconds=request,
        overlaps=device.type == "cuda",
        step_tokens=decoder.step_rows,
        memory_bytes=_memory_bytes(device),
    )


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


def _linear(decoder: Decoder, shape: ModelShape, impl: AttentionImpl, clock: Clock) -> Curve:
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
    on_gpu, measured = decoder.device.type == "cuda", {}
    walks = GPU_WALKS if on_gpu else WALKS
    pages = _pages(
        decoder, impl, max(-(-count * tokens // PAGE_SIZE) for _, count, tokens in walks)
    )
    for rows, count, tokens in walks:
        prepare = _walks(decoder, impl, pages, rows, count, tokens)
        if on_gpu:
            seconds = graph_ms(prepare()) / 1e3
        else:
            seconds = _seconds(lambda p=prepare: p()(), decoder.device, clock)  # type: ignore[misc]
        measured[round(rows * shape.group)] = seconds / (count * tokens)
    return _curve(measured, shape.token_flops, shape.read_bytes)


def _pages(decoder: Decoder, impl: AttentionImpl, count: int) -> Any:
    """KV pages of each layer with something in them."""
    pages = Runner(decoder, impl, num_pages=count, page_size=PAGE_SIZE, share="full").pages
    for k_pages, v_pages in pages:
        k_pages[:] = torch.randn_like(k_pages[:1])
        v_pages[:] = torch.randn_like(v_pages[:1])
    return pages


def _rows(
    decoder: Decoder, shape: ModelShape, impl: AttentionImpl, attention: Curve, clock: Clock
) -> tuple[float, float]:
    """`Rates.row_bytes` and `Rates.walk_seconds`: what chunks of prompts, and decodes, after shared
    runs take besides their walks. 0 on a GPU: it overlaps with reading keys and values."""
    if decoder.device.type == "cuda":
        return 0.0, 0.0
    groups, each, shared, own = CHUNKS
    rows = groups * each * own
    pages = _pages(decoder, impl, _num_pages(groups, each, shared, own))

    def seconds(groups: int, each: int, own: int, *, decodes: bool) -> float:
        plan = _shared(groups, each, shared, own, decodes=decodes)
        prepare = _prepared(decoder, impl, pages, plan)
        return _seconds(lambda: prepare()(), decoder.device, clock)

    def walked(tokens: float, rows: float) -> float:
        return tokens * attention.seconds(shape.token_flops, shape.read_bytes, rows * shape.group)

    passes = FIRST_MERGED + UNMERGED
    apart = groups * walked(shared, each * own) + groups * each * walked(own / 2, own)
    rest = seconds(groups, each, own, decodes=False) - apart
    fastest = passes * rows * shape.query_bytes / attention.bytes
    row_seconds = max(rest, fastest) / rows
    count = groups * each
    apart = walked(shared, count) + count * walked(own, 1)
    rest = seconds(1, count, own, decodes=True) - apart - count * row_seconds
    walk_seconds = max(0.0, rest) / count / shape.num_layers
    # The maximum is of seconds: its inverse may be off by a rounding.
    return min(attention.bytes, passes * shape.query_bytes / row_seconds), walk_seconds


def _shared(groups: int, each: int, shared: int, own: int, *, decodes: bool) -> AttentionPlan:
    """`each` sequences after each of `groups` runs of `shared` tokens, with `own` tokens: a decode
    sees all of them, a chunk of a prompt consists of them."""
    builder, rows, page = PlanBuilder(PAGE_SIZE), 1 if decodes else own, 0
    num_pages = _num_pages(groups, each, shared, own)
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)

    def run(tokens: int, position: int) -> int:
        nonlocal page
        ids = order[page : page - (-tokens // PAGE_SIZE)]
        page += len(ids)
        return builder.add_run(ids, 0, tokens, position)

    for group in range(groups):
        first = group * each * rows
        builder.add_span(first, each * rows, run(shared, 0), shared)
        for i in range(each):
            seen = own if decodes else 1
            builder.add_span(first + i * rows, rows, run(own, shared), seen, step=1)
    own_positions = np.arange(shared, shared + own)[-rows:]
    return builder.build(np.tile(own_positions, groups * each))


def _num_pages(groups: int, each: int, shared: int, own: int) -> int:
    return groups * (-(-shared // PAGE_SIZE) - each * (-own // PAGE_SIZE))


def _call_seconds(decoder: Decoder, impl: AttentionImpl, clock: Clock) -> float:
    """Seconds of attention of a layer that sees one page."""
    pages = Runner(decoder, impl, num_pages=1, page_size=PAGE_SIZE, share="full").pages
    prepare = _walks(decoder, impl, pages, 1, 1, PAGE_SIZE)
    if decoder.device.type == "cuda":
        return graph_ms(prepare()) / 1e3 / len(pages)
    return _seconds(lambda: prepare()(), decoder.device, clock) / len(pages)


def _shape_seconds(decoder: Decoder, impl: AttentionImpl, clock: Clock) -> float:
    """Seconds that the first step of a number of rows takes more than the second. On a GPU, rows
    are padded to known numbers (`engine.step.graphs`)."""
    if decoder.device.type == "cuda":
        return 0.0
    most = max(FRESH_ROWS)
    pages = -(-most // PAGE_SIZE)
    runner = make_runner(decoder, impl, num_pages=pages, page_size=PAGE_SIZE, share="no-attention")
    more = []
    for rows in FRESH_ROWS:
        call, times = _runs(runner, rows, sampled=rows), [clock()]
        for _ in range(2):
            call()
            times.append(clock())
        more.append(times[1] - times[0] - (times[2] - times[1]))
    return max(0.0, statistics.median(more))


def _walks(
    decoder: Decoder, impl: AttentionImpl, pages: Any, rows: int, count: int, tokens: int
) -> Callable[[], Callable[[], None]]:
    """A function that prepares a step of `count` runs, each seen by `rows` rows, and returns a call
    of its attention over all layers."""
    builder = PlanBuilder(PAGE_SIZE)
    order = np.random.default_rng(0).permutation(count * tokens // PAGE_SIZE).astype(np.int32)
    each = tokens // PAGE_SIZE
    for i in range(count):
        run = builder.add_run(order[i * each : (i + 1) * each], 0, tokens, 0)
        builder.add_span(i * rows, rows, run, tokens)
    return _prepared(decoder, impl, pages, builder.build(np.full(rows * count, tokens - 1)))


def _prepared(
    decoder: Decoder, impl: AttentionImpl, pages: Any, plan: AttentionPlan
) -> Callable[[], Callable[[], None]]:
    """A function that prepares a plan and returns a call of its attention over all layers."""
    config = decoder.config
    q = {
        size: torch.randn(
            plan.num_rows, config.num_q_heads, size, dtype=decoder.dtype, device=decoder.device
        )
        for size in {heads.head_dim for heads in config.heads}
    }

    def prepared() -> Callable[[], None]:
        ready = impl.prepare(plan)

        def attend() -> None:
            for k_pages, v_pages in pages:
                ready.attend(q[k_pages.shape[3]], k_pages, v_pages, **decoder.scores)

        return attend

    return prepared


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
    nothing = random_decoder(_nothing(), dtype=torch.float32, device=device)
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


def _nothing() -> ModelConfig:
    """A model whose forward pass takes next to no time."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=32,
        positions=Rotary(32),
        max_position_embeddings=4096,
        tie_embeddings=True,
        sliding_windows=(None,),
        torch_dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )
