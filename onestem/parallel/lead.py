"""Rank 0's runner: what it does, the other ranks do at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onestem.cache.storage import DiskStore
from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.engine.step.runner import Logits, Runner
from onestem.engine.tiers.copies import KvCopies
from onestem.interrupts import uninterrupted
from onestem.parallel.messages import advance, call, whole
from onestem.parallel.tiers import TeamCopies

if TYPE_CHECKING:
    from onestem.parallel.team import Team


class LeadRunner:
    """The `Runner` of rank 0's part of the model; drives those of the other ranks too.

    Attributes: see `Runner`.
    """

    def __init__(self, runner: Runner, team: Team) -> None:
        self.depth = runner.depth
        self.may_be_interrupted = False  # others would go on with it
        self.windows = runner.windows
        self.decoder = runner.decoder
        self._runner = runner
        self._team = team
        # Of the step launched last: other ranks make all of its logits, so they are made here too.
        self._blocks: list[Iterator[Tensor]] = []

    def prepare(self, inputs: StepInputs, new_pages: NewPages | None) -> NewPages | None:
        """Return `new_pages`: `run` sends the step, then all ranks prepare it at the same time."""
        return new_pages

    def run(self, inputs: StepInputs, prepared: NewPages | None, ids: Tensor | None) -> Logits:
        """See `Runner.run`.

        Raises:
            RankError: a rank has ended.
        """
        self.abandon()
        runner = self._runner
        if ids is not None and ids.device.type == "cpu":
            inputs.token_ids[: len(ids)] = ids.numpy()
            ids = None
        message = whole(inputs, ids) if prepared is None else advance(inputs, prepared, ids)
        try:
            self._team.send(message)
            logits = runner.run(inputs, runner.prepare(inputs, prepared), ids)
        except Exception as error:
            raise self._team.failed(error) from error
        if isinstance(logits.samples, tuple) and not len(inputs.score_rows):
            return logits  # all of them are made
        samples, scored = self._blocks = [self.each(logits.samples), self.each(logits.scored)]
        return Logits(samples, scored)

    def each(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Blocks of logits, as they are asked for; raises `RankError` where a rank has ended."""
        blocks = iter(blocks)
        while True:
            try:
                block = next(blocks, None)
            except Exception as error:
                raise self._team.failed(error) from error
            if block is None:
                return
            yield block

    def abandon(self) -> None:
        """Make the logits that were not asked for, of a step that came to nothing here: other ranks
        take no message before."""
        blocks, self._blocks = self._blocks, []
        for each in blocks:
            for _ in each:
                pass

    def on_device(self, values: np.ndarray) -> Tensor:
        """See `Runner`."""
        return self._runner.on_device(values)

    def check(self) -> None:
        """See `Runner`."""
        self._team.check()

    def warm_up(self) -> None:
        """See `Runner`: on all ranks, as all below."""
        self._on_all_ranks("warm_up")

    def release_pages(self) -> None:
        """See `Runner`."""
        self._on_all_ranks("release_pages")

    def restore_pages(self) -> None:
        """See `Runner`."""
        self._on_all_ranks("restore_pages")

    def release_weights(self, *, keep: bool) -> None:
        """See `Runner`."""
        self._on_all_ranks("release_weights", keep=keep)

    def restore_weights(self) -> None:
        """See `Runner`."""
        self._on_all_ranks("restore_weights")

    def write_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """One tensor after the other, whole: each rank takes its part of it."""
        for name, tensor in tensors.items():
            here = tensor.to(self.decoder.device).contiguous()
            with self._together(call("write_weights", name, here.dtype, tuple(here.shape))):
                self._team.ranks.take_first(here.view(-1).view(torch.uint8))
                self._runner.write_weights({name: here})

    def kv_copies(self, budget: int, disk: DiskStore | None) -> KvCopies:
        """See `Runner`."""
        files = None if disk is None else (disk.folder, disk.budget, disk.identity)
        with self._together(call("keep_kv", budget, files)):
            own = self._runner.kv_copies(budget, disk)
        copies = TeamCopies(own, self._team, self._together)
        if disk is not None:
            disk.others = copies.ask
        return copies

    def _on_all_ranks(self, name: str, **options: object) -> None:
        """Call a method of each rank's runner."""
        with self._together(call(name, **options)):
            getattr(self._runner, name)(**options)

    @contextmanager
    def _together(self, message: bytes) -> Iterator[None]:
        """Have other ranks make a call, while the block does the same here."""
        with uninterrupted():
            self.abandon()
            with self._team.together(message):
                yield
