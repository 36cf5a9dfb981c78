"""The runner of a GPU: steps of few rows are CUDA graphs over fixed buffers, which do not wait.

A graph is made for each of a few batch sizes, and a step takes the next larger one. Its spare rows
see nothing and write to a page that is never read. What a step attends to is in the plan's work
list, which is data (`ops.triton.Workspace`): a graph serves prefixes of any number and length. But
lists without items of the widest tiles have graphs of their own, with a smaller attention kernel;
and so have decodes with moved rows, by their number of queries, made when the first one comes.
Prompts with moved rows, and few rows that choose what is repaired, have graphs that are made when
such steps have come before.

A graph ends with the hidden states. Logits are made after it, only of rows that want them: rows of
prompts and spare rows want none, and the graphs hold no logits of their own.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onestem.engine.step.choices import Watched
from onestem.engine.step.inputs import NewPages, StepInputs
from onestem.engine.step.runner import LayerQueries, Logits, Prepared, Runner
from onestem.models.by_row_gpu import GRAPH_ROWS
from onestem.models.decoder import Attend, Decoder
from onestem.ops import Angles, AttentionImpl, Heads, PartRows, StateRows
from onestem.ops.copies import HostWords
from onestem.ops.kv import page_parts
from onestem.ops.state_rows import FEW_ROWS
from onestem.ops.triton import Kernels, States, Workspace
from onestem.ops.work import ListTooLong

# Rows that graphs are made for; a larger step is launched kernel by kernel.
BATCH_SIZES = GRAPH_ROWS

WORDS_PER_ROW = 256  # of a work list
STATES_PER_ROW = 4  # partial states of attention; where a plan wants more, less is shared
MOST_QUERIES = STATES_PER_ROW * BATCH_SIZES[-1]  # a moved row is one state at least
# Queries of a step that chooses, which are kept of each layer that says what they attend to.
MOST_CHOOSING = 512
# How often the like of a prompt with moved rows comes before it has a graph. To make the two of a
# repaired prompt takes what some 25 such prompts gain (8B on an H200: 230 ms, 9 each).
OFTEN = 8

# Steps of decodes after which their work list is made again: it was balanced for the lengths of its
# time, and own runs grow.
LIST_STEPS = 16

# Layers that one work list serves: their window, KV heads and size of heads.
_Kind = tuple[int | None, int, int]


class GraphShape(NamedTuple):
    """What a graph is made for: rows, whether work lists may have items of the widest tiles, how
    many queries there may be (0: only those of the rows), and whether some choose. If all do, it
    ends with the last layer that they need. Page size is that of the lists."""

    rows: int
    wide: bool
    queries: int = 0
    chooses: bool = False
    all_choose: bool = False
    page_size: int = 0

    @property
    def words(self) -> int:
        """Of a step's inputs, which `divide` divides."""
        return 3 * self.rows + 2 * self.queries

    def divide(self, words: Any) -> tuple[Any, Any]:
        """Ids, positions and slots `[3, rows]`; rows and positions of queries `[2, queries]`: of an
        array or a tensor, views."""
        first, second = words[: 3 * self.rows], words[3 * self.rows : self.words]
        return first.reshape(3, self.rows), second.reshape(2, self.queries)


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
        workspaces: work lists, and what kernels need beside them, by the size of what plans have as
            pages and by the layers that they serve.
        graphs: those that are made.
    """

    def __init__(
        self, decoder: Decoder, impl: AttentionImpl, *, num_pages: int, page_size: int, **more: Any
    ) -> None:
        super().__init__(decoder, impl, num_pages=num_pages, page_size=page_size, **more)
        self.depth = 2
        self._sizes = np.array(BATCH_SIZES)
        words = GraphShape(BATCH_SIZES[-1], wide=False, queries=MOST_QUERIES).words
        self._hosts = [HostWords.make((words,), torch.int64, decoder.device) for _ in range(2)]
        self._turn = 0
        self._list_age = 0  # steps since the work lists were made
        self._list_steps = LIST_STEPS  # after which they are made again
        self._listed = False  # whether they are those of the step before
        self._came: Counter[GraphShape] = Counter()  # prompts with moved rows
        self._inputs = torch.zeros(words, dtype=torch.int64, device=decoder.device)
        # As of `StateRows.table`, where layers keep states; all padding yet.
        shape = BATCH_SIZES[-1] if self.states else 0, 5
        self._parts = torch.zeros(shape, dtype=torch.int32, device=decoder.device)
        self._kinds: list[_Kind] = [
            (window, heads.num_kv_heads, heads.head_dim)
            for window, heads in zip(self.windows, decoder.part.heads, strict=True)
        ]
        self._page_size, self._num_pages = page_size, num_pages
        self.workspaces = {page_size: self._make_workspaces(page_size)}
        self._pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[GraphShape, Graph] = {}

    @cached_property
    def _partial(self) -> States:
        """Of all workspaces, which run in turn."""
        heads = self.decoder.part.heads
        most, widest = STATES_PER_ROW * BATCH_SIZES[-1], max(one.head_dim for one in heads)
        return States.empty(most, self.decoder.part.num_q_heads, widest, self.decoder.device)

    def _spaces(self, page_size: int) -> dict[_Kind, Workspace]:
        """Workspaces of plans with pages, or parts of pages, of a size."""
        if page_size not in self.workspaces:
            self.workspaces[page_size] = self._make_workspaces(page_size)
        return self.workspaces[page_size]

    def _make_workspaces(self, page_size: int) -> dict[_Kind, Workspace]:
        config, device = self.decoder.part, self.decoder.device
        num_pages = self._num_pages * self._page_size // page_size
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
                    deterministic=self.impl.deterministic,
                ),
                self._partial.of_size(head_dim),
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
        for spaces in self.workspaces.values():
            for space in spaces.values():
                # Kernels run before they are captured. A list from before a sleep may have items of
                # the widest tiles, which the smaller kernel does not know.
                space.clear()
        kernels = [space.kernels for space in self._spaces(self._page_size).values()]
        attends = self.share != "no-attention"
        for size in reversed(BATCH_SIZES):
            narrow = GraphShape(size, wide=False, page_size=self._page_size)
            (*others, slots), _ = narrow.divide(self._inputs)
            for zeros in others:
                zeros.zero_()
            slots.fill_(self.scratch_slot)
            if attends and any(one.may_be_wide(size) for one in kernels):
                self._graph(narrow._replace(wide=True))
            self.decoder.logits(self._graph(narrow).hidden)  # a product of its own

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
            fits = fits and self._has_room(inputs)
            self._listed = fits and self.write_lists(inputs)
            return self._shape(inputs) if self._listed else super().prepare(inputs, new_pages)
        if self.share != "no-attention":
            for workspace in self._spaces(self._page_size).values():
                assert workspace.work is not None
                words = workspace.work.page_word(new_pages.runs, new_pages.page_index)
                # Run and span i are row i's own, and each row is sampled from.
                workspace.advance(inputs.logit_rows, words, new_pages.pages)
        return self._shape(inputs)

    def _shape(self, inputs: StepInputs) -> GraphShape:
        """The graph of a step whose work lists are written."""
        size, plan = self._size(len(inputs.positions)), next(iter(inputs.plans.values()))
        works = (workspace.work for workspace in self._spaces(plan.page_size).values())
        wide = any(work is not None and work.num_wide for work in works)
        times = -(-plan.num_queries // size) if len(plan.moved) else 0
        queries = size << (times - 1).bit_length() if times else 0
        chooses = bool(inputs.choices)
        return GraphShape(size, wide, queries, chooses, inputs.all_choose, plan.page_size)

    def _has_room(self, inputs: StepInputs) -> bool:
        """Whether a graph may have room for a step's queries, and pays: where rows are moved, for
        decodes at once, for prompts when their like has come often."""
        rows, _, queries, chooses, *_ = shape = self._shape(inputs)
        most = MOST_CHOOSING if chooses else MOST_QUERIES
        if queries > most or (chooses and (rows > most or self.share == "no-attention")):
            return False
        decodes = len(inputs.logit_rows) == len(inputs.positions)
        if not chooses and (decodes or not queries):
            return True
        like = shape._replace(wide=False)
        self._came[like] += 1
        return self._came[like] > OFTEN

    def _size(self, rows: int) -> int:
        """Rows of the graph that a step of `rows` takes."""
        return int(self._sizes[np.searchsorted(self._sizes, rows)])

    def write_lists(self, inputs: StepInputs) -> bool:
        """Write the work lists; False: they do not fit in the fixed buffers."""
        self._list_age, size = 0, self._size(len(inputs.positions))
        if self.share == "no-attention":
            return True
        spaces = self._spaces(next(iter(inputs.plans.values())).page_size)
        try:
            for (window, *_), workspace in spaces.items():
                workspace.write(inputs.plans[window], num_rows=size)
        except ListTooLong:
            return False
        rooms = [space.work.room for space in spaces.values() if space.work is not None]
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
        self._stage(inputs, rows, prepared)
        if ids is not None:
            self._inputs[: len(ids)].copy_(ids)
        if self.share != "no-attention":
            for workspace in self._spaces(prepared.page_size).values():
                workspace.upload()
        graph = self._graph(prepared)
        graph.graph.replay()
        if inputs.copies:
            self._copy_states(inputs.copies)
        logits = self._logits(inputs, graph.hidden[:rows])
        return replace(logits, attended=self.attended(inputs)) if inputs.choices else logits

    def attended(self, inputs: StepInputs) -> Tensor:
        """What the rows of the replayed step that choose attend to (`Watched.total`)."""
        plan = next(iter(inputs.plans.values()))
        watched = Watched(inputs.choices, plan, self.decoder.device)
        for layer, (q, lse) in self._kept.items():
            watched.add(q, self.pages[layer][0], lse, self.decoder.scores)
        return watched.total

    @cached_property
    def _kept(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Of each layer that chooses: queries of a graph `[MOST_CHOOSING, num_q_heads, head_dim]`,
        and float32 `[MOST_CHOOSING, num_q_heads]`, log-sum-exps."""
        config, heads = self.decoder.part, self.decoder.part.heads
        make = self._inputs.new_empty
        return {
            layer: (
                make(
                    MOST_CHOOSING,
                    config.num_q_heads,
                    heads[layer].head_dim,
                    dtype=self.decoder.dtype,
                ),
                make(MOST_CHOOSING, config.num_q_heads, dtype=torch.float32),
            )
            for layer in self.choosing_layers
        }

    def _stage(self, inputs: StepInputs, rows: int, shape: GraphShape) -> None:
        self._turn = 1 - self._turn
        host = self._hosts[self._turn]
        of_rows, (sources, positions) = shape.divide(host.writable())
        of_rows[0, :rows], of_rows[1, :rows] = inputs.token_ids, inputs.positions
        of_rows[2, :rows] = inputs.slots
        of_rows[:, rows:] = [[0], [0], [self.scratch_slot]]
        if shape.queries:
            plan = next(iter(inputs.plans.values()))
            sources[: plan.num_queries], sources[plan.num_queries :] = plan.sources(), 0
            positions[: plan.num_queries] = plan.row_position
        host.upload(self._inputs[: shape.words])

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
        # Other threads may use the device meanwhile; with several ranks, one watches collectives.
        with (
            _without_collector(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            hidden = self.fixed_forward(shape)
        return Graph(graph, hidden)

    def fixed_forward(self, shape: GraphShape) -> Tensor:
        """Hidden states `[rows, hidden_size]` of what lies in the fixed buffers."""
        (ids, positions, slots), (sources, places) = shape.divide(self._inputs)
        self.decoder.ranks.take_first(ids)
        states = self._states_of(PartRows.decodes(self._parts[: shape.rows]))
        queries = (sources, self.decoder.rope.angles(places)) if shape.queries else None
        attend = self._fixed_attend(slots, shape, queries)
        if shape.all_choose:
            read, last = ids[:0], self.last_choosing
            return self.decoder.forward(ids, positions, attend, read, states, last)
        return self.decoder.forward(ids, positions, attend, states=states)

    def _fixed_attend(
        self, slots: Tensor, shape: GraphShape, queries: LayerQueries | None
    ) -> Attend:
        ops, scores = self.decoder.ops, self.decoder.scores
        spaces = self._spaces(shape.page_size)

        def attend(layer: int, qkv: Tensor, heads: Heads, angles: Angles) -> Tensor:
            q = self.asked(layer, qkv, heads, angles, slots, queries)
            if self.share == "no-attention":
                return q[: len(qkv)]
            out = q.new_empty(len(qkv), *q.shape[1:])
            workspace = spaces[self._kinds[layer]]
            lse, pages = workspace.lse, page_parts(*self.pages[layer], shape.page_size)
            if shape.chooses and layer in self.choosing_layers:
                kept, lse = self._kept[layer]
                kept[: len(q)].copy_(q)
            workspace.launch(q, *pages, out, lse=lse, scores=scores, wide=shape.wide)
            if heads.sinks is not None:
                ops.share_sinks(out, lse, heads.sinks)
            return out

        return attend
