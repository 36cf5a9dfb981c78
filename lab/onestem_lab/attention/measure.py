"""Measurement of steps: time against floors and other implementations, error against float64."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import onestem
from onestem.cost.timing import graph_ms
from onestem.errors import ConfigError, first_line
from onestem.ops.dispatch import resolve
from onestem.ops.kv import laid_out, read_kv
from onestem.ops.reference import visible
from onestem.threads import ram_bytes
from onestem_lab.attention.cases import Case, Heads, Step, make_tensors, tensor_bytes
from onestem_lab.attention.peers import PEERS, Call, Inputs, absent_peers
from onestem_lab.attention.rates import Rates, measure_rates
from onestem_lab.timing import cpu_ms

__all__ = ["bench_attention", "device_facts", "measure_step", "memory_bytes", "summary"]

CHECKED_ROWS = 16
OWN, UNSHARED = "onestem", "unshared"
# Maximum keys and values that a peer without pages may copy: bytes, and share of the memory.
MOST_COPIED, MOST_SHARE = 24 << 30, 0.25


def device_facts(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    packages = ("torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "vllm")
    found = {name: _version(name) for name in packages}
    found["onestem"] = onestem.__version__
    return {
        "device": gpu or _processor(),
        "threads": None if gpu else torch.get_num_threads(),
        "versions": {name: value for name, value in found.items() if value},
    }


def _processor() -> str:
    """The CPU's name as Linux has it, or else its architecture."""
    try:
        found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bench_attention(
    cases: dict[str, Case],
    heads: tuple[Heads, ...],
    device: torch.device,
    against: tuple[str, ...] = (),
    impl: str = "auto",
    progress: Callable[[dict[str, Any]], None] = lambda found: None,
    repeat: int = 7,
) -> dict[str, Any]:
    """The device, its rates, an entry for each of the `cases` with each of the `heads` (one dtype),
    and their `summary`. `progress` gets the result so far after each entry.

    Times are milliseconds, medians of `repeat`: on a GPU inside a CUDA graph with the L2 cache
    flushed, on a CPU with cold and with warm caches. Rates are measured before and after all cases,
    and the better ones count. `matrix_share`, `memory_share`: times of the case's products and
    bytes at these rates, as shares of its time. `unshared`: the same kernel, which reads a shared
    run again for each sequence; `error` is the larger of both.
    """
    absent = absent_peers(against, device)
    present = tuple(name for name in against if name not in absent)
    resolve(impl, device)
    steps = {}
    for free in heads:
        for name, case in cases.items():
            step, own = case.step(free)
            _check_memory(name, step, own, device)
            steps[name, own.label] = step, own  # a case with heads of its own appears once
    dtype = heads[0].dtype
    before = measure_rates(device, dtype)
    entries: list[dict[str, Any]] = []

    def found(rates: Rates) -> dict[str, Any]:
        return {
            **device_facts(device),
            "matrix_flops_per_s": rates.flops,
            "bytes_per_s": rates.bytes,
            "cases": [{**entry, **_floors(entry, rates)} for entry in entries],
            "summary": summary(entries),
        }

    for (name, label), (step, own) in steps.items():
        entry: dict[str, Any] = {"case": name, "heads": label}
        entry |= measure_step(step, own, device, present, impl, repeat)
        entry["refused"] = {**absent, **entry["refused"]}
        entries.append(entry)
        progress(found(before))
    return found(before.better(measure_rates(device, dtype)))


