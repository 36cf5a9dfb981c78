"""Checks both readers against the reference and times what the host does with a plan.

TRITON_INTERPRET=1 python benchmarks/contract_spike/run.py    any machine: checks, host times
python benchmarks/contract_spike/run.py --device cuda         a GPU: checks under one graph, times

Prints a table; --out FILE writes JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import plans as plan_cases  # noqa: E402
from items import Cost, Items, make_items  # noqa: E402
from plans import Case  # noqa: E402

from onestem.ops import AttentionPlan, State, resolve, windowed  # noqa: E402


def fill_pages(plan: AttentionPlan, pages: list[torch.Tensor], seed: int) -> None:
    """Random values in the slots that the plan's runs own, NaN in all others."""
    device = pages[0].device
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.from_numpy(plan_cases.make_tensors_slots(plan)).to(device)
    for page in pages:
        page.fill_(float("nan"))
        flat = page.view(-1, *page.shape[2:])
        for part in slots.split(65536):
            shape = (len(part), *flat.shape[1:])
            flat[part] = torch.randn(shape, generator=generator, device=device).to(page.dtype)


def error(got: State, want: State) -> tuple[float, float]:
    """Largest errors of out (relative to the largest |out|) and of lse; NaN and wrong -inf: inf."""
    blind = want.lse == -math.inf
    if (
        got.out.isnan().any()
        or got.lse.isnan().any()
        or not torch.equal(got.lse == -math.inf, blind)
    ):
        return math.inf, math.inf
    if blind.any() and float(got.out[blind].abs().max()) != 0:
        return math.inf, math.inf
    if bool(blind.all()):
        return 0.0, 0.0
    out = (got.out.double() - want.out.double()).abs().max() / want.out.abs().max()
    return float(out), float((got.lse.double() - want.lse.double())[~blind].abs().max())


def median_ms(call: Callable[[], object], repeat: int = 100) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[len(times) // 5 :])


# ------------------------------------------------------------ C++


def compile_cpp() -> ctypes.CDLL:
    path = Path(tempfile.mkdtemp()) / "cpp_reader.so"
    source = str(HERE / "cpp_reader.cpp")
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", str(path), source], check=True)
    return ctypes.CDLL(str(path))


def cpp_attend(
    library: ctypes.CDLL, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> State:
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
    fields = [
        np.ascontiguousarray(a)
        for a in (plan.run_pages, plan.run_page_start, plan.run_offset, plan.spans)
    ]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in fields]
    n = [
        ctypes.c_int64(x)
        for x in (
            plan.page_size,
            plan.num_spans,
            plan.num_rows,
            k.shape[2],
            q.shape[1] // k.shape[2],
            q.shape[2],
        )
    ]
    tensors = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, lse)]
    library.plan_attend(
        n[0],
        *pointers,
        n[1],
        n[2],
        *tensors[:3],
        *n[3:],
        ctypes.c_float(q.shape[2] ** -0.5),
        *tensors[3:],
    )
    return State(out, lse)


def cpp_items(
    library: ctypes.CDLL, plan: AttentionPlan, cost: Cost, room: list[np.ndarray]
) -> Items:
    """`items.make_items`, natively. room: int32, for items, walk, rows, dest and merges."""

    class Out(ctypes.Structure):
        _fields_ = [(name, ctypes.c_void_p) for name in ("items", "walk", "rows", "dest", "merges")]

    counts = (ctypes.c_int64 * 4)()
    numbers = (
        plan.num_spans,
        plan.num_rows,
        plan.num_runs,
        cost.merge_tokens,
        cost.block_rows,
        cost.items,
        cost.min_tokens,
    )
    failed = library.plan_items(
        ctypes.c_void_p(plan.spans.ctypes.data),
        *map(ctypes.c_int64, numbers),
        Out(*(part.ctypes.data for part in room)),
        ctypes.c_int64(len(room[0])),
        counts,
    )
    assert not failed, "no room for the items"
    items, walk, parts, merges = counts
    return Items(
        room[0][:items], room[1][:walk], room[2][:parts], room[3][:parts], room[4][:merges]
    )


def items_room(count: int) -> list[np.ndarray]:
    return [
        np.empty(shape, np.int32) for shape in ((count, 4), (count, 8), count, count, (count, 4))
    ]


