"""Collectives through memory that all ranks write to. Ranks are processes here, which share it."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import triton.language as tl

from onestem.ops.triton import peers
from onestem.ops.triton.peers import PeerMemory
from tests.soak import one_in, soaked

SECONDS = 60
PROGRAMS = 8  # of a GPU's 128
# One program, several, more than there are at once, and one again.
SHAPES = [(1, 7), (3, 1500), (PROGRAMS + 1, 2048), (1, 1), (2, 2048), (0, 4)]
_context = multiprocessing.get_context("fork")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU for each rank")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    monkeypatch.setattr(peers, "_PROGRAMS", tl.constexpr(PROGRAMS))


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + shape[1])
    if dtype == torch.bfloat16:  # sums are exact: Triton's interpreter cuts where a GPU rounds
        return torch.randint(-40, 40, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def run(size: int, work) -> list:
    """What `work(rank, memory)` returns on each rank."""
    memory = [torch.zeros(PeerMemory.num_bytes(size), dtype=torch.uint8) for _ in range(size)]
    for one in memory:
        one.share_memory_()
    addresses = [one.data_ptr() for one in memory]
    ends = [_context.Pipe() for _ in range(size)]

    def process(rank: int) -> None:
        torch.set_num_threads(1)
        found = work(rank, PeerMemory(addresses, rank, torch.device("cpu"), memory))
        ends[rank][1].send([one.float().tolist() for one in found])

    processes = [_context.Process(target=process, args=(rank,)) for rank in range(size)]
    for one in processes:
        one.start()
    found = [end.recv() if end.poll(SECONDS) else None for end, _ in ends]
    for one in processes:
        one.kill()
        one.join()
    return found


@pytest.mark.parametrize(
    ("size", "dtype"), one_in(2, (2, 3), (torch.float32, torch.bfloat16)), ids=str
)
def test_sums_are_those_of_float32_in_the_ranks_order(size, dtype):
    def work(rank, memory):
        parts = [given(rank, shape, dtype) for shape in SHAPES]
        for part in parts:
            assert memory.takes(part)
            memory.sum(part)
        return parts

    found = run(size, work)
    for i, shape in enumerate(SHAPES):
        total = torch.zeros(shape)
        for rank in range(size):
            total += given(rank, shape, dtype).float()
        expected = total.to(dtype).float().tolist()
        assert [one[i] for one in found] == [expected] * size


def test_all_get_what_the_first_has_between_sums():
    ids = torch.tensor([5, 128_255, 2**40])

    def work(rank, memory):
        mine = ids.clone() if rank == 0 else torch.zeros_like(ids)
        total = torch.ones(2)
        memory.sum(total)
        memory.take_first(mine)
        memory.sum(total)
        return [mine, total]

    assert run(2, work) == [[ids.float().tolist(), [4.0, 4.0]]] * 2


@pytest.mark.parametrize("size", [soaked(2), 3])
def test_gathered_parts_stand_in_the_ranks_order(size, monkeypatch):
    """Also where they take several rounds."""
    shapes = [(3, 5), (PROGRAMS + 1, 2048), (1, 3), (PROGRAMS, 5120)]
    monkeypatch.setattr(peers, "_PARTS_BYTES", (size - 1) * PROGRAMS * 2048 * 4)

    def work(rank, memory):
        total = torch.ones(2)
        found = []
        for shape in shapes:
            found.append(memory.gather(given(rank, shape, torch.float32)))
            memory.sum(total)
        return [*found, total]

    found = run(size, work)
    for i, shape in enumerate(shapes):
        parts = [given(rank, shape, torch.float32) for rank in range(size)]
        assert [one[i] for one in found] == [torch.cat(parts, 1).tolist()] * size
    assert [one[-1] for one in found] == [[float(size ** len(shapes))] * 2] * size


def test_who_waits_for_a_rank_that_has_ended_is_freed():
    def work(rank, memory):
        total = torch.ones(2)
        if rank == 0:
            memory.stop()
            memory.sum(total)
            memory.sum(total)
        return [torch.zeros(1)]

    assert run(2, work) == [[[0.0]]] * 2


def test_large_sums_are_left_to_nccl():
    memory = PeerMemory([0, 0], 0, torch.device("cpu"), None)
    assert memory.takes(torch.empty(8 << 20, dtype=torch.bfloat16))
    assert not memory.takes(torch.empty((8 << 20) + 1, dtype=torch.bfloat16))
