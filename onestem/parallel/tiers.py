"""Keys and values of several ranks below KV memory: rank 0 decides, each rank keeps its part.

What rank 0 has in host memory has a number, by which each other rank has its own heads of the same
tokens. When rank 0 has dropped it, so do they with its next message. What rank 0 copies, reads and
writes, they do too: a piece that one of them cannot read is read by none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from onestem.cache.storage import DiskStore
from onestem.engine.tiers.copies import Copied, KvCopies, Part
from onestem.engine.tiers.stores import most_readers
from onestem.errors import RankError
from onestem.parallel.messages import call

if TYPE_CHECKING:
    from onestem.parallel.team import Team

log = logging.getLogger(__name__)

NO_TOKENS = torch.zeros(0, dtype=torch.int32)  # rank 0's file tells them


class TeamCopies:
    """Rank 0's copies, which all other ranks make too: a `KvCopies`.

    Args:
        own: of rank 0's pages.
        together: has other ranks execute a message while a block does the same here; in the thread
            that launches steps alone.

    Attributes:
        number_of: by a tensor's `id`.
        gone: numbers of tensors that are no more, which other ranks do not know yet.
    """

    def __init__(
        self,
        own: KvCopies,
        team: Team,
        together: Callable[[bytes], AbstractContextManager[None]],
    ) -> None:
        self.dtype, self.is_aside = own.dtype, own.is_aside
        self.width, self.state_width = own.width, own.state_width
        self._own = own
        self._team = team
        self._together = together
        self._numbers = count()
        self.number_of: dict[int, int] = {}
        self.gone: deque[int] = deque()

    def host_rows(self, num_tokens: int) -> Tensor:
        """See `KvCopies`; other ranks make theirs when they read."""
        return self._numbered(self._own.host_rows(num_tokens), next(self._numbers))

    def _numbered(self, rows: Tensor, number: int) -> Tensor:
        self.number_of[id(rows)] = number
        finalize(rows, _forget, self.number_of, self.gone, id(rows)).atexit = False
        return rows

    def _message(self, name: str, *arguments: Any) -> bytes:
        gone = list[int]()
        with suppress(IndexError):  # other threads take of it too
            while True:
                gone.append(self.gone.popleft())
        return call("kv", gone, name, *arguments)

    def out(self, parts: Sequence[np.ndarray]) -> tuple[list[Tensor], Callable[[], object]]:
        """See `KvCopies`."""
        numbers = [next(self._numbers) for _ in parts]
        with self._together(self._message("out", numbers, parts)):
            every, wait = self._own.out(parts)
            return list(map(self._numbered, every, numbers)), wait

    def into(self, parts: Sequence[Part]) -> Copied:
        """See `KvCopies`."""
        number = next(self._numbers)
        theirs = [(self.number_of[id(whole)], first, slots) for whole, first, slots in parts]
        with self._together(self._message("into", number, theirs)):
            return _OnAllRanks(self._own.into(parts), lambda: self._join(number))

    def _join(self, number: int) -> None:
        with self._together(self._message("join", number)):
            pass

    def ask(self, what: str, name: str, kv: Tensor) -> Callable[[], bool]:
        """Have other ranks do something with their files of a name (`DiskStore.others`); from any
        thread. Of ranks that have ended the next step tells."""
        number, num_tokens = self.number_of[id(kv)], len(kv) if kv.shape[1] == self.width else 0
        question = f"kv {next(self._numbers)}"
        try:
            self._team.send(self._message(what, question, name, number, num_tokens))
        except RankError:
            return lambda: False
        return lambda: self._did(question)

    def _did(self, question: str) -> bool:
        try:
            return all(self._team.reports(question).values())
        except RankError:
            return False

    def close(self) -> None:
        """See `KvCopies`; other ranks' threads end with their processes."""
        self._own.close()


def _forget(number_of: dict[int, int], gone: deque[int], key: int) -> None:
    gone.append(number_of.pop(key))


class _OnAllRanks(NamedTuple):
    """A `Copied` whose end other ranks wait for too, before the next step."""

    own: Copied
    others_join: Callable[[], object]

    def done(self) -> bool:
        return self.own.done()

    def go_on(self) -> None:
        self.own.go_on()

    def hurry(self) -> None:
        self.own.hurry()

    def wait(self) -> None:
        self._end(self.own.wait)

    def join(self) -> None:
        self._end(self.own.join)

    def _end(self, end: Callable[[], object]) -> None:
        try:
            end()
        finally:
            self.others_join()


class PartOfTiers:
    """What another rank than the first keeps: the methods are those that rank 0 calls.

    Args:
        copies: of its pages.
        disk: its files; None: there are none.
        device: its own.
        report: tells rank 0 the answer to a question, from any thread.
    """

    def __init__(
        self,
        copies: KvCopies,
        disk: DiskStore | None,
        device: torch.device,
        report: Callable[[str, bool], object],
    ) -> None:
        self._copies = copies
        self._disk = disk
        self._report = report
        # By rank 0's numbers; and what waits until they are filled.
        self._rows: dict[int, tuple[Tensor, Callable[[], object]]] = {}
        self._copying: dict[int, Copied] = {}
        self._readers = ThreadPoolExecutor(most_readers(), "onestem-kv-read", _use, (device,))
        self._writer = ThreadPoolExecutor(1, "onestem-kv-write", _use, (device,))

    def do(self, gone: Sequence[int], name: str, *arguments: Any) -> None:
        """Drop what rank 0 has dropped, then call a method."""
        for number in gone:
            self._rows.pop(number, None)
        getattr(self, name)(*arguments)

    def out(self, numbers: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Copy what is at slots of KV memory."""
        every, wait = self._copies.out(parts)
        for number, rows in zip(numbers, every, strict=True):
            self._rows[number] = rows, wait

    def into(self, number: int, parts: Sequence[tuple[int, int, np.ndarray]]) -> None:
        """Begin to copy to slots: rows by their tensor's number, from the first on."""
        rows = self._rows
        self._copying[number] = self._copies.into(
            [Part(rows[of][0], first, slots) for of, first, slots in parts]
        )
        self._copying[number].hurry()  # rank 0 does not tell when it goes on

    def join(self, number: int) -> None:
        """Let the next step wait for what `into` has begun."""
        self._copying.pop(number).join()

    def read(self, question: str, name: str, number: int, num_tokens: int) -> None:
        """Begin to read this rank's file of a name."""
        self._readers.submit(self._answer, question, lambda: self._read(name, number, num_tokens))

    def _read(self, name: str, number: int, num_tokens: int) -> bool:
        assert self._disk is not None
        rows = self._copies.host_rows(num_tokens)
        self._rows[number] = rows, lambda: None
        return self._disk.read(name, rows)

    def put(self, question: str, name: str, number: int, num_tokens: int) -> None:
        """Begin to write this rank's file of a name."""
        self._writer.submit(self._answer, question, lambda: self._put(name, number))

    def _put(self, name: str, number: int) -> bool:
        assert self._disk is not None
        rows, wait = self._rows[number]
        wait()
        return self._disk.put(name, rows, NO_TOKENS)

    def _answer(self, question: str, work: Callable[[], bool]) -> None:
        try:
            did = work()
        except Exception:  # rank 0 waits
            log.exception("keys and values of a rank could not be read or written")
            did = False
        self._report(question, did)


def _use(device: torch.device) -> None:
    """Threads begin on the first GPU, which is another rank's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
