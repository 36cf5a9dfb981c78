"""The runner of a GPU: steps of few rows are CUDA graphs over fixed buffers, which do not wait.

A graph is made for each of a few batch sizes, and a step takes the next larger one. Its spare rows
see nothing and write to a page that is never read. What a step attends to is in the plan's work
list, which is data (`ops.triton.Workspace`): a graph serves prefixes of any number and length. But
lists without items of the widest tiles have graphs of their own, with a smaller attention kernel.

A graph ends with the hidden states. Logits are made after it, only of rows that want them: rows of
prompts and spare rows want none, and the graphs hold no logits of their own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.engine.step.runner import Logits, Prepared, Runner
from onestem.models.by_row_gpu import GRAPH_ROWS
from onestem.models.decoder import Attend, Decoder
from onestem.ops import Angles, AttentionImpl, Heads, PartRows, StateRows
from onestem.ops.copies import Staging
from onestem.ops.state_rows import FEW_ROWS
from onestem.ops.triton import Kernels, States, Workspace
from onestem.ops.work import ListTooLong
from onestem.options import ShareMode

# Rows that graphs are made for; a larger step is launched kernel by kernel.
BATCH_SIZES = GRAPH_ROWS

WORDS_PER_ROW = 256  # of a work list
STATES_PER_ROW = 4  # partial states of attention; where a plan wants more, less is shared

# Steps of decodes after which their work list is made again: it was balanced for the lengths of its
# time, and own runs grow.
LIST_STEPS = 16

# Layers that one work list serves: their window, KV heads and size of heads.
_Kind = tuple[int | None, int, int]


class GraphShape(NamedTuple):
    """What a graph is made for: rows, and whether work lists may have items of the widest tiles."""

    rows: int
    wide: bool


@dataclass(frozen=True, eq=False)
class Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [rows, hidden_size], written by each replay


@contextmanager
def _without_collector() -> Iterator[None]:
    """Cyclic garbage may hold graphs of another engine, and destroying one breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphRunner(Runner):
    """`Runner` whose decode steps are CUDA graphs.

    Attributes:
        workspaces: work lists, and what kernels need beside them, by the layers that they serve.
        graphs: those that are made.
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
        super().__init__(
            decoder,
            impl,
            num_pages=num_pages,
            page_size=page_size,
            share=share,
            num_states=num_states,
        )
        self.depth = 2
        self._sizes = np.array(BATCH_SIZES)
        shape = 3, BATCH_SIZES[-1]  # ids, positions and slots
        self._stagings = [Staging.make(shape, torch.int64, decoder.device) for _ in range(2)]
        self._turn = 0
        self._list_age = 0  # steps since the work lists were made
        self._list_steps = LIST_STEPS  # after which they are made again
        self._listed = False  # whether they are those of the step before
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
        self._inputs[2] = self.scratch_slot
        # As of `StateRows.table`, where layers keep states; all padding yet.
        shape = BATCH_SIZES[-1] if self.states else 0, 5
        self._parts = torch.zeros(shape, dtype=torch.int32, device=decoder.device)
        self._kinds: list[_Kind] = [
            (window, heads.num_kv_heads, heads.head_dim)
            for window, heads in zip(self.windows, decoder.part.heads, strict=True)
        ]
        self.workspaces = self._make_workspaces(impl, num_pages, page_size)
        self._pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[GraphShape, Graph] = {}

    def _make_workspaces(
        self, impl: AttentionImpl, num_pages: int, page_size: int
    ) -> dict[_Kind, Workspace]:
        config, device = self.decoder.part, self.decoder.device
        max_states = STATES_PER_ROW * BATCH_SIZES[-1]
        widest = max(heads.head_dim for heads in config.heads)
        states = States.empty(max_states, config.num_q_heads, widest, device)
        return {
            (window, num_kv_heads, head_dim): Workspace(
                Kernels.make(
                    num_q_heads=config.num_q_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    page_size=page_size,
                    dtype=self.decoder.dtype,
                    device=device,
                    windowed=window is not None,
                    deterministic=impl.deterministic,
                ),
                states.of_size(head_dim),
                max_rows=BATCH_SIZES[-1],
                # Each page stands in the plan twice at most (a step's prompts list what they share
                # with its decodes again), and each row's items, spans and slack beside: about
                # twelve words for each run that it sees. A step whose list takes more has no graph.
                max_words=2 * num_pages + WORDS_PER_ROW * BATCH_SIZES[-1] + (1 << 17),
                share=self.share != "storage",
            )
            for window, num_kv_heads, head_dim in set(self._kinds)
        }

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make the graphs of all batch sizes, largest first: the others fit in its memory."""
        spaces = self.workspaces.values()
        for space in spaces:
            # Kernels run before they are captured. A list from before a sleep may have items of the
            # widest tiles, which the smaller kernel does not know.
            space.clear()
        attends = self.share != "no-attention"
        for size in reversed(BATCH_SIZES):
            if attends and any(space.kernels.may_be_wide(size) for space in spaces):
                self._graph(GraphShape(size, True))
            self.decoder.logits(self._graph(GraphShape(size, False)).hidden)  # a product of its own

    def release_pages(self) -> None:
        """Graphs hold addresses: they are made again when the engine is awake (`warm_up`)."""
        self.graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._listed = False
        super().release_pages()

    def prepare(self, inputs: StepInputs, new_pages: NewPages | None) -> Prepared | GraphShape:
        """What `run` takes: for a step of few rows its graph. A step of more, or whose work list
        does not fit in the fixed buffers, is launched kernel by kernel."""
        rows = len(inputs.positions)
        self._list_age += 1
        if new_pages is None or self._list_age >= self._list_steps or not self._listed:
            fits = rows <= BATCH_SIZES[-1] and self._write_parts(inputs.states)
            fits = fits and not len(next(iter(inputs.plans.values())).moved)
            self._listed = fits and self.write_lists(inputs)
            return self._shape(rows) if self._listed else super().prepare(inputs, new_pages)
        if self.share != "no-attention":
            for workspace in self.workspaces.values():
                assert workspace.work is not None
                words = workspace.work.page_word(new_pages.runs, new_pages.page_index)
                # Run and span i are row i's own, and each row is sampled from.
                workspace.advance(inputs.logit_rows, words, new_pages.pages)
        return self._shape(rows)

    def _shape(self, rows: int) -> GraphShape:
        """The graph of a step of `rows`, whose work lists are written."""
        works = (workspace.work for workspace in self.workspaces.values())
        return GraphShape(
            self._size(rows), any(work is not None and work.num_wide for work in works)
        )

    def _size(self, rows: int) -> int:
        """Rows of the graph that a step of `rows` takes."""
        return int(self._sizes[np.searchsorted(self._sizes, rows)])

    def write_lists(self, inputs: StepInputs) -> bool:
        """Write the work lists; False: they do not fit in the fixed buffers."""
        self._list_age, size = 0, self._size(len(inputs.positions))
        if self.share == "no-attention":
            return True
        try:
            for (window, *_), workspace in self.workspaces.items():
                workspace.write(inputs.plans[window], num_rows=size)
        except ListTooLong:
            return False
        rooms = [space.work.room for space in self.workspaces.values() if space.work is not None]
        self._list_steps = min(LIST_STEPS, *(room + 1 for room in rooms if room is not None), 2**31)
        return True

    def _write_parts(self, states: StateRows | None) -> bool:
        """Write which rows continue which state; False: some are too many for a graph."""
        if states is None:
            return True
        if (states.count > FEW_ROWS).any():
            return False
        self._parts.zero_()
        self._parts[: len(states.count)].copy_(self.on_device(states.table()))
        return True

    def run(
        self, inputs: StepInputs, prepared: Prepared | GraphShape, ids: Tensor | None
    ) -> Logits:
        """See `StepRunner.run`; a step that has a graph replays it."""
        if not isinstance(prepared, GraphShape):
            return super().run(inputs, prepared, ids)
        self._guard(inputs)
        rows = len(inputs.positions)
        self._stage(inputs, rows, prepared.rows)
        if ids is not None:
            self._inputs[0, : len(ids)].copy_(ids)
        if self.share != "no-attention":
            for workspace in self.workspaces.values():
                workspace.upload()
        graph = self._graph(prepared)
        graph.graph.replay()
        if inputs.copies:
            self._copy_states(inputs.copies)
        return self._logits(inputs, graph.hidden[:rows])

    def _stage(self, inputs: StepInputs, rows: int, size: int) -> None:
        self._turn = 1 - self._turn
        staging = self._stagings[self._turn]
        array = staging.writable()
        array[0, :rows], array[1, :rows] = inputs.token_ids, inputs.positions
        array[2, :rows], array[2, rows:size] = inputs.slots, self.scratch_slot
        staging.upload(self._inputs)

    def _graph(self, shape: GraphShape) -> Graph:
        if shape not in self.graphs:
            self.graphs[shape] = self.capture(shape)
        return self.graphs[shape]

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> Graph:
        """Make a graph of `fixed_forward`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.fixed_forward(shape)  # compiles kernels, which cannot be done while capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # With several ranks, a thread of their group watches collectives meanwhile.
        mode = "global" if self.decoder.ranks.size == 1 else "thread_local"
        with (
            _without_collector(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode),
        ):
            hidden = self.fixed_forward(shape)
        return Graph(graph, hidden)

    def fixed_forward(self, shape: GraphShape) -> Tensor:
        """Hidden states `[rows, hidden_size]` of what lies in the fixed buffers."""
        ids, positions, slots = self._inputs[:, : shape.rows]
        self.decoder.ranks.take_first(ids)
        states = self._states_of(PartRows.decodes(self._parts[: shape.rows]))
        attend = self._fixed_attend(slots, shape.wide)
        return self.decoder.forward(ids, positions, attend, states=states)

    def _fixed_attend(self, slots: Tensor, wide: bool) -> Attend:
        ops, scores = self.decoder.ops, self.decoder.scores

        def attend(layer: int, qkv: Tensor, heads: Heads, angles: Angles) -> Tensor:
            k_pages, v_pages = self.pages[layer]
            q = ops.rope_write(qkv, heads, angles, slots, k_pages, v_pages)
            if self.share == "no-attention":
                return q
            out = torch.empty_like(q)
            workspace = self.workspaces[self._kinds[layer]]
            workspace.launch(q, k_pages, v_pages, out, scores=scores, wide=wide)
            if heads.sinks is not None:
                ops.share_sinks(out, workspace.lse, heads.sinks)
            return out

        return attend
