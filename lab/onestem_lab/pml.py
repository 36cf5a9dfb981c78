"""Benchmarks of prompts of modules: time to the first token, and throughput over a library."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from onestem.errors import ConfigError
from onestem.pml import CompiledPrompt, Isolation, Segment
from onestem.request import ONE_TOKEN, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from onestem.llm import LLM

__all__ = ["FirstTokenCase", "LibraryCase", "Tier", "measure_first_token", "measure_library"]

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, kw_only=True)
class FirstTokenCase:
    """One prompt: `modules` modules of together `cached` tokens, and `new` tokens of text.

    Attributes:
        tier: where the modules are when the prompt comes.
        repeat: prompts measured, each with another text.
    """

    cached: int = 5000
    new: int = 50
    modules: int = 5
    isolation: Isolation = "anchored"
    tier: Tier = "device"
    repeat: int = 3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LibraryCase:
    """`prompts` prompts over `library` modules of `module_tokens` tokens: each imports `imports` of
    them, in combinations that differ, adds `new` tokens and samples `output`. With `moved`, they
    stand one behind the other in a random order, and none where it was stored."""

    prompts: int = 64
    library: int = 10
    module_tokens: int = 1000
    imports: int = 3
    new: int = 50
    output: int = 64
    moved: bool = False
    isolation: Isolation = "anchored"
    seed: int = 0


class _Modules:
    """Modules of random token ids, one after the other, in a schema with nothing else."""

    def __init__(
        self, lengths: Sequence[int], isolation: Isolation, vocab_size: int, seed: int
    ) -> None:
        self.isolation = isolation
        self.vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self.end = int(starts[-1])
        self.segments = [
            self._segment(self.draw(n), start) for n, start in zip(lengths, starts, strict=False)
        ]

    def draw(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self.vocab_size, count).astype(np.int32)

    def _segment(self, ids: np.ndarray, position: int) -> Segment:
        if self.isolation == "off":
            return Segment("text", ids, position, "module")
        text = f"bench {self.isolation} ".encode() + ids.tobytes()
        key = hashlib.blake2b(text, digest_size=16).hexdigest()
        return Segment("cached", ids, position, "module", key=key)

    def prompt(self, chosen: Sequence[int], new: int, *, moved: bool = False) -> CompiledPrompt:
        segments, end = [self.segments[index] for index in chosen], self.end
        if moved:
            end = 1  # no multiple of the modules' length
            for i, segment in enumerate(segments):
                segments[i] = replace(segment, position=end)
                end = segments[i].end
        text = Segment("text", self.draw(new), end, "prompt")
        return CompiledPrompt("bench", self.isolation, (*segments, text), end + new)


def measure_first_token(llm: LLM, case: FirstTokenCase, folder: Path | None) -> dict[str, Any]:
    """Time to the first token with modules at hand, and with everything computed (`off`).

    Args:
        folder: of the disk tier, where `case.tier` is `disk`.
    """
    vocab_size, engine = llm.config.vocab_size, llm.engine
    lengths = _shares(case.cached, case.modules)
    plain = _Modules(lengths, "off", vocab_size, case.seed)
    cached = _Modules(lengths, case.isolation, vocab_size, case.seed)
    everything = range(case.modules)
    _first_token(llm, plain.prompt(everything, case.new))  # warms up

    off: list[_First] = []
    for _ in range(case.repeat):
        engine.cache.clear()
        off.append(_first_token(llm, plain.prompt(everything, case.new)))
    engine.cache.clear()
    encode = _first_token(llm, cached.prompt(everything, case.new)).seconds
    device = [
        _first_token(llm, cached.prompt(everything, case.new)) for _ in range(case.repeat + 1)
    ]
    at_hand: list[_First] = []
    sources = []
    for _ in range(case.repeat):
        _leave_only(llm, case.tier, folder)
        before = _copied(llm)
        at_hand.append(_first_token(llm, cached.prompt(everything, case.new)))
        sources.append(_source(case, before, _copied(llm)))

    step = _median(device[1:])  # the first warms up
    seconds, off_seconds = _median(at_hand), _median(off)
    linear = _linear_rate(llm, case.cached + case.new)
    prefill = (case.cached + case.new) / off_seconds
    return {
        **asdict(case),
        **_setting(llm),
        "first_token_seconds": seconds,
        "device_first_token_seconds": step,
        "first_token_seconds_all": [each.seconds for each in at_hand],
        "computed_tokens": at_hand[-1].computed_tokens,
        "device_computed_tokens": device[-1].computed_tokens,
        "modules_came_from": sources,
        "off_first_token_seconds": off_seconds,
        "off_first_token_seconds_all": [each.seconds for each in off],
        "off_computed_tokens": off[-1].computed_tokens,
        "speedup": off_seconds / seconds,
        "encode_seconds": encode,
        "off_tokens_per_s": prefill,
        "linear_tokens_per_s": linear,
        "off_share_of_linear_rate": prefill / linear,
        "tiers": engine.tiers.stats.to_dict() if engine.tiers is not None else None,
        **_copy_times(llm, case, step),
    }


def _shares(total: int, parts: int) -> list[int]:
    if not 1 <= parts <= total:
        raise ConfigError(f"modules is {parts}, expected 1 to {total} (cached)")
    return [total // parts + (index < total % parts) for index in range(parts)]


class _First(NamedTuple):
    """A first token: when it came, and how many of the prompt's tokens were computed for it."""

    seconds: float
    computed_tokens: int


def _median(all_of: Sequence[_First]) -> float:
    return median(each.seconds for each in all_of)


