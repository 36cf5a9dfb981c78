"""When the programs of one attention launch begin and end, on a Hopper GPU.

    python -m onestem_lab.attention_timeline ["CASE;CASE"] [--heads 16/1]

Runs copies of the kernels into which time stamps were put, over the cases of `onestem bench
attention` or trees (`counts_lengths`, such as 256_64); prints percentiles in microseconds from the
start of the first program.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from onestem.cost.timing import graph_ms
from onestem.ops.triton import Kernels, States, Workspace, kernels, sm90
from onestem.ops.triton import launch as launching
from onestem.ops.triton.launch import MERGING
from onestem_lab.attention.cases import CASES, Heads, Step, decode_step, make_tensors, tree_levels
from onestem_lab.cli.attention import head_counts

WORDS = 16  # of a program
# The word of each stamp. Those of halves stand in two words, one for each warpgroup.
START, QUEUE, COPIED, WAITS, TILE, END = 0, 1, 2, 4, 6, 8
Change = tuple[str, str, int]  # text, what stands in its place, how often it is there


def _stamp(indent: int, word: int, half: str = "") -> str:
    at = f"slopes + gl.program_id(0) * {WORDS} + {word}{half}"
    return " " * indent + f"gl.store({at}, globaltimer())\n"


def _queries_there(indent: int) -> Change:
    """A stamp before the loop over items, after a barrier that stands at `indent`."""
    loop = "    while item"
    return "\n" + loop, "\n" + _stamp(indent, WAITS, HALF) + loop, 1


def _first_tile(indent: int, line: str, more: str = "") -> Change:
    """A stamp before a line after the first tile; `more` goes after it."""
    before = " " * indent
    stamp = before + "if count == 0:\n" + _stamp(indent + 4, TILE, HALF)
    return before + line, stamp + more + before + line, 1


HALF = " + PART"
WALK = "from onestem.ops.triton.sm90.walk import ("
TIMER = (WALK, "from triton.language.extra.cuda import globaltimer\n" + WALK, 1)
HOPPER: dict[str, tuple[Change, ...]] = {
    "kernel.py": (
        ("import gdc_launch_dependents", "import gdc_launch_dependents, globaltimer", 1),
        (
            "    gdc_launch_dependents()\n",
            "    gdc_launch_dependents()\n" + _stamp(4, START),
            1,
        ),
        ("control, k_pages, boxes", "control, slopes, k_pages, boxes", 2),
        ("control, v_pages, boxes", "control, slopes, v_pages, boxes", 2),
    ),
    "copy.py": (
        TIMER,
        ("    control, pool, boxes", "    control, slopes, pool, boxes", 1),
        (
            "    wide = FORM.most > ROWS and columns < 0\n",
            "    wide = FORM.most > ROWS and columns < 0\n    if SIDE == 0 and PART == 0:\n"
            + _stamp(8, QUEUE),
            1,
        ),
        ("    stage, phase = 0, 1\n", "    stage, phase = 0, 1\n    copied = 0\n", 1),
        (
            "                stage, phase = next_stage",
            "                if SIDE == 0 and PART == 0:\n"
            "                    if copied == 0:\n"
            + _stamp(24, COPIED)
            + "                    copied += 1\n"
            "                stage, phase = next_stage",
            1,
        ),
    ),
    "rows.py": (
        TIMER,
        _queries_there(8),
        _first_tile(24, "first_weight, running_max"),
        # ... of items whose first tile is like all others, after it was counted
        (
            ")  # fmt: skip\n                for i in range(gl.maximum",
            ")  # fmt: skip\n"
            + " " * 20
            + "if count == 1:\n"
            + _stamp(24, TILE, HALF)
            + "                for i in range(gl.maximum",
            1,
        ),
        # ... of items that do not work ahead, after the tile was counted
        (
            " " * 20 + ")  # fmt: skip\n            entry = next_entry\n",
            " " * 20
            + ")  # fmt: skip\n"
            + " " * 20
            + "if count == 1:\n"
            + _stamp(24, TILE, HALF)
            + "            entry = next_entry\n",
            1,
        ),
        ("    return count\n", _stamp(4, END, HALF) + "    return count\n", 1),
    ),
    "columns.py": (
        TIMER,
        _queries_there(4),
        _first_tile(16, "stage, phase = next_stage", " " * 16 + "count += 1\n"),
        (
            "        this, following, later = following, later, last\n",
            "        this, following, later = following, later, last\n" + _stamp(4, END, HALF),
            1,
        ),
    ),
}
MERGE: tuple[Change, ...] = (
    ("import gdc_launch_dependents", "import globaltimer, gdc_launch_dependents", 1),
    ("    part_lse,\n    NUM_HEADS", "    part_lse,\n    stamps,\n    NUM_HEADS", 1),
    (
        "        row, first, parts = next_row, next_first, next_parts\n",
        "        row, first, parts = next_row, next_first, next_parts\n"
        "    tl.store(stamps + tl.program_id(0), globaltimer())\n",
        1,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="?", default=";".join(CASES))
    parser.add_argument("--heads", default="32/8", help="query/KV heads, separated by commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        copies = stamped(Path(folder))
        for num_q_heads, num_kv_heads in head_counts(options.heads):
            heads = replace(Heads(), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
            for name in options.cases.split(";"):
                show(name, *step_of(name, heads), *copies)


def step_of(name: str, heads: Heads) -> tuple[Step, Heads]:
    if name in CASES:
        return CASES[name].step(heads)
    return decode_step(*tree_levels(name), page_size=heads.page_size), heads


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


def changed(text: str, changes: tuple[Change, ...]) -> str:
    for old, new, count in changes:
        assert text.count(old) == count, old
        text = text.replace(old, new)
    return text


def show(name: str, step: Step, heads: Heads, attend: ModuleType, merge: ModuleType) -> None:
    device = torch.device("cuda")
    q, k, v = make_tensors(step, heads, device)
    made = Kernels.make(
        num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
        page_size=heads.page_size, dtype=heads.dtype, device=device, windowed=False,
    )  # fmt: skip
    states = States.empty(8192, heads.num_q_heads, heads.head_dim, device)
    space = Workspace(made, states, max_rows=len(q), max_words=1 << 20)
    work = space.write(step.plan)
    space.upload()
    programs = space.kernels.num_sms
    stamps = torch.zeros(programs, WORDS, dtype=torch.int64, device=device)
    ends = torch.zeros(MERGING * programs, dtype=torch.int64, device=device)
    out = torch.empty_like(q)
    ms = graph_ms(lambda: launch(space, attend, merge, (q, k, v, out), stamps, ends), repeat=3)
    times, merged = stamps.cpu().numpy(), ends.cpu().numpy()
    begin, (multiply, read) = times[:, START].min(), work.split
    parts = {
        "programs begin": times[:, START],
        "queue read": times[:, QUEUE],
        "first copy asked": times[:, COPIED],
        "queries there": times[:, WAITS : WAITS + 2],
        "first tile": times[:, TILE : TILE + 2],
        "multiplying ends": times[:multiply, END : END + 2],
        "reading ends": times[multiply:, END : END + 2],
        "merged": merged,
    }
    print(f"{heads.label} {name}: {ms:.4f} ms, {multiply} programs multiply, {read} read")
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
    """What `Kernels.launch` does, with the stamped copies. They have `stamps` in the place of the
    slopes, and `ends` as their last tensor."""
    q, k, v, out = tensors
    work, states = space.work, space.states
    assert work is not None
    attending = _Stamped(attend.attend_hopper, lambda args: (*args[:8], stamps, *args[9:]))
    merging = _Stamped(merge.merge_kernel, lambda args: (*args, ends))
    with (
        mock.patch.object(sm90, "attend_hopper", attending),
        mock.patch.object(launching, "merge_kernel", merging),
    ):
        space.kernels.launch(
            space.control, states, q, k, v, out, space.lse, num_merges=len(work.merges),
            wide=work.num_wide > 0,
        )  # fmt: skip


@dataclass(frozen=True)
class _Stamped:
    """Stands for a kernel: launches a stamped copy of it, whose arguments `changed` makes."""

    kernel: Any
    changed: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.kernel[grid](*self.changed(args), **options)

        return launch


if __name__ == "__main__":
    main()
