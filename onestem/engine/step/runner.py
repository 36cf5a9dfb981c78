"""Runs a step: the decoder over its rows, with attention over KV pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.cache.storage import DiskStore
from onestem.engine.step.choices import Watched
from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.engine.tiers.copies import KvCopies, PageCopies, at_state, copies_of
from onestem.models.decoder import Attend, Decoder
from onestem.models.delta import LayerStates, StatesOf
from onestem.models.description import DeltaRule, LayerHeads
from onestem.models.updates import write_tensors
from onestem.ops import (
    Angles,
    AttentionImpl,
    Heads,
    PartRows,
    PreparedAttention,
    Queries,
    allocate_pages,
)
from onestem.ops.copies import on_device
from onestem.options import ShareMode

# Rows that score are many, and their logits large: at most this many at a time (128 MiB).
BLOCK_LOGITS = 1 << 25
# The same for rows that are sampled from (4 GiB): about what memory is left for.
SAMPLED_LOGITS = 1 << 30

# By window; empty where nothing is attended.
Prepared = dict[int | None, PreparedAttention]
# `Queries.sources`, and each layer's angles.
LayerQueries = tuple[Tensor, list[Angles]]


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits of a step's rows, float32.

    Attributes:
        samples: blocks `[n_i, vocab_size]` of rows that are sampled from. A block is made when it
            is asked for, before the next step.
        scored: the same of rows that score given tokens.
        attended: `[n]`, what the questions of `StepInputs.choices` attend to (`Watched`).
    """

    samples: Iterable[Tensor]
    scored: Iterable[Tensor] = ()
    attended: Tensor | None = None


class StepRunner(Protocol):
    """What an engine needs of a `Runner`, which may be one of many that run as one.

    Attributes:
        decoder: the model, or this rank's part of it.
        depth: steps that may be in flight; 1: each ends before `run` returns.
        windows: of the layers.
        may_be_interrupted: a step may end half-way, and be computed again.
    """

    decoder: Decoder
    depth: int
    may_be_interrupted: bool
    windows: tuple[int | None, ...]

    def prepare(self, inputs: StepInputs, new_pages: NewPages | None) -> Any:
        """Make the step's plans ready, the same for all layers: what `run` takes. `new_pages`:
        since the step before; None: rows, or what they see, have changed too."""

    def run(self, inputs: StepInputs, prepared: Any, ids: Tensor | None) -> Logits:
        """Logits of the rows that want them. `ids` int64 `[num_decodes]`: the first rows' tokens
        where they are on the device already, instead of `inputs.token_ids`. Of several ranks all
        have `ids`, and rank 0's are taken."""

    def abandon(self) -> None:
        """Logits of the step launched last that were not asked for are not wanted."""

    def check(self) -> None:
        """Raise an error where what steps have given cannot be trusted."""

    def on_device(self, values: np.ndarray) -> Tensor:
        """A copy on the device, made without waiting for a GPU."""

    def warm_up(self) -> None:
        """Make what would else be made in the first steps."""

    def kv_copies(self, budget: int, disk: DiskStore | None) -> KvCopies:
        """Copies between KV memory and host memory, of which they take `budget` bytes; of several
        ranks, each does so, and has its own files beside those of `disk`."""

    def release_pages(self) -> None:
        """Free KV memory; its tensors stay the objects that they are."""

    def restore_pages(self) -> None:
        """Allocate KV memory again; nothing is in it."""

    def release_weights(self, *, keep: bool) -> None:
        """See `Decoder.release`."""

    def restore_weights(self) -> None:
        """See `Decoder.restore`."""

    def write_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `write_tensors`."""


class RankTeam(Protocol):
    """What an engine's owner needs of the other processes that hold the model together
    (`onestem.parallel.Team`)."""

    def make_runner(self, decoder: Decoder, impl: AttentionImpl, **options: Any) -> StepRunner:
        """A runner of all processes together; `options`: see `Runner`."""

    def check(self) -> None:
        """Raise `RankError` if a process has ended."""

    def on_death(self, notify: Callable[[str], object]) -> None:
        """Call a function with the reason, from another thread, when a process has ended; now if
        one has."""

    def close(self) -> None:
        """End the processes."""


class DecoderRows(NamedTuple):
    """What the decoder takes of a step's rows, and of spare ones after them.

    Attributes:
        ids, positions, slots: int64 `[num_rows]`; slots are those of keys and values.
        read, states, last: see `Decoder.forward`.
        watched: questions that choose what is repaired.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    read: Tensor | None
    states: StatesOf | None
    watched: Watched | None
    last: int = -1


