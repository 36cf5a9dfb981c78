"""A rank other than the first: executes rank 0's messages, and knows no requests.

`python -m onestem.parallel.follower FD RANK`: the socket to rank 0 is that file descriptor. When
rank 0 ends, in whatever way, this process ends too, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from onestem.cache.storage import DiskStore
from onestem.engine.step.launch import make_runner
from onestem.engine.step.runner import Runner
from onestem.errors import OnestemError, in_one_line
from onestem.models.decoder import Decoder
from onestem.models.ranks import Ranks
from onestem.models.weights import load_decoder
from onestem.ops import resolve
from onestem.parallel.group import join, meeting_place
from onestem.parallel.messages import CallMessage, Reader, StepMessage
from onestem.parallel.tiers import PartOfTiers

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Follower:
    """Executes rank 0's messages.

    Args:
        rank: which one this is, from 1 on.
        end: this process's end of the socket.
    """

    def __init__(self, rank: int, end: Connection) -> None:
        self.rank = rank
        self._socket = end
        self._reader = Reader(())
        self._ranks: Ranks
        self._device: torch.device
        self._decoder: Decoder
        self._runner: Runner
        self._tiers: PartOfTiers
        self._reporting = threading.Lock()

    def run(self) -> None:
        """Execute messages until the socket closes."""
        self._report("here", meeting_place() if self.rank == 1 else None)
        while True:
            message = self._reader.read(self._socket.recv_bytes())
            if isinstance(message, CallMessage):
                own = getattr(self, f"_{message.name}", None)
                method = own or getattr(self._runner, message.name)
                method(*message.arguments, **message.options)
            else:
                self._step(message)

    def _report(self, kind: str, value: object) -> None:
        with self._reporting:
            self._socket.send((kind, value))

    def _step(self, message: StepMessage) -> None:
        runner, ids = self._runner, None
        if message.num_device_ids:
            ids = torch.zeros(message.num_device_ids, dtype=torch.int64, device=self._device)
        logits = runner.run(message.inputs, runner.prepare(message.inputs, message.new_pages), ids)
        for blocks in (logits.samples, logits.scored):
            for _ in blocks:  # each rank has a part of every logit
                pass

    def _join(self, place: str, size: int, device: str, threads: int) -> None:
        """Meet the other ranks. `place`: rank 1's; `device`: rank 0's."""
        first = torch.device(device)
        self._device = first
        if first.type == "cuda":
            self._device = torch.device("cuda", (first.index or 0) + self.rank)
            torch.cuda.set_device(self._device)
        torch.set_num_threads(threads)
        self._ranks = join(place, self.rank, size, self._device)
        self._report("joined", None)

    def _load(self, path: str, options: dict[str, Any]) -> None:
        options = {**options, "device": self._device, "ranks": self._ranks}
        try:
            self._decoder = load_decoder(path, **options)
        except OnestemError as error:  # a caller's mistake, or of the files
            self._report("loaded", error)
            return
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None
        self._report("loaded", free)

    def _make_runner(self, impl: str, options: dict[str, Any]) -> None:
        self._runner = make_runner(self._decoder, resolve(impl, self._device), **options)
        self._reader = Reader(self._runner.windows)

    def _keep_kv(self, budget: int, files: tuple[Path, int, str] | None) -> None:
        """`budget`: bytes of host memory; `files`: what rank 0's `DiskStore` is made of."""
        disk = None if files is None else DiskStore(*files, self.rank, self._ranks.size)
        copies = self._runner.kv_copies(budget, disk)
        self._tiers = PartOfTiers(copies, disk, self._device, self._report)

    def _kv(self, *message: Any) -> None:
        self._tiers.do(*message)

    def _write_weights(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._ranks.take_first(tensor.view(-1).view(torch.uint8))
        self._runner.write_weights({name: tensor})


def _leave_with(descriptor: int, parent: int) -> None:
    """End this process when rank 0 is gone. A process that rank 0 has forked may hold the socket
    open, so the parent process is checked as well."""
    poll = select.poll()
    poll.register(descriptor, 0)  # reports only that the other end closes
    while not poll.poll(1000 * LOOK_SECONDS) and os.getppid() == parent:
        pass
    os._exit(0)


def follow(end: Connection, rank: int) -> None:
    """Run this rank until the socket closes; ends the process."""
    # Rank 0 says when to end, even if a signal goes to the whole group of processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leave = threading.Thread(
        target=_leave_with, args=(end.fileno(), os.getppid()), name="leave", daemon=True
    )
    leave.start()
    try:
        Follower(rank, end).run()
    except EOFError:
        pass
    except Exception as error:
        # Ends with rank 0, which first looks whether another rank has ended: then that is the cause
        log.debug("rank %d failed", rank, exc_info=error)
        with contextlib.suppress(OSError):
            end.send(("failed", in_one_line(error)))
    leave.join()


if __name__ == "__main__":
    follow(Connection(int(sys.argv[1])), int(sys.argv[2]))
