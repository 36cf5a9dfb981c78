"""How long an attention step takes for each split of the programs into those that multiply and
those that read, on a Hopper GPU: what the constants of the cost model are fitted to.

    python -m onestem_lab.attention_splits --out lab/results/attention-splits.json

Steps are decodes of 256 sequences behind one prefix, and cases of `onestem bench attention`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from onestem.cost.timing import graph_ms
from onestem.ops.triton import TritonAttention, load_config
from onestem.ops.work import CostModel, cuts, make_work
from onestem_lab.attention.cases import CASES, Heads, Step, decode_step, make_tensors
from onestem_lab.attention.measure import device_facts
from onestem_lab.results import RESULTS, write

PREFIXES = (1024, 2048, 4096, 8192, 16384)
OWN = (120, 134, 148)
NAMED = (
    "1x32 2048/128", "1x256 2048/256", "1x256 16384/256", "1x1024 8192/128",
    "8/1 heads 1x512 8192/128", "1x8x32 2048+512/128", "mixed",
)  # fmt: skip
AROUND = 3  # splits tried on each side of the one that the model chooses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "attention-splits.json")
    options = parser.parse_args()
    device = torch.device("cuda")
    result = {
        "command": "python -m onestem_lab.attention_splits",
        **device_facts(device),
        "programs": torch.cuda.get_device_properties(device).multi_processor_count,
        "microseconds_by_multiplying_programs": {
            name: measure(name, step, heads, device) for name, step, heads in steps()
        },
    }
    write(options.out, result)


def steps() -> Iterator[tuple[str, Step, Heads]]:
    for prefix in PREFIXES:
        for own in OWN:
            step = decode_step((1, 256), (prefix, own))
            yield f"256 behind {prefix}/{own}", step, Heads()
    for name in NAMED:
        yield name, *CASES[name].step(Heads())


def measure(name: str, step: Step, heads: Heads, device: torch.device) -> dict[int, float]:
    """Microseconds by how many programs multiply."""
    chosen, programs = chosen_split(step, heads, device)
    tensors = make_tensors(step, heads, device)
    found = {}
    for turn in range(-AROUND, AROUND + 1):
        multiply = chosen + turn * heads.num_kv_heads
        if not heads.num_kv_heads <= multiply <= programs - heads.num_kv_heads // 2:
            continue
        with forced(multiply, programs - multiply):
            attend = TritonAttention().prepare(step.plan).attend
            found[multiply] = 1e3 * graph_ms(partial(attend, *tensors), repeat=5)
    times = ", ".join(f"{multiply}: {us:.1f}" for multiply, us in found.items())
    print(f"{name}: {chosen} of {programs} multiply; {times} us", flush=True)
    return found


def chosen_split(step: Step, heads: Heads, device: torch.device) -> tuple[int, int]:
    """How many programs multiply by the cost model, and how many there are."""
    group = heads.num_q_heads // heads.num_kv_heads
    name = torch.cuda.get_device_name(device)
    config, _ = load_config(name, heads.dtype, heads.head_dim, group, True)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    cost = config.cost(programs)
    with always_multiplying():
        work = make_work(step.plan, cost, num_kv_heads=heads.num_kv_heads, group=group)
    return work.split[0], programs


@contextmanager
def forced(multiply: int, read: int) -> Iterator[None]:
    """Whatever the cost model says, so many programs multiply and read."""
    with mock.patch.object(cuts, "_split", return_value=(multiply, read)), always_multiplying():
        yield


def always_multiplying() -> AbstractContextManager[object]:
    """Lists whose items all read are not made."""
    return mock.patch.object(CostModel, "reading", lambda cost: cost)


if __name__ == "__main__":
    main()