class Runner:
    """Holds the model and its KV pages: a `StepRunner`.

    Attributes:
        scratch_slot: a slot that is never read.
        kv_pages: K and V pages, of each layer that has its own.
        pages: those that each layer with attention reads.
        choosing_layers: in which questions show what they attend to, and `last_choosing` the last.
        states: of each layer, inputs of the convolution and matrices (`LayerStates`).
        copies: of its pages; None: there are no tiers below them.

    Args:
        share: `no-attention` writes K and V but attends to nothing (the ceiling).
        num_states: slots for states of layers with the delta rule.
    """

    def __init__(
        self,
        decoder: Decoder,
        impl: AttentionImpl,
        *,
        num_pages: int,
        page_size: int,
        share: ShareMode,
        num_states: int = 0,
    ) -> None:
        config = decoder.part
        self.decoder = decoder
        self.impl = impl
        self.share = share
        self.depth = 1
        self.may_be_interrupted = True
        self.windows = config.sliding_windows
        # Those behind the middle know what is asked for, as well as later ones (measured; the very
        # last one has only the rows that are read). Rows that choose need no layer after them.
        far = [layer for layer, window in enumerate(self.windows[:-1]) if window is None]
        middle = len(far) // 2
        self.choosing_layers = frozenset(far[middle : max(middle + 2, len(far) * 2 // 3)])
        self.last_choosing = max(self.choosing_layers, default=-1)
        # One page more than the pool knows of: spare rows write there.
        self.scratch_slot = num_pages * page_size
        own = {
            layer: self._allocate(num_pages + 1, page_size, heads)
            for layer, heads in enumerate(config.heads)
            if config.keeps_kv(layer)
        }
        self.kv_pages = list(own.values())
        self.copies: PageCopies | None = None
        self.pages = {
            layer: own[read]
            for layer, read in enumerate(config.kv_layers)
            if not config.has_state(layer)
        }
        rule = config.delta
        self.states = {
            layer: _allocate_states(decoder, num_states, rule)
            for layer, has_state in enumerate(() if rule is None else rule.layers)
            if rule is not None and has_state
        }

    def _allocate(self, num_pages: int, page_size: int, heads: LayerHeads) -> tuple[Tensor, Tensor]:
        allocate = partial(
            allocate_pages,
            num_pages,
            page_size,
            heads.num_kv_heads,
            heads.head_dim,
            dtype=self.decoder.dtype,
            device=self.decoder.device,
            head_major=self.impl.head_major(heads.head_dim, self.decoder.dtype),
        )
        return allocate(), allocate()

    def warm_up(self) -> None:
        """Make what would else be made in the first steps."""

    def kv_copies(self, budget: int, disk: DiskStore | None) -> KvCopies:
        """See `StepRunner.kv_copies`."""
        self.copies = copies_of(self.kv_pages, budget, list(self.states.values()))
        return self.copies

    def release_pages(self) -> None:
        """Free KV memory; its tensors stay the objects that they are."""
        if self.copies is not None:
            self.copies.guard()
        for pages in self._page_tensors():
            pages.untyped_storage().resize_(0)

    def restore_pages(self) -> None:
        """Allocate KV memory again; nothing is in it."""
        for pages in self._page_tensors():
            pages.untyped_storage().resize_(pages.numel() * pages.element_size())

    def release_weights(self, *, keep: bool) -> None:
        """See `Decoder.release`."""
        self.decoder.release(keep=keep)

    def restore_weights(self) -> None:
        """See `Decoder.restore`."""
        self.decoder.restore()

    def write_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `write_tensors`."""
        write_tensors(self.decoder, tensors)

    def _page_tensors(self) -> list[Tensor]:
        return [tensor for pair in (*self.kv_pages, *self.states.values()) for tensor in pair]

    def prepare(self, inputs: StepInputs, new_pages: NewPages | None) -> Any:
        """See `StepRunner.prepare`."""
        if self.share == "no-attention":
            return {}
        together = self.share != "storage"
        return {
            window: self.impl.prepare(plan, share=together) for window, plan in inputs.plans.items()
        }

    def run(self, inputs: StepInputs, prepared: Any, ids: Tensor | None) -> Logits:
        """See `StepRunner.run`."""
        self._guard(inputs)
        if ids is not None:
            self.decoder.ranks.take_first(ids)
        if ids is None:
            ids = self.on_device(inputs.token_ids)
        elif len(ids) < len(inputs.token_ids):
            ids = torch.cat((ids, self.on_device(inputs.token_ids[len(ids) :])))
        return self._forward(inputs, prepared, ids)

    def _guard(self, inputs: StepInputs) -> None:
        """Wait for copies of what a step writes to."""
        if self.copies is None:
            return
        slots, states = inputs.slots, inputs.states
        if states is not None:
            copied = (given for _, given in inputs.copies)
            slots = np.concatenate((slots, at_state(*states.target, *copied)))
        self.copies.guard(slots)

    def abandon(self) -> None:
        """Logits of the step launched last that were not asked for are not wanted."""

    def check(self) -> None:
        """Raise an error where what steps have given cannot be trusted."""

    def on_device(self, values: np.ndarray) -> Tensor:
        """A copy on the device, made without waiting for a GPU."""
        return on_device(values, self.decoder.device)

    @torch.inference_mode()
    def _forward(self, inputs: StepInputs, prepared: Prepared, ids: Tensor) -> Logits:
        rows = len(inputs.positions)
        spare = self.decoder.padded_rows(rows) - rows
        slots = _padded(inputs.slots, spare, self.scratch_slot)
        # Most rows of prompts are there for their keys and values alone.
        read = np.union1d(inputs.logit_rows, inputs.score_rows)
        spare_read = self.decoder.padded_rows(len(read)) - len(read) if len(read) else 0
        is_part = len(read) + spare_read < rows + spare
        states = None
        if inputs.states is not None:
            states = self._states_of(PartRows.of(inputs.states, self.decoder.device))
        watched = None
        if inputs.choices:
            plan = next(iter(inputs.plans.values()))
            watched = Watched(inputs.choices, plan, self.decoder.device)
        hidden = self.hidden(
            inputs,
            prepared,
            DecoderRows(
                F.pad(ids, (0, spare)) if spare else ids,
                self.on_device(_padded(inputs.positions, spare, 0)),
                self.on_device(slots),
                self.on_device(_padded(read, spare_read, 0)) if is_part else None,
                states,
                watched,
                self.last_choosing if inputs.all_choose else -1,
            ),
        )
        if inputs.copies:
            self._copy_states(inputs.copies)
        logits = self._logits(inputs, hidden, read if is_part else None)
        return logits if watched is None else replace(logits, attended=watched.total)

    def hidden(self, inputs: StepInputs, prepared: Prepared, rows: DecoderRows) -> Tensor:
        """See `Decoder.forward`."""
        queries, real = self.queries(inputs), len(inputs.positions)
        attend = self._attend(prepared, rows.slots, real, queries, rows.watched)
        return self.decoder.forward(
            rows.ids, rows.positions, attend, rows.read, rows.states, rows.last
        )

    def _states_of(self, parts: PartRows) -> StatesOf:
        return lambda layer: LayerStates(*self.states[layer], parts)

    def _copy_states(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy slots, each (from, to), after a step's rows."""
        taken, given = self.on_device(np.array(copies, np.int64).T)
        for pair in self.states.values():
            for slots in pair:
                slots[given] = slots[taken]

    def _logits(self, inputs: StepInputs, hidden: Tensor, read: np.ndarray | None = None) -> Logits:
        """`hidden` `[n, hidden_size]`: of the step's rows, or of those that are `read`, ascending;
        then of spare ones."""
        wanted, scoring = inputs.logit_rows, inputs.score_rows
        rows = len(inputs.positions)
        if read is not None:
            wanted, scoring = np.searchsorted(read, wanted), np.searchsorted(read, scoring)
            rows = len(read)
        block = max(1, BLOCK_LOGITS // self.decoder.config.vocab_size)
        blocks = [scoring[first : first + block] for first in range(0, len(scoring), block)]
        scored: Iterator[Tensor] = (self._logits_of(rows, hidden) for rows in blocks)
        count = -(-len(wanted) * self.decoder.config.vocab_size // SAMPLED_LOGITS)
        if count == 1 and np.array_equal(wanted, np.arange(rows)):
            return Logits((self.decoder.logits(hidden)[: len(wanted)],), scored)
        parts = np.array_split(wanted, count) if count else []
        return Logits((self._logits_of(rows, hidden) for rows in parts), scored)

    def _logits_of(self, rows: np.ndarray, hidden: Tensor) -> Tensor:
        spare = self.decoder.padded_rows(len(rows)) - len(rows)
        picked = hidden[self.on_device(_padded(rows, spare, 0))]
        return self.decoder.logits(picked)[: len(rows)]

    def queries(self, inputs: StepInputs) -> LayerQueries | None:
        """The queries of a step that has moved rows; None: they are its rows."""
        plan = next(iter(inputs.plans.values()), None)
        if plan is None or not len(plan.moved):
            return None
        positions = self.on_device(plan.row_position.astype(np.int64))
        return self.on_device(plan.sources()), self.decoder.rope.angles(positions)

    def _attend(
        self,
        prepared: Prepared,
        slots: Tensor,
        rows: int,
        queries: LayerQueries | None,
        watched: Watched | None,
    ) -> Attend:
        """Attention of the first `rows`; the others see nothing, and are not read."""
        scores = self.decoder.scores

        def attend(layer: int, qkv: Tensor, heads: Heads, angles: Angles) -> Tensor:
            if not prepared:
                return self.asked(layer, qkv, heads, angles, slots, None)
            q = self.asked(layer, qkv, heads, angles, slots, queries)
            q = q if queries is not None else q[:rows]
            k_pages, v_pages = self.pages[layer]
            state = prepared[self.windows[layer]].attend(q, k_pages, v_pages, scores)
            if watched is not None and layer in self.choosing_layers:
                watched.add(q, k_pages, state.lse, scores)
            out = state.out.to(q.dtype)
            if heads.sinks is not None:
                self.decoder.ops.share_sinks(out, state.lse.float(), heads.sinks)
            return F.pad(out, (0, 0, 0, 0, 0, len(qkv) - rows)) if len(qkv) > rows else out

        return attend

    def asked(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Angles,
        slots: Tensor,
        queries: LayerQueries | None,
    ) -> Tensor:
        """A layer's queries `[num_queries, num_q_heads, head_dim]`, those of its rows first; their
        keys and values are written."""
        mine = None if queries is None else Queries(queries[0], queries[1][layer])
        pages = self.pages[layer]
        return self.decoder.ops.rope_write(qkv, heads, angles, slots, *pages, queries=mine)


def _padded(values: np.ndarray, spare: int, fill: int) -> np.ndarray:
    return np.pad(values, (0, spare), constant_values=fill) if spare else values


def _allocate_states(decoder: Decoder, num_states: int, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    inputs, matrices = (rule.width - 1, rule.channels), (rule.key_dim, rule.value_dim)
    empty = partial(torch.empty, device=decoder.device)
    return (
        empty(num_states, *inputs, dtype=decoder.dtype),
        empty(num_states, rule.num_value_heads, *matrices, dtype=torch.float32),
    )
