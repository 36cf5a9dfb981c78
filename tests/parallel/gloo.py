"""Ranks that are processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from onestem.models.ranks import Ranks
from onestem.models.weights import load_decoder
from tests.models.dense import dense_attend

__all__ = ["Answer", "on_processes"]

SECONDS = 60

_context = multiprocessing.get_context("forkserver")


@dataclass
class Answer:
    """What a rank has found: logits, and collectives by dtype."""

    rank: int
    logits: Tensor
    sums: dict[torch.dtype, Tensor]
    gathered: dict[torch.dtype, Tensor]


def on_processes(size: int, path: Path, ids: list[int], folder: Path) -> list[Answer]:
    """A model's answer to `ids` on each of `size` processes, which write to `folder`."""
    processes = [
        _context.Process(target=_rank, args=(rank, size, path, ids, folder)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"answer-{rank}", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, path: Path, ids: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size, dist.group.WORLD)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu", ranks=ranks)
    token_ids, positions = torch.tensor(ids), torch.arange(len(ids))
    hidden = decoder.forward(token_ids, positions, dense_attend(decoder.part, positions))
    sums, gathered = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sums[dtype] = ranks.sum(torch.full((3, 5), rank + 1.0, dtype=dtype))
        gathered[dtype] = ranks.gather(torch.full((3, 2), rank + 1.0, dtype=dtype))
    answer = Answer(rank, decoder.logits(hidden), sums, gathered)
    torch.save(answer, folder / f"answer-{rank}")
    dist.destroy_process_group()