def same_items(a: Items, b: Items) -> bool:
    """Equal up to the order of items."""

    def listed(items: Items) -> list:
        return sorted(
            (items.rows[r : r + n].tolist(), items.walk[w : w + m].tolist())
            for r, n, w, m in items.items.tolist()
        )

    return listed(a) == listed(b) and np.array_equal(a.merges, b.merges)


# ------------------------------------------------------------ checks on the host


def check_small(num_seqs: int, seed: int) -> list[dict]:
    """Both readers, float32, against the float64 reference on every shape of plan."""
    from triton_reader import TritonReader

    rng, library, rows = np.random.default_rng(seed), compile_cpp(), []
    shapes = [(2, 4, 64), (1, 3, 80), (2, 1, 32), (1, 8, 64)]
    many, alone = (
        Cost(block_rows=4, items=10**9, min_tokens=40, merge_tokens=0),
        Cost(block_rows=5, merge_tokens=10**6),
    )
    costs = [None, many, alone]
    for number, case in enumerate(plan_cases.all_small(rng, num_seqs)):
        plan = case.plan
        plan.check()
        kv_heads, group, head_dim = shapes[number % len(shapes)]
        pages = [torch.empty(case.num_pages, plan.page_size, kv_heads, head_dim) for _ in range(2)]
        fill_pages(plan, pages, seed + number)
        q = torch.randn(plan.num_rows, kv_heads * group, head_dim)
        want = resolve("reference").prepare(plan).attend(q, *pages)
        cpp = error(cpp_attend(library, plan, q, *pages), want)
        cost = costs[number % len(costs)] or Cost()
        assert same_items(
            cpp_items(library, plan, cost, items_room(1 << 16)), make_items(plan, cost)
        ), case.name
        reader = TritonReader(
            plan.num_rows + 5,
            kv_heads,
            group,
            head_dim,
            plan.page_size,
            torch.float32,
            torch.device("cpu"),
            max_parts=8 * plan.num_rows + 64,
            cost=costs[number % len(costs)],
        )
        triton = error(reader.attend(q, *pages, plan), want)
        if case.unwindowed is not None:  # the window as a field of the plan gives the same
            masked = error(reader.attend(q, *pages, case.unwindowed, case.window), want)
            triton = (max(triton[0], masked[0]), max(triton[1], masked[1]))
        row = {
            "case": case.name,
            "rows": plan.num_rows,
            "runs": plan.num_runs,
            "spans": plan.num_spans,
            "cpp": cpp,
            "triton": triton,
        }
        rows.append(row)
        print(
            f"  {case.name:42} rows {plan.num_rows:4} spans {plan.num_spans:4}"
            f"  C++ {cpp[0]:.1e} {cpp[1]:.1e}"
            f"  Triton {triton[0]:.1e} {triton[1]:.1e}",
            flush=True,
        )
        assert max(*cpp, *triton) < 2e-5, case.name
    check_item_edit(num_seqs)
    return rows


# ------------------------------------------------------------ host times