def _first_token(llm: LLM, compiled: CompiledPrompt) -> _First:
    before = llm.engine.stats.processed_prompt_tokens
    (output,) = llm.engine.run([llm.pml_request(compiled, ONE_TOKEN)])
    metrics = output.metrics
    assert metrics.first_token_time is not None
    computed = llm.engine.stats.processed_prompt_tokens - before
    return _First(metrics.first_token_time - metrics.arrival_time, computed)


def _copied(llm: LLM) -> dict[str, int]:
    """Tokens copied so far, by tier."""
    tiers = llm.engine.tiers
    if tiers is None:
        return {"host": 0, "disk": 0}
    return {"host": tiers.stats.from_host_tokens, "disk": tiers.stats.from_disk_tokens}


def _source(case: FirstTokenCase, before: dict[str, int], after: dict[str, int]) -> str:
    """Where a prompt's modules came from: with the disk tier a GPU may choose to compute them."""
    used = [tier for tier in after if after[tier] > before[tier]]
    return used[0] if used else "device" if case.tier == "device" else "computed"


def _leave_only(llm: LLM, tier: Tier, folder: Path | None) -> None:
    """Empty the tiers in front of the one that is measured."""
    tiers = llm.engine.tiers
    if tier == "device":
        return
    llm.engine.cache.clear()
    assert tiers is not None
    tiers.stores.flush()
    if tier == "disk":
        tiers.stores.clear_host()
        assert folder is not None
        for path in folder.iterdir():
            _drop_from_page_cache(path)


def _drop_from_page_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _linear_rate(llm: LLM, rows: int) -> float:
    """Tokens per second of the layers' matrix products alone, at the rows of a prefill step."""
    decoder = llm.decoder
    rows = min(rows, llm.engine.limits.step_tokens)
    hidden = torch.randn(rows, llm.config.hidden_size).to(decoder.device, decoder.dtype)
    layer = decoder.layers[0]
    widths = {each.output.in_features for each in decoder.layers}
    outs = {width: torch.randn(rows, width).to(hidden) for width in widths}

    def products() -> None:
        for each in decoder.layers:
            each.qkv(hidden), each.output(outs[each.output.in_features])
            decoder.mlp(each, hidden, hidden)

    with torch.inference_mode():
        layer.qkv(hidden)
        seconds = min(_timed(llm, products) for _ in range(3))
    return rows / seconds


def _timed(llm: LLM, work: Any) -> float:
    _wait(llm)
    started = time.perf_counter()
    work()
    _wait(llm)
    return time.perf_counter() - started


def _wait(llm: LLM) -> None:
    if llm.device.type == "cuda":
        torch.cuda.synchronize(llm.device)


def _copy_times(llm: LLM, case: FirstTokenCase, step: float) -> dict[str, float]:
    """Seconds to copy the modules from pinned host memory at the link's measured rate, and a bound
    of a first token from there: 1.3 times the larger of copying and computing, plus a step."""
    if llm.device.type != "cuda":
        return {}
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=llm.device)
    seconds = min(_timed(llm, lambda: target.copy_(source, non_blocking=True)) for _ in range(5))
    rate = source.nbytes / seconds
    size = case.cached * llm.decoder.kv_bytes_per_token
    copy = size / rate
    return {
        "link_bytes_per_s": rate,
        "copy_seconds": copy,
        "copy_bytes": size,
        "host_bound_seconds": 1.3 * max(copy, step) + step,
    }


# --- a library ----------------------------------------------------------------------------------


def measure_library(llm: LLM, case: LibraryCase) -> dict[str, Any]:
    """Throughput of prompts over modules that are in KV memory when the clock starts."""
    if case.imports > case.library:
        raise ConfigError(f"imports is {case.imports}, the library has {case.library} modules")
    modules = _Modules(
        [case.module_tokens] * case.library, case.isolation, llm.config.vocab_size, case.seed
    )
    chosen = list(_combinations(case))
    prompts = [modules.prompt(each, case.new, moved=case.moved) for each in chosen]
    encode_seconds = _timed(llm, lambda: _encode(llm, modules, case))
    params = SamplingParams(max_tokens=case.output, temperature=0, ignore_eos=True)
    requests = [llm.pml_request(prompt, params) for prompt in prompts]
    llm.engine.reset_stats()
    started = time.perf_counter()
    outputs = {output.request_id: output for output in llm.engine.run(requests)}
    seconds = time.perf_counter() - started
    stats = llm.engine.stats
    return {
        **asdict(case),
        **_setting(llm),
        "combinations": len(set(chosen)),
        "encode_seconds": encode_seconds,
        "seconds": seconds,
        "requests_per_s": case.prompts / seconds,
        "output_tokens_per_s": stats.output_tokens / seconds,
        **stats.to_dict(),
        "tokens_sha256": _hash([outputs[request.request_id] for request in requests]),
    }


def _combinations(case: LibraryCase) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(case.seed)
    for _ in range(case.prompts):
        drawn = rng.choice(case.library, case.imports, replace=False)
        indices = map(int, drawn)
        yield tuple(indices if case.moved else sorted(indices))


def _encode(llm: LLM, modules: _Modules, case: LibraryCase) -> None:
    """Compute each module once (and warm up)."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    requests: list[Request] = [
        llm.pml_request(modules.prompt([index], case.new), params) for index in range(case.library)
    ]
    for _ in llm.engine.run(requests):
        pass


def _setting(llm: LLM) -> dict[str, Any]:
    return {
        "share": llm.engine.options.share,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "attention": llm.engine.options.impl,
        "kv_tokens": llm.kv_tokens,
        "kv_bytes_per_token": llm.decoder.kv_bytes_per_token,
    }


def _hash(outputs: Sequence[RequestOutput]) -> str:
    digest = hashlib.sha256()
    for output in outputs:
        ids = output.outputs[0].token_ids
        digest.update(np.array([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()
