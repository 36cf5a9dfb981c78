"""Deterministic attention: a row's bits depend on what it sees, whatever else the plan holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from onestem.ops import (
    AttentionImpl,
    AttentionPlan,
    PlanBuilder,
    Scores,
    State,
    allocate_pages,
    windowed,
)
from onestem.ops.cpu import is_built
from onestem.ops.reference import ReferenceAttention
from onestem.ops.triton import TritonAttention
from onestem.ops.work import grid, lists
from tests.ops.cpu_isas import EVERY_ISA, Isa
from tests.ops.in_order import add_in_order
from tests.ops.test_attention import assert_matches
from tests.ops.test_cpu_attention import COSTS, DTYPES, isas_with
from tests.soak import soaked

needs_extension = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
HAS_GPU = torch.cuda.is_available()


@dataclass
class Text:
    """A sequence: its keys, values and queries, position by position, and what it shares: stretches
    by name, each with its end. Those of one name are the same in all texts."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    shared: dict[str, int]


@dataclass(frozen=True)
class Run:
    """A run of a plan, and the positions of its tokens."""

    index: int
    begin: int
    end: int


def texts_of(
    rng: np.random.Generator,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[Text]:
    """A forest of two trees, of two levels."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    texts = []
    for family in range(2):
        root = draw(2, int(rng.choice([0, 1, 127, 128, 200, 256, 300, 511, 640])), kv_heads, dim)
        branch = draw(2, int(rng.choice([1, 50, 300])), kv_heads, dim)
        for _ in range(int(rng.integers(1, 6))):
            own = draw(2, int(rng.choice([1, 2, 9, 60, 130, 257])), kv_heads, dim)
            parts, shared = [root], {f"root {family}": root.shape[1]}
            if rng.random() < 0.6:
                parts.append(branch)
                shared[f"branch {family}"] = root.shape[1] + branch.shape[1]
            keys, values = torch.cat([*parts, own], dim=1)
            texts.append(Text(keys, values, draw(len(keys), kv_heads * group, dim), shared))
    return texts


class Pages:
    """Pages in random order, slots of no run NaN, and the builder of a plan over them."""

    def __init__(self, rng: np.random.Generator, like: Tensor) -> None:
        self.rng = rng
        page_size = int(rng.choice([1, 5, 16, 64]))
        shape = 12000 // page_size, page_size, like.shape[1], like.shape[2]
        major = bool(rng.integers(2))
        self.keys, self.values = (
            allocate_pages(*shape, dtype=like.dtype, device=like.device, head_major=major).fill_(
                math.nan
            )
            for _ in "kv"
        )
        self.builder = PlanBuilder(page_size)
        self._free = rng.permutation(shape[0]).astype(np.int32)

    def run(self, text: Text, begin: int, end: int) -> Run:
        """A run of the text's tokens at these positions."""
        page_size = self.keys.shape[1]
        offset = int(self.rng.integers(page_size))
        index = np.arange(offset, offset + end - begin)
        pages, self._free = np.split(self._free, [index[-1] // page_size + 1])
        where = tuple(
            torch.from_numpy(part.astype(np.int64)).to(self.keys.device)
            for part in (pages[index // page_size], index % page_size)
        )
        self.keys[where], self.values[where] = text.keys[begin:end], text.values[begin:end]
        return Run(self.builder.add_run(pages, offset, end - begin, begin), begin, end)

    def runs(self, text: Text, begin: int, end: int, cuts: list[int]) -> list[Run]:
        """The same, cut at some of the positions `cuts`."""
        bounds = [begin, *sorted({cut for cut in cuts if begin < cut < end}), end]
        return [self.run(text, a, b) for a, b in itertools.pairwise(bounds) if a < b]

    def show(self, row: int, chunk: range, run: Run) -> None:
        """Show rows from `row` on, at a chunk's positions, what they may see of a run."""
        growing = range(max(chunk.start, run.begin), min(chunk.stop, run.end - 1))
        if growing:
            at, seen = row + growing.start - chunk.start, growing.start + 1 - run.begin
            self.builder.add_span(at, len(growing), run.index, seen, step=1)
        whole = max(chunk.start, run.end - 1)
        if whole < chunk.stop:
            at = row + whole - chunk.start
            self.builder.add_span(at, chunk.stop - whole, run.index, run.end - run.begin)

    def attend(
        self, attention: AttentionImpl, plan: AttentionPlan, q: Tensor, scores: Scores, share: bool
    ) -> State:
        return attention.prepare(plan, share=share).attend(q, self.keys, self.values, scores)


def together(
    rng: np.random.Generator, texts: list[Text], chunks: list[range]
) -> tuple[Pages, AttentionPlan]:
    """Rows of all texts in one plan, chunks and decodes; what they share stands in runs that are
    cut anywhere."""
    pages = Pages(rng, texts[0].keys)
    cuts = rng.integers(1, 900, size=int(rng.integers(0, 6))).tolist()
    shared: dict[str, list[Run]] = {}
    positions: list[int] = []
    for text, chunk in zip(texts, chunks, strict=True):
        begin, seen = 0, []
        for name, end in text.shared.items():
            if name not in shared:
                shared[name] = pages.runs(text, begin, end, cuts)
            seen += shared[name]
            begin = end
        # A chunk's rows are written to one run.
        seen += pages.runs(text, begin, max(begin, chunk.start), cuts)
        seen += pages.runs(text, max(begin, chunk.start), chunk.stop, [])
        for run in seen:
            pages.show(len(positions), chunk, run)
        positions.extend(chunk)
    return pages, pages.builder.build(np.array(positions))


def alone(rng: np.random.Generator, text: Text, position: int) -> tuple[Pages, AttentionPlan]:
    """One row over one run."""
    pages = Pages(rng, text.keys)
    pages.show(0, range(position, position + 1), pages.run(text, 0, position + 1))
    return pages, pages.builder.build(np.array([position]))


def chunk_of(rng: np.random.Generator, text: Text) -> range:
    stop = len(text.keys)
    if rng.random() < 0.5:
        return range(stop - 1, stop)
    stop = int(rng.integers(1, stop + 1))
    return range(max(0, stop - int(rng.choice([2, 7, 40, 300]))), stop)


def different_rows(
    rng: np.random.Generator,
    isa: Isa | OnTriton,
    dtype: torch.dtype,
    grid: bool = True,
    device: str = "cpu",
) -> int:
    """Rows of a random plan whose bits are others than alone, of those that are compared."""
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 3, 4, 8]))
    texts = texts_of(rng, kv_heads, group, int(rng.choice([8, 64, 72])), dtype, device)
    chunks = [chunk_of(rng, text) for text in texts]
    pages, plan = together(rng, texts, chunks)
    window = [None, 1, 100, 300][int(rng.integers(4))]
    slopes = torch.rand(kv_heads * group, device=device) if rng.random() < 0.2 else None
    scores = Scores(softcap=20.0 if rng.random() < 0.2 else None, alibi_slopes=slopes)
    cost = [None, COSTS["share all, cut"]][int(rng.integers(2))]
    attention, plainly = (isa.attention(one, deterministic=grid) for one in (cost, None))
    q = torch.cat(
        [text.queries[chunk.start : chunk.stop] for text, chunk in zip(texts, chunks, strict=True)]
    )
    plan = windowed(plan, window)
    state = pages.attend(attention, plan, q, scores, share=bool(rng.random() < 0.8))
    close = pages.attend(ReferenceAttention(), plan, q, scores, share=True)
    assert_matches(state, close, dtype)
    different = row = 0
    for text, chunk in zip(texts, chunks, strict=True):
        for position in {chunk[0], chunk[-1], int(rng.choice(chunk))}:
            at = row + position - chunk[0]
            pages, plan = alone(rng, text, position)
            plan = windowed(plan, window)
            one = pages.attend(plainly, plan, q[at : at + 1], scores, share=True)
            same = torch.equal(one.out[0], state.out[at]) and torch.equal(one.lse[0], state.lse[at])
            different += not same
        row += len(chunk)
    return different


@dataclass(frozen=True)
class OnTriton:
    """The kernels of a GPU, which may have been changed."""

    def attention(self, cost: object = None, deterministic: bool = False) -> AttentionImpl:
        return TritonAttention(deterministic=deterministic)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """More threads than one, so that long walks are cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_extension
@pytest.mark.parametrize(
    ("isa", "dtype"),
    [(isa, dtype) for dtype in DTYPES for isa in isas_with(dtype)] if is_built() else [],
    ids=str,
)
@pytest.mark.parametrize("seeds", [range(2), soaked(range(2, 12))], ids=str)
def test_rows_have_the_same_bits_in_any_plan(isa: Isa, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        assert different_rows(np.random.default_rng(seed), isa, dtype) == 0, seed


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_grid_bits_differ(dtype: torch.dtype) -> None:
    isa = EVERY_ISA[0]
    assert sum(different_rows(np.random.default_rng(s), isa, dtype, grid=False) for s in range(6))


@pytest.fixture
def fixed_order(monkeypatch) -> None:
    add_in_order(monkeypatch)


def on_triton(seeds: Iterable[int], dtype: torch.dtype) -> int:
    device = "cuda" if HAS_GPU else "cpu"
    return sum(
        different_rows(np.random.default_rng(seed), OnTriton(), dtype, device=device)
        for seed in seeds
    )


# The interpreter is slow, and does not multiply bfloat16. Of these plans some have windows.
PLANS = {dtype: range(40) if HAS_GPU else (7, 0) for dtype in DTYPES}


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("dtype", DTYPES if HAS_GPU else (torch.float32, torch.float16), ids=str)
def test_rows_have_the_same_bits_in_any_plan_on_triton(dtype: torch.dtype) -> None:
    assert on_triton(PLANS[dtype], dtype) == 0


@pytest.mark.usefixtures("fixed_order")
def test_rows_that_part_inside_a_segment_go_on_from_its_states() -> None:
    """A segment ends at 384, tiles every 64 positions: rows share one tile behind 256. On a GPU
    they have items of two tiles, of 32 rows and of 13."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    root, texts = draw(2, 330, 1, 64), []
    for own in (1, 9, 20, 60, 70) * (9 if HAS_GPU else 1):
        keys, values = torch.cat([root, draw(2, own, 1, 64)], dim=1)
        texts.append(Text(keys, values, draw(len(keys), 4, 64), {"root": 330}))
    chunks = [range(len(text.keys) - 1, len(text.keys)) for text in texts]
    pages, plan = together(rng, texts, chunks)
    attention = TritonAttention(deterministic=True)
    q = torch.cat([text.queries[-1:] for text in texts])
    state = pages.attend(attention, plan, q, Scores(), share=True)
    for row, text in enumerate(texts):
        pages, plan = alone(rng, text, len(text.keys) - 1)
        one = pages.attend(attention, plan, q[row : row + 1], Scores(), share=True)
        assert torch.equal(one.out[0], state.out[row])
        assert torch.equal(one.lse[0], state.lse[row])


def last_first(keys: np.ndarray) -> np.ndarray:
    """An order of keys, equal ones reversed."""
    return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("mutation", ["out of order", "inside segments"])
def test_mutations_on_triton_are_found(monkeypatch, mutation: str) -> None:
    """States folded in another order; items that begin and end inside segments."""
    if mutation == "out of order":
        monkeypatch.setattr(lists, "argsort", last_first)
    else:
        monkeypatch.setattr(grid, "segment_of", lambda position: position // 64)
        monkeypatch.setattr(grid, "segment_start", lambda number: number * 64)
    assert any(on_triton((seed,), torch.float32) for seed in (0, 2))