def host_times(num_seqs: int) -> list[dict]:
    rng, rows = np.random.default_rng(1), []
    cost, buffer = Cost(items=260), np.zeros(1 << 19, np.int32)
    library, room = compile_cpp(), items_room(1 << 16)
    cases = [
        plan_cases.decode_tree(rng, num_seqs=num_seqs),
        plan_cases.decode_tree(rng, num_seqs=num_seqs, share=False),
        plan_cases.modules(rng, num_seqs=num_seqs, num_modules=12, prompt_rows=1),
        plan_cases.mixed_step(rng, num_groups=16, decodes=48, chunks=3, prefix=900),
    ]
    for case in cases:
        plan = case.plan
        items = make_items(plan, cost)
        words = items.pack(plan, buffer)
        pages = np.split(plan.run_pages, plan.run_page_start[1:])
        row = {
            "case": case.name,
            "rows": plan.num_rows,
            "runs": plan.num_runs,
            "spans": plan.num_spans,
            "plan_int32": plan.run_pages.size + 4 * plan.num_runs + plan.spans.size + plan.num_rows,
            "pages_int32": plan.run_pages.size,
            "items": len(items.items),
            "walk": len(items.walk),
            "parts": len(items.rows),
            "merges": len(items.merges),
            "packed_int32": words,
            "build_new_ms": median_ms(
                lambda plan=plan, pages=pages: plan_cases.rebuild(plan, pages)
            ),
            "check_ms": median_ms(plan.check),
            "make_items_ms": median_ms(lambda plan=plan: make_items(plan, cost)),
            "cpp_items_ms": median_ms(lambda plan=plan: cpp_items(library, plan, cost, room)),
            "pack_ms": median_ms(lambda plan=plan, items=items: items.pack(plan, buffer)),
        }
        if len(case.own_runs):
            row["edit_plan_ms"] = median_ms(lambda case=case: advance(case), 30)
            row["edit_items_ms"] = median_ms(item_editor(case, make_items(plan, cost)))
        narrow = plan_cases.windowed_fast(plan, 512)
        row["window_spans"] = narrow.num_spans
        moving = narrow.spans[narrow.spans[:, 4] == 1]
        row["window_spans_without_first_step"] = int(
            narrow.num_spans - len(moving) + moving[:, 1].sum()
        )
        row["windowed_ms"] = median_ms(lambda plan=plan: windowed(plan, 512), 5)
        row["windowed_fast_ms"] = median_ms(lambda plan=plan: plan_cases.windowed_fast(plan, 512))
        row["window_tokens_read"], row["window_tokens_union"] = window_reads(plan, narrow, 512)
        rows.append(row)
    for key in rows[0]:
        print(f"  {key:32}" + "".join(f"{_short(row.get(key)):>28}" for row in rows), flush=True)
    return rows


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)[:27]


def advance(case: Case) -> None:
    """One decode step in place: own runs and their spans one token longer, rows one position on.

    (The page that a run enters now and then stands in the slack behind its list already.)
    """
    plan = case.plan
    plan.run_len[case.own_runs] += 1
    plan.spans[case.own_spans, 5] += 1
    plan.row_position[: len(case.own_runs)] += 1
    crossed = np.flatnonzero(
        (plan.run_offset[case.own_runs] + plan.run_len[case.own_runs]) % plan.page_size == 1
    )
    runs = case.own_runs[crossed]
    at = (
        plan.run_page_start[runs]
        + (plan.run_offset[runs] + plan.run_len[runs] - 1) // plan.page_size
    )
    at = np.minimum(at, plan.run_pages.size - 1)
    plan.run_pages[at] = plan.run_pages[at]


def item_editor(case: Case, items: Items) -> Callable[[], None]:
    """Edits the work items in place instead of making them anew: own runs' last pieces grow."""
    walk = items.walk
    own = np.flatnonzero(np.isin(walk[:, 0], case.own_runs) & (walk[:, 6] == walk[:, 3]))

    def edit() -> None:
        walk[own, 3] += 1
        walk[own, 6] += 1

    return edit


def check_item_edit(num_seqs: int) -> None:
    """Edited items are the items of the edited plan (as long as none is cut anew)."""
    case = plan_cases.decode_tree(np.random.default_rng(2), num_seqs=num_seqs)
    cost = Cost(min_tokens=10**6)
    items = make_items(case.plan, cost)
    edit = item_editor(case, items)
    for _ in range(20):
        edit()
        advance(case)
    assert same_items(items, make_items(case.plan, cost))


def window_reads(plan: AttentionPlan, narrow: AttentionPlan, window: int) -> tuple[int, int]:
    """Tokens read under a window.

    First as `windowed` cuts the spans (those over the same tokens read once), then if a shared
    span stayed one and were read once over the union of its rows' windows.
    """
    keys = np.unique(narrow.spans[:, [2, 3, 5, 4, 6]], axis=0)
    cut = int((keys[:, 2] - keys[:, 1]).sum())
    spans = plan.spans.astype(np.int64)
    low = np.minimum.reduceat(plan.row_position, _bounds(spans))[::2] if len(spans) else np.zeros(0)
    first = np.maximum(spans[:, 3], low - window + 1 - plan.run_position[spans[:, 2]])
    whole = np.unique(
        np.stack([spans[:, 2], first, spans[:, 5] + (spans[:, 1] - 1) * spans[:, 6]], 1), axis=0
    )
    return cut, int(np.maximum(whole[:, 2] - whole[:, 1], 0).sum())