def summary(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of the heads, against the fastest other and against `unshared`: the number of cases,
    the geometric mean of the speedups, the least speedup and its case."""
    found = []
    for label in dict.fromkeys(entry["heads"] for entry in entries):
        for over, key in (("the fastest other", "speedup"), (UNSHARED, "over_unshared")):
            there = [entry for entry in entries if entry["heads"] == label and key in entry]
            if not there:
                continue
            worst = min(there, key=lambda entry: float(entry[key]))
            mean = math.fsum(math.log(entry[key]) for entry in there) / len(there)
            found.append(
                {"heads": label, "over": over, "cases": len(there), "mean": math.exp(mean)}
                | {"least": worst[key], "least_in": worst["case"]}
            )
    return found


def _check_memory(name: str, step: Step, heads: Heads, device: torch.device) -> None:
    needed, there = tensor_bytes(step, heads), memory_bytes(device)
    if needed > there:
        raise ConfigError(
            f"case {name!r} takes {needed / 2**30:.0f} GiB of keys, values and queries, "
            f"{device.type} has {there / 2**30:.0f}: lower its tokens, rows or heads"
        )


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return ram_bytes()


def measure_step(
    step: Step,
    heads: Heads,
    device: torch.device,
    against: tuple[str, ...],
    impl: str,
    repeat: int,
    share: bool = True,
) -> dict[str, Any]:
    """An entry of `bench_attention` without shares and floors. Without `share` our own kernel reads
    shared runs again for each sequence, as `unshared` does."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # each case gets fresh memory
    q, k, v = make_tensors(step, heads, device)
    group = heads.num_q_heads // heads.num_kv_heads
    chosen = resolve(impl, device, heads=[(heads.head_dim, group)])
    own, unshared = (chosen.prepare(step.plan, share=each) for each in (share, False))
    # In the layout that an engine uses.
    head_major = chosen.head_major(heads.head_dim, heads.dtype)
    own_k, own_v = (laid_out(x, head_major=True) if head_major else x for x in (k, v))
    entry: dict[str, Any] = {"attention": chosen.name, **_work(step, heads)}
    rows = _some_rows(step)
    want = _attend_rows(step, rows, q, k, v, torch.float64)
    plain = _max_error(_attend_rows(step, rows, q, k, v, heads.dtype), want)
    others, refused = _peer_calls(Inputs(step, heads, q, k, v), against)
    calls = {
        OWN: Call(lambda: own.attend(q, own_k, own_v).out),
        UNSHARED: Call(lambda: unshared.attend(q, own_k, own_v).out),
        **others,
    }
    errors = {name: _max_error(call.rows(call.run())[rows], want) for name, call in calls.items()}
    error = max(errors.pop(OWN), errors.pop(UNSHARED))
    entry |= {"error": error, "plain_error": plain, "right": error <= 2 * plain}
    runs = {name: call.run for name, call in calls.items()}
    if device.type == "cuda":
        times, uncaptured = _graph_times(runs, repeat)
        entry |= _by_whom(times, "")
        refused |= uncaptured
    else:
        entry |= _by_whom(cpu_ms(runs, cold=True, repeat=repeat), "")
        entry |= _by_whom(cpu_ms(runs, cold=False, repeat=repeat), "warm_")
    entry |= _speedups(entry)
    entry |= {"refused": refused, "errors_of_others": errors}
    return entry


def _work(step: Step, heads: Heads) -> dict[str, float]:
    """The case's FLOPs and bytes; also of parts that several rows share or that a row alone has."""
    return {
        "flops": step.flops(heads),
        "bytes": step.bytes(heads),
        "shared_flops": step.shared_flops(heads),
        "own_bytes": step.own_bytes(heads),
    }


def _floors(entry: dict[str, Any], rates: Rates) -> dict[str, float]:
    """Times of that work at the measured rates; shared parts also at 60% of the matrix rate, parts
    that a row alone has at 85% of memory's."""
    flop_floor, byte_floor = 1e3 * entry["flops"] / rates.flops, 1e3 * entry["bytes"] / rates.bytes
    return {
        "flop_floor_ms": flop_floor,
        "byte_floor_ms": byte_floor,
        "shared_at_60_ms": 1e3 * entry["shared_flops"] / (0.6 * rates.flops),
        "own_at_85_ms": 1e3 * entry["own_bytes"] / (0.85 * rates.bytes),
        "matrix_share": flop_floor / entry["ms"],
        "memory_share": byte_floor / entry["ms"],
    }


def _graph_times(
    calls: dict[str, Callable[[], Any]], repeat: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of each call, and the reason for each peer's that fails in a graph."""
    times, refused = {}, {}
    for name, call in calls.items():
        try:
            times[name] = graph_ms(call, repeat=repeat)
        except RuntimeError as error:
            if name in (OWN, UNSHARED):
                raise
            refused[name] = first_line(error)[:200]
    return times, refused


def _by_whom(times: dict[str, float], prefix: str) -> dict[str, Any]:
    others = {name: ms for name, ms in times.items() if name not in (OWN, UNSHARED)}
    return {
        f"{prefix}ms": times[OWN],
        f"unshared_{prefix}ms": times[UNSHARED],
        f"others_{prefix}ms": others,
    }


def _speedups(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"over_unshared": entry["unshared_ms"] / entry["ms"]}
    others = entry["others_ms"]
    if others:
        fastest = min(others, key=others.__getitem__)
        found |= {"fastest_other": fastest, "speedup": others[fastest] / entry["ms"]}
    return found


def _peer_calls(inputs: Inputs, against: tuple[str, ...]) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls by `peer kernel`, and the reason for each peer or kernel that cannot do this step."""
    step, calls, refused = inputs.step, {}, {}
    copied = inputs.heads.token_bytes * sum(map(len, step.seen_slots()))
    most = min(MOST_COPIED, MOST_SHARE * memory_bytes(inputs.q.device))
    for peer in against:
        if PEERS[peer].copies and copied > most:
            refused[peer] = f"each sequence's own copy would take {copied / 2**30:.0f} GiB"
            continue
        for kernel, make in PEERS[peer].kernels(step).items():
            name = f"{peer} {kernel}".strip()
            try:
                call = make(inputs)
                call.run()
                calls[name] = call
            except Exception as error:  # any fault of a peer is reported
                refused[name] = first_line(error)[:200]
    return calls, refused


# ------------------------------------------------------------------------------------------ error


def _some_rows(step: Step) -> list[int]:
    """Rows that are checked: the first, the last, and some between."""
    last = step.plan.num_rows - 1
    between = np.random.default_rng(0).integers(0, last + 1, CHECKED_ROWS - 2)
    return sorted({0, last, *between.tolist()})


def _attend_rows(
    step: Step, rows: list[int], q: Tensor, k_pages: Tensor, v_pages: Tensor, dtype: torch.dtype
) -> Tensor:
    """Attention of some rows, each operation in `dtype`: `[len(rows), num_q_heads, head_dim]`."""
    group = q.shape[1] // k_pages.shape[2]
    out = []
    for row in rows:
        slots = torch.from_numpy(visible(step.plan, row)[0]).to(q.device)
        k, v = (
            read_kv(pages, slots).to(dtype).transpose(0, 1) for pages in (k_pages, v_pages)
        )  # [num_kv_heads, keys, head_dim]
        query = q[row].to(dtype).view(k.shape[0], group, -1)
        score = (query @ k.transpose(1, 2)) * q.shape[2] ** -0.5
        out.append((torch.softmax(score, -1) @ v).reshape(q.shape[1:]))
    return torch.stack(out)


def _max_error(got: Tensor, want: Tensor) -> float:
    """Largest difference from `want` (float64); infinite if there is a NaN."""
    difference = (got.double() - want).abs().max()
    return float("inf") if bool(difference.isnan()) else float(difference)
