"""When the programs of one attention launch begin and end, on a Hopper GPU.

    python -m benchmarks.attention_timeline ["CASE;CASE"]

Runs copies of the kernels into which time stamps were put, over the cases of `onestem bench
attention`; prints percentiles in microseconds from the start of the first program.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from onestem.ops.bench.cases import CASES, Heads, make_tensors
from onestem.ops.bench.timing import graph_ms
from onestem.ops.triton import Workspace, hopper, kernels
from onestem.ops.triton.launch import MERGING

# Words per program: start, -, first scores of both halves, end of both halves.
HOPPER = (
    ("import gdc_launch_dependents", "import gdc_launch_dependents, globaltimer"),
    (
        "    gdc_launch_dependents()\n",
        "    gdc_launch_dependents()\n    gl.store(slopes + gl.program_id(0) * 8, globaltimer())\n",
    ),
    (
        "                first_weight, running_max",
        "                if count == 0:\n                    "
        "gl.store(slopes + gl.program_id(0) * 8 + 2 + PART, globaltimer())\n"
        "                first_weight, running_max",
    ),
    (
        "        next_start, next_rows = later_start, later_rows\n",
        "        next_start, next_rows = later_start, later_rows\n"
        "    gl.store(slopes + gl.program_id(0) * 8 + 4 + PART, globaltimer())\n",
    ),
)
MERGE = (
    ("import gdc_launch_dependents", "import globaltimer, gdc_launch_dependents"),
    ("    part_lse,\n    NUM_HEADS", "    part_lse,\n    stamps,\n    NUM_HEADS"),
    (
        "    if tl.program_id(0) == 0:\n",
        "    tl.store(stamps + tl.program_id(0), globaltimer())\n    if tl.program_id(0) == 0:\n",
    ),
)


def main() -> None:
    named = sys.argv[1].split(";") if len(sys.argv) > 1 else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        copies = [
            stamped(module, changes, Path(folder))
            for module, changes in ((hopper, HOPPER), (kernels, MERGE))
        ]
        for name in named:
            show(name, *copies)


def stamped(module: ModuleType, changes: tuple[tuple[str, str], ...], folder: Path) -> ModuleType:
    """A copy of a module with stamps in it."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"stamped_{module.__name__.split('.')[-1]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = copy
    spec.loader.exec_module(copy)
    return copy


def show(name: str, attend: ModuleType, merge: ModuleType) -> None:
    step, heads = CASES[name].step(Heads())
    device = torch.device("cuda")
    q, k, v = make_tensors(step, heads, device)
    space = Workspace(
        max_rows=len(q), num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim, page_size=heads.page_size, dtype=heads.dtype, device=device,
        max_words=1 << 20, max_states=8192,
    )  # fmt: skip
    work = space.write(step.plan)
    space.upload()
    programs = space.kernels.num_sms
    stamps = torch.zeros(programs, 8, dtype=torch.int64, device=device)
    ends = torch.zeros(MERGING * programs, dtype=torch.int64, device=device)
    out = torch.empty_like(q)
    ms = graph_ms(lambda: launch(space, attend, merge, (q, k, v, out), stamps, ends), repeat=3)
    times, merged = stamps.cpu().numpy(), ends.cpu().numpy()
    begin, multiply = times[:, 0].min(), work.split[0]
    parts = {
        "first scores": times[:, 2:4],
        "multiplying ends": times[:multiply, 4:6],
        "reading ends": times[multiply:, 4:6],
        "merged": merged,
    }
    print(f"{name}: {ms:.4f} ms, {work.split[0]} programs multiply, {work.split[1]} read")
    for part, values in parts.items():
        print(f"  {part:17}", percentiles(values[values > 0] - begin), flush=True)


def percentiles(nanoseconds: np.ndarray) -> str:
    if len(nanoseconds) == 0:
        return "-"
    return " ".join(f"{ns / 1e3:6.1f}" for ns in np.percentile(nanoseconds, [0, 10, 50, 90, 100]))


def launch(
    space: Workspace,
    attend: ModuleType,
    merge: ModuleType,
    tensors: tuple[torch.Tensor, ...],
    stamps: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """What `Kernels.launch` does, with the stamped copies."""
    q, k, v, out = tensors
    shape, config, states = space.kernels, space.kernels.config, space.states
    assert states is not None
    assert config.hopper_registers is not None
    block_n = config.tiles[-1].block_n
    box = hopper.box_tokens(space.page_size, block_n)
    common: dict[str, Any] = {"HEAD_DIM": space.head_dim}
    attend.attend_hopper[(shape.num_sms,)](
        space.control, q, *hopper.descriptors(k, v, box), out, space.lse, states.out, states.lse,
        stamps, space.head_dim**-0.5, 0.0, NUM_KV_HEADS=space.num_kv_heads, GROUP=shape.group,
        PAGE_SIZE=space.page_size, BLOCK_N=block_n, STAGES=config.stages[-1], BOX=box,
        WINDOWED=False, ALIBI=False, SOFTCAP=False, REGISTERS=config.hopper_registers[0],
        COPY_REGISTERS=config.hopper_registers[1], **common, num_warps=4,
    )  # fmt: skip
    merge.merge_kernel[(len(ends),)](
        space.control, out, space.lse, states.out, states.lse, ends, NUM_HEADS=space.num_q_heads,
        BLOCK_D=space.head_dim, UNROLL=8, DEPENDENT=True, **common, num_warps=1, launch_pdl=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