def _bounds(spans: np.ndarray) -> np.ndarray:
    """Pairs (row, row + rows) for reduceat; the last row's end is folded back."""
    pairs = np.stack([spans[:, 0], spans[:, 0] + spans[:, 1]], 1).reshape(-1)
    return np.minimum(pairs, pairs.max() - 1)


# ------------------------------------------------------------ GPU


def on_gpu(num_seqs: int, small: bool = False) -> dict:
    """One CUDA graph, captured with an empty plan, replayed with others, each of them checked."""
    from triton_reader import TritonReader

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    kv_heads, group, head_dim, page_size = (8, 4, 128, 16) if not small else (2, 4, 32, 16)
    dtype = torch.bfloat16 if cuda else torch.float32
    rng = np.random.default_rng(3)
    max_rows = num_seqs + (400 if small else 200)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 4
    programs = 4 * multiprocessors
    reader = TritonReader(
        max_rows,
        kv_heads,
        group,
        head_dim,
        page_size,
        dtype,
        device,
        max_parts=8 * max_rows,
        programs=programs,
        block_n=64,
        cost=Cost(block_rows=64 // group, items=4 * programs // kv_heads + 1),
    )

    def pad(n: int) -> int:
        return max_rows - n

    n = num_seqs
    make = plan_cases
    scale = 1 if not small else 12
    tree = {
        "tokens": (1024 // scale, 512 // scale, 128 // scale),
        "own": (100 // scale, 300 // scale),
    }
    mix = make.mixed_step(
        rng, num_groups=8, decodes=n // 16, chunks=1, chunk_rows=60, prefix=600 // scale
    )
    cases = [
        make.decode_tree(rng, num_seqs=n, pad_rows=pad(n), **tree),
        make.decode_tree(
            rng,
            num_seqs=n - n * 127 // 1000,
            fan=(3, 4, 9),
            own=(1, 400 // scale),
            tokens=(700 // scale, 333 // scale, 45 // scale),
            pad_rows=pad(n - n * 127 // 1000),
        ),
        make.decode_tree(
            rng,
            num_seqs=n // 10,
            fan=(1,),
            tokens=(16000 // scale,),
            own=(1, 50),
            pad_rows=pad(n // 10),
        ),
        make.modules(rng, num_seqs=n // 2, num_modules=12, prompt_rows=1, pad_rows=pad(n // 2)),
        make.modules(rng, num_seqs=n // 4, num_modules=30, pad_rows=0),
        make.mixed_step(
            np.random.default_rng(5),
            num_groups=8,
            decodes=n // 16,
            chunks=1,
            chunk_rows=60,
            prefix=600 // scale,
        ),
    ]
    cases += [make.narrow(cases[0], 700 // scale), make.narrow(mix, 200 // scale)]
    pages = [
        torch.empty(
            max(c.num_pages for c in cases),
            page_size,
            kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
        )
        for _ in range(2)
    ]
    reader.launch(*pages)  # compiles; the control buffer says: no items
    replay, replay_merge = _capture(lambda: reader.launch(*pages)), _capture(reader.launch_merge)
    rows, unit = [], 2 * 2.0**-8 if cuda else 2e-5
    shared, alone = reader.cost, replace(reader.cost, merge_tokens=10**9)
    for number, case in enumerate(cases):
        assert case.plan.num_rows <= max_rows, case.name
        for reader.cost in (shared, alone) if number in (0, 3) else (shared,):
            rows.append(_one_case(reader, case, pages, replay, number, unit, cuda))
            rows[-1]["each_row_alone"] = reader.cost is alone
            rows[-1]["merge_ms"] = _replay_ms(replay_merge) if cuda else None
        if case.unwindowed is not None:
            masked = replace(case, plan=case.unwindowed, name=f"{case.name} as a field of the plan")
            rows.append(
                _one_case(reader, masked, pages, replay, number, unit, cuda, want=case.plan)
            )
    for _ in range(20):
        advance(cases[0])
    later = replace(cases[0], name=f"{cases[0].name}, 20 steps on, edited in place")
    rows.append(_one_case(reader, later, pages, replay, 0, unit, cuda))
    info = {
        "gpu": torch.cuda.get_device_name(0) if cuda else "interpreter",
        "programs": programs,
        "num_kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "page_size": page_size,
        "dtype": str(dtype),
    }
    if cuda:
        info["copy_gb_s"] = _copy_rate(device)
    return {"setting": info, "cases": rows}


def _capture(launch: Callable[[], None]) -> Callable[[], None]:
    """The launch as a CUDA graph's replay (as it is where there is no GPU)."""
    if not torch.cuda.is_available():
        return launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def _one_case(
    reader, case, pages, replay, number, unit, cuda, want: AttentionPlan | None = None
) -> dict:
    plan = case.plan
    fill_pages(plan, pages, number)
    for tensor in (reader.q, reader.out, reader.lse, reader.part_out, reader.part_lse):
        tensor.fill_(float("nan"))
    n = plan.num_rows
    reader.q[:n] = torch.randn(reader.q[:n].shape, device=reader.q.device).to(reader.q.dtype)
    items, words = reader.prepare(plan, case.window if want else 0)
    reader.upload(words)
    replay()
    if cuda:
        torch.cuda.synchronize()
    got = State(reader.out[:n].clone(), reader.lse[:n].clone())
    start = time.perf_counter()
    state = resolve("reference").prepare(want or plan).attend(reader.q[:n], *pages)
    bad = error(got, state)
    reference_s = time.perf_counter() - start
    spans = plan.spans.astype(np.int64)
    length = spans[:, 5] + (spans[:, 1] - 1) * spans[:, 6] - spans[:, 3]
    token_bytes = 2 * pages[0].shape[2] * pages[0].shape[3] * pages[0].element_size()
    row = {
        "case": case.name,
        "rows": int((state.lse[:, 0] > -math.inf).sum()),
        "runs": plan.num_runs,
        "spans": plan.num_spans,
        "items": len(items.items),
        "parts": len(items.rows),
        "words": words,
        "error_out": bad[0],
        "error_lse": bad[1],
        "span_tokens": int(length.sum()),
        "span_mb": float(length.sum()) * token_bytes / 1e6,
        "reference_s": reference_s,
        "prepare_ms": median_ms(lambda: reader.prepare(plan, case.window if want else 0), 20),
    }
    if cuda:
        row["replay_ms"] = _replay_ms(replay)
        row["upload_ms"] = _replay_ms(lambda: reader.upload(words))
        row["span_gb_s"] = row["span_mb"] / row["replay_ms"]
    row["ok"] = bad[0] <= unit and bad[1] <= max(unit, 2e-5)
    print("  " + json.dumps(row), flush=True)
    return row


def _replay_ms(call: Callable[[], object], repeat: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _copy_rate(device: torch.device) -> float:
    a = torch.randn(1 << 28, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / 1e6 / _replay_ms(lambda: b.copy_(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-seqs", type=int, default=1000)
    parser.add_argument(
        "--check-seqs", type=int, default=60, help="sequences of the checks in the interpreter"
    )
    parser.add_argument(
        "--graph-path", action="store_true", help="the GPU's cases, small, in the interpreter"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.command = [word for word in sys.argv[1:] if word not in ("--out", str(options.out))]
    import triton

    result = {
        "command": " ".join(["python benchmarks/contract_spike/run.py", *options.command]),
        "interpreter": bool(os.environ.get("TRITON_INTERPRET")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": np.__version__,
        },
        "machine": {"cpu": _cpu_name(), "cpus": os.cpu_count()},
    }
    if options.device == "cuda":
        print("GPU, one CUDA graph for all plans")
        result["gpu"] = on_gpu(options.num_seqs)
        _save(result, options.out)
    elif options.graph_path:
        result["gpu"] = on_gpu(options.check_seqs, small=True)
    else:
        print("Readers against the reference (largest errors of out and lse)")
        result["checks"] = check_small(options.check_seqs, 11)
    print(f"Host, {options.num_seqs} sequences")
    result["host"] = host_times(options.num_seqs)
    _save(result, options.out)
    wrong = [row["case"] for row in result.get("gpu", {}).get("cases", []) if not row["ok"]]
    if wrong:
        sys.exit(f"wrong: {wrong}")


def _save(result: dict, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
