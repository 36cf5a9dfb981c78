"""When the programs of one attention launch begin and end, on a Hopper GPU.

    python -m benchmarks.attention_timeline ["CASE;CASE"]

Runs copies of the kernels into which time stamps were put, over the cases of `onestem bench
attention`; prints percentiles in microseconds from the start of the first program.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from onestem.ops.bench.cases import CASES, Heads, Step, make_tensors
from onestem.ops.bench.timing import graph_ms
from onestem.ops.triton import Workspace, kernels, sm90
from onestem.ops.triton.launch import MERGING

# Words per program: start, -, first tile of both halves, end of both halves.
HOPPER = {
    "kernel.py": (
        ("import gdc_launch_dependents", "import gdc_launch_dependents, globaltimer"),
        (
            "    gdc_launch_dependents()\n",
            "    gdc_launch_dependents()\n"
            "    gl.store(slopes + gl.program_id(0) * 8, globaltimer())\n",
        ),
    ),
    "rows.py": (
        ("\n\n__all__", "\nfrom triton.language.extra.cuda import globaltimer\n\n__all__"),
        (
            "                first_weight, running_max",
            "                if count == 0:\n                    "
            "gl.store(slopes + gl.program_id(0) * 8 + 2 + PART, globaltimer())\n"
            "                first_weight, running_max",
        ),
        (
            "    return count\n",
            "    gl.store(slopes + gl.program_id(0) * 8 + 4 + PART, globaltimer())\n"
            "    return count\n",
        ),
    ),
    "columns.py": (
        ("\n\n__all__", "\nfrom triton.language.extra.cuda import globaltimer\n\n__all__"),
        (
            "                stage, phase = next_stage",
            "                if count == 0:\n                    "
            "gl.store(slopes + gl.program_id(0) * 8 + 2 + PART, globaltimer())\n"
            "                count += 1\n                stage, phase = next_stage",
        ),
        (
            "        later_record = last_record\n",
            "        later_record = last_record\n"
            "    gl.store(slopes + gl.program_id(0) * 8 + 4 + PART, globaltimer())\n",
        ),
    ),
}
MERGE = (
    ("import gdc_launch_dependents", "import globaltimer, gdc_launch_dependents"),
    ("    part_lse,\n    NUM_HEADS", "    part_lse,\n    stamps,\n    NUM_HEADS"),
    (
        "        row, first, parts = next_row, next_first, next_parts\n",
        "        row, first, parts = next_row, next_first, next_parts\n"
        "    tl.store(stamps + tl.program_id(0), globaltimer())\n",
    ),
)


def main() -> None:
    named = sys.argv[1].split(";") if len(sys.argv) > 1 else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        copies = stamped(Path(folder))
        for name in named:
            show(name, *CASES[name].step(Heads()), *copies)


def stamped(folder: Path) -> tuple[ModuleType, ModuleType]:
    """Copies of the kernels for Hopper and of the module of the merge kernel with stamps in them;
    `folder` must be on the path of modules."""
    package = folder / "stamped_sm90"
    package.mkdir()
    for path in Path(sm90.__path__[0]).glob("*.py"):
        text = path.read_text().replace(sm90.__name__, package.name)
        (package / path.name).write_text(changed(text, HOPPER.get(path.name, ())))
    text = Path(str(kernels.__file__)).read_text()
    (folder / "stamped_kernels.py").write_text(changed(text, MERGE))
    return import_module(package.name), import_module("stamped_kernels")


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def show(name: str, step: Step, heads: Heads, attend: ModuleType, merge: ModuleType) -> None:
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
        "first tile": times[:, 2:4],
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
    box = sm90.box_tokens(space.page_size, block_n)
    common: dict[str, Any] = {"HEAD_DIM": space.head_dim}
    attend.attend_hopper[(shape.num_sms,)](
        space.control, q, *sm90.descriptors(k, v, box), out, space.lse, states.out, states.lse,
        stamps, space.head_dim**-0.5, 0.0, len(space.control), NUM_KV_HEADS=space.num_kv_heads,
        GROUP=shape.group, PAGE_SIZE=space.page_size, BLOCK_N=block_n, STAGES=config.stages[-1],
        BOX=box, COLUMNS=config.tiles[0].block_m if len(config.tiles) > 2 else 0,
        WINDOWED=False, ALIBI=False, SOFTCAP=False, REGISTERS=config.hopper_registers[0],
        COPY_REGISTERS=config.hopper_registers[1], **common, num_warps=4,
    )  # fmt: skip
    assert space.work is not None
    if len(space.work.merges) == 0:
        return
    merge.merge_kernel[(min(len(space.work.merges) * space.num_q_heads, len(ends)),)](
        space.control, out, space.lse, states.out, states.lse, ends, NUM_HEADS=space.num_q_heads,
        BLOCK_D=space.head_dim, UNROLL=8, DEPENDENT=True, **common, num_warps=1, launch_pdl=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
