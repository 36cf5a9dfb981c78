"""Operations of layers with a gated delta rule, against the recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.ops import DeltaOps, PartRows, StateRows
from onestem.ops.cpu import CpuDelta
from onestem.ops.state_rows import CHUNK, FEW_ROWS
from onestem.ops.triton.delta import TritonDelta
from tests.ops.cpu_isas import EVERY_ISA
from tests.ops.reference_delta import reference_conv, reference_rule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(2, 4, 16, 32), (1, 3, 32, 16), (2, 2, 128, 128)]  # key heads, value heads, dk, dv


class There:
    """Operations on a device, of tensors on the CPU: states are written in place here too."""

    def __init__(self, ops: Any, device: str) -> None:
        self._ops, self._device = ops, torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._ops, name))

    def _call(self, operation: Any, *args: Any) -> Any:
        moved = [self._moved(x) for x in args]
        result = operation(*moved)
        for x, there in zip(args, moved, strict=True):
            if isinstance(x, Tensor) and there is not x:
                x.copy_(there)
        return result.cpu() if isinstance(result, Tensor) else tuple(x.cpu() for x in result)

    def _moved(self, x: Any) -> Any:
        if isinstance(x, StateRows):
            return PartRows.of(x, self._device)
        if isinstance(x, PartRows):
            return PartRows.decodes(x.parts.to(self._device))
        return x.to(self._device) if isinstance(x, Tensor) else x


GPU = "cuda" if torch.cuda.is_available() else "cpu"
OPS = {
    "torch": There(DeltaOps(), GPU),
    "triton": There(TritonDelta(), GPU),
    "triton by row": There(TritonDelta(deterministic=True), GPU),
    **{str(isa): There(isa.delta(), "cpu") for isa in EVERY_ISA},
}
every_ops = pytest.mark.parametrize("name", OPS)
SLOW = ("triton by row",) if GPU == "cpu" else ()  # row by row, and interpreted
by_row = pytest.mark.parametrize("name", [name for name in OPS if name not in ("torch", "triton")])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows_of(*parts: tuple[int, int, int, int]) -> StateRows:
    """Parts (rows, position, source, target) one after the other."""
    count, position, source, target = np.array(parts, np.int32).reshape(-1, 4).T
    return StateRows(np.cumsum(count, dtype=np.int32) - count, count, position, source, target)


# A decode, padding, a prompt from its beginning, forks of one state in and across chunks, a part of
# few rows, one that fills its chunks, and one that begins with a chunk's last row.
MIXED = rows_of(
    (1, 700, 0, 0),
    (0, 0, -1, -1),
    (70, 0, -1, 3),
    (1, 64, 1, 2),
    (FEW_ROWS + 1, 64, 1, 4),
    (130, 37, 1, 5),
    (3, 63, 6, 6),
    (2 * CHUNK, 128, 7, 7),
    (70, 63, 8, 8),
)
DECODES = rows_of((1, 700, 0, 0), (1, 64, 1, 2), (1, 0, -1, 3), (0, 0, -1, -1), (1, 9, 4, 4))
SLOTS = 10


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Inputs:
    """Arguments of `delta_rule`; q, k and v are parts of one row, as a convolution gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @staticmethod
    def drawn(rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
        key_heads, heads, dk, dv = sizes
        qkv = drawn(rows, 2 * key_heads * dk + heads * dv, dtype=dtype)
        q, k, v = qkv.split((key_heads * dk, key_heads * dk, heads * dv), 1)
        decay = -drawn(rows, heads, seed=1).exp() * 0.3
        beta = drawn(rows, heads, seed=2).sigmoid()
        views = q.unflatten(1, (-1, dk)), k.unflatten(1, (-1, dk)), v.unflatten(1, (-1, dv))
        return Inputs(*views, decay, beta)

    def part(self, begin: int, end: int) -> Inputs:
        return Inputs(*(x[begin:end] for x in vars(self).values()))

    def all(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def assert_near(
    got: Tensor, exact: Tensor, factors: torch.dtype = torch.float32, decays: int = 0
) -> None:
    """Off by one rounding to its own type, and by what some products in a row differ: of the
    largest value 16 units of float32, or 2 of factors that are rounded to fewer bits. Besides by
    half a unit for each of `decays` factors, which are rounded one by one."""
    assert got.shape == exact.shape
    unit = (16 if factors == torch.float32 else 2) * torch.finfo(factors).eps
    unit += decays * torch.finfo(torch.float32).eps / 2
    allowed = exact.abs() * torch.finfo(got.dtype).eps + unit * float(exact.abs().max())
    assert bool(((got.double() - exact).abs() <= allowed).all())


def run(name: str, inputs: Inputs, states: Tensor, rows: StateRows) -> Tensor:
    return OPS[name].delta_rule(*inputs.all(), states, rows)


@every_ops
@every_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_delta_rule(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    if name == "triton" and dtype == torch.bfloat16 and GPU == "cpu":
        pytest.skip("Triton's interpreter has no products of bfloat16")
    if name in SLOW and (sizes, dtype) != (SIZES[1], DTYPES[1]):
        pytest.skip("Triton's interpreter takes up to a minute")
    inputs = Inputs.drawn(int(MIXED.count.sum()), sizes, dtype)
    states = drawn(SLOTS, sizes[1], sizes[2], sizes[3], seed=3)
    MIXED.check(len(inputs.q), SLOTS)
    exact, after = reference_rule(*inputs.all(), states, MIXED)
    before = states.clone()
    got = run(name, inputs, states, MIXED)
    assert got.dtype == dtype
    factors = dtype if name == "triton" else torch.float32
    assert_near(got, exact, factors)
    written = MIXED.target[MIXED.count > 0]
    assert_near(states[written], after[written], factors)
    kept = np.setdiff1d(np.arange(SLOTS), written)
    assert torch.equal(states[kept], before[kept])


@every_ops
@pytest.mark.parametrize("cuts", [(64, 128), (1, 2, 3), (63, 65), (30, 40, 139), (100,)], ids=str)
def test_a_prompt_may_be_cut_anywhere(name: str, cuts: tuple[int, ...]) -> None:
    sizes = (1, 2, 32, 16)
    inputs, states = Inputs.drawn(140, sizes, torch.float32), torch.zeros(1, 2, 32, 16)
    exact, after = reference_rule(*inputs.all(), states, rows_of((140, 0, -1, 0)))
    ends = (*cuts, 140)
    pieces = []
    for begin, end in zip((0, *ends), ends, strict=False):
        rows = rows_of((end - begin, begin, 0 if begin else -1, 0))
        pieces.append(run(name, inputs.part(begin, end), states, rows))
    assert_near(torch.cat(pieces), exact)
    assert_near(states, after)


@every_ops
def test_cuts_between_chunks_change_no_bit(name: str) -> None:
    """Chunks count from position 0, so the same ones are computed."""
    inputs = Inputs.drawn(3 * CHUNK, (1, 2, 32, 16), torch.float32)
    whole, cut = torch.zeros(2, 1, 2, 32, 16)
    want = run(name, inputs, whole, rows_of((3 * CHUNK, 0, -1, 0)))
    pieces = [
        run(name, inputs.part(0, CHUNK), cut, rows_of((CHUNK, 0, -1, 0))),
        run(name, inputs.part(CHUNK, 3 * CHUNK), cut, rows_of((2 * CHUNK, CHUNK, 0, 0))),
    ]
    assert torch.equal(torch.cat(pieces), want)
    assert torch.equal(cut, whole)


@by_row
@every_dtype
@pytest.mark.parametrize("sizes", [*SIZES, (1, 2, 24, 152)], ids=str)
def test_cuts_change_no_bit_by_row(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    """Nor do neighbours: each piece comes behind another number of another sequence's rows."""
    if "triton" in name and GPU == "cpu" and (sizes != SIZES[0] or dtype != torch.float16):
        pytest.skip("Triton's interpreter takes seconds")
    total, (key_heads, heads, dk, dv) = 100, sizes
    inputs, channels = Inputs.drawn(total, sizes, dtype), 2 * key_heads * dk + heads * dv
    x, weight = drawn(total, channels, dtype=dtype, seed=5), drawn(channels, 4, dtype=dtype)
    a, b = drawn(total, 2 * heads, dtype=dtype, seed=7).split(heads, 1)
    rates, norm = (drawn(heads, seed=8), drawn(heads, seed=9)), drawn(dv)
    found = []
    row_by_row = () if name in SLOW or sizes != SIZES[0] else (tuple(range(1, total)),)
    some = (1, 21, 64) if name in SLOW else (1, 2, 3, 4, 21, 22, 24, 40, 56, 64, 99)
    for cuts in ((), some, *row_by_row):
        states, before = drawn(2, heads, dk, dv, seed=3), drawn(2, 3, channels, dtype=dtype)
        pieces = []
        for begin, end in zip((0, *cuts), (*cuts, total), strict=True):
            beside, ops = (3 * begin + 1) % 30, OPS[name]
            rows = rows_of((beside, 7, -1, 0), (end - begin, begin, 1, 1))
            at = torch.cat((torch.arange(beside), torch.arange(begin, end)))
            there = [one[at] for one in inputs.all()]
            out = ops.delta_rule(*there, states, rows)
            found_there = (
                out,
                ops.causal_conv(x[at], weight, before, rows),
                *ops.gates(a[at], b[at], *rates),
                ops.gated_norm(out, norm, there[2], 1e-6),
            )
            pieces.append([one[beside:] for one in found_there])
        found.append([*map(torch.cat, zip(*pieces, strict=True)), states[1], before[1]])
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


@every_ops
@pytest.mark.parametrize("rows", [4, 70])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -50.0, -1e4])
def test_extreme_decays(name: str, rows: int, decay: float) -> None:
    """No infinity and no NaN where e^(sum of decays) vanishes; nothing is lost without decay."""
    inputs = Inputs.drawn(rows, (1, 2, 32, 16), torch.float32)
    inputs.decay.fill_(decay)
    inputs.beta[:, 1] = 1.0
    states = drawn(1, 2, 32, 16, seed=3)
    exact, after = reference_rule(*inputs.all(), states, rows_of((rows, 5, 0, 0)))
    assert_near(run(name, inputs, states, rows_of((rows, 5, 0, 0))), exact, decays=rows)
    assert_near(states, after, decays=rows)


@every_ops
def test_keys_that_are_alike(name: str) -> None:
    """As of one token again and again: each row takes back most of what the one before it wrote."""
    inputs = Inputs.drawn(200, (1, 2, 32, 16), torch.float32)
    inputs.k.mul_(0.02).add_(inputs.k[:1].clone())
    inputs.decay.mul_(1e-3)
    inputs.beta.fill_(0.999)
    states = torch.zeros(1, 2, 32, 16)
    exact, after = reference_rule(*inputs.all(), states, rows_of((200, 0, -1, 0)))
    assert_near(run(name, inputs, states, rows_of((200, 0, -1, 0))), exact)
    assert_near(states, after)


@every_ops
def test_a_table_may_be_filled_again(name: str) -> None:
    """As between replays of a graph: fewer parts leave padding, whose slots are not touched."""
    inputs, states = Inputs.drawn(3, (1, 2, 32, 16), torch.float32), drawn(4, 2, 32, 16, seed=3)
    rows = PartRows.decodes(torch.zeros(3, 5, dtype=torch.int32))
    for parts in ([(1, 7, 2, 2), (1, 9, 0, 1)], [(1, 8, 2, 2), (1, 10, 1, 1), (1, 0, -1, 3)]):
        step = rows_of(*parts)
        rows.parts.zero_()[: len(parts)] = torch.from_numpy(step.table())
        exact, after = reference_rule(*inputs.all(), states, step)
        assert_near(OPS[name].delta_rule(*inputs.all(), states, rows), exact)
        assert_near(states, after)


def test_layers_take_the_same_memory() -> None:
    """Of a table with padding, whose results stay zeros; of another, memory of their own."""
    rows = PartRows.decodes(torch.from_numpy(rows_of((1, 7, 2, 2), (0, 0, -1, -1)).table()))
    first, second = (rows.memory(torch.empty(2, 4)) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    assert not first.any()
    assert rows.memory(torch.empty(2, 4, dtype=torch.float16)).dtype == torch.float16
    known = PartRows.of(rows_of((2, 7, 2, 2)), torch.device("cpu"))
    one, other = (known.memory(torch.empty(2, 4)) for _ in range(2))
    assert one.data_ptr() != other.data_ptr()


@every_ops
@every_dtype
@pytest.mark.parametrize(("channels", "width"), [(7, 4), (96, 4), (20, 3)])
@pytest.mark.parametrize("step", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_causal_conv(
    name: str, dtype: torch.dtype, channels: int, width: int, step: StateRows
) -> None:
    rows = int(step.count.sum())
    x = drawn(rows, channels + 5, dtype=dtype)[:, :channels]
    weight = drawn(channels, width, dtype=dtype, seed=1)
    states = drawn(SLOTS, width - 1, channels, dtype=dtype, seed=2)
    exact, after = reference_conv(x, weight, states, step)
    got = OPS[name].causal_conv(x, weight, states, step)
    assert got.dtype == dtype
    assert_near(got, exact)
    assert torch.equal(states.double(), after)


@every_ops
@every_dtype
def test_gates_and_norm(name: str, dtype: torch.dtype) -> None:
    a, b = drawn(5, 13, dtype=dtype).split((6, 7), 1)
    b = b[:, :6]
    a_log, dt_bias = drawn(6, seed=1), drawn(6, seed=2)
    decay, beta = OPS[name].gates(a, b, a_log, dt_bias)
    assert decay.dtype == beta.dtype == torch.float32
    assert_near(decay, -a_log.double().exp() * (1 + (a.double() + dt_bias).exp()).log())
    assert_near(beta, 1 / (1 + (-b.double()).exp()))
    x, z = drawn(5, 6, 24, dtype=dtype, seed=3), drawn(5, 200, dtype=dtype, seed=4)[:, :144]
    z = z.unflatten(1, (6, 24))
    for weight in (drawn(24, dtype=dtype, seed=5), drawn(24, seed=5)):
        wide, gate = x.double(), z.double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = OPS[name].gated_norm(x, weight, z, 1e-5)
        assert got.dtype == dtype
        assert_near(got, exact * gate / (1 + (-gate).exp()))


def test_chunks_count_from_position_0() -> None:
    chunks, scans = MIXED.chunks()
    assert scans.tolist() == [[2, 0, 2], [4, 2, 1], [5, 3, 3], [7, 6, 2], [8, 8, 3]]
    part, row = (
        [2, 2, 4, 5, 5, 5, 7, 7, 8, 8, 8],
        [1, 65, 72, 44, 108, 172, 214, 278, 279, 343, 407],
    )
    assert chunks.T.tolist() == [part, row]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(2, 0, -1, 0), (1, 0, -1, 0)], "two parts write one slot"),
        ([(2, 0, 0, 0), (1, 0, 0, 1)], "reads a slot that another one writes"),
        ([(2, 0, 0, 4)], "a slot is not among 4"),
        ([(11, 0, -1, 0)], "rows overlap or leave 10"),
    ],
)
def test_wrong_rows_are_refused(parts: list[tuple[int, int, int, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(*parts).check(10, 4)


@pytest.mark.skipif(not EVERY_ISA, reason="the C++ extension is not built")
def test_threads_change_no_bit() -> None:
    inputs = Inputs.drawn(int(MIXED.count.sum()), SIZES[-1], torch.bfloat16)
    x, weight = drawn(len(inputs.q), 150), drawn(150, 4, seed=1)
    ops, found = CpuDelta(), []
    for threads in (1, 2, 3):
        states, before = drawn(SLOTS, 2, 128, 128, seed=3), drawn(SLOTS, 3, 150, seed=2)
        rows, torch_threads = PartRows.of(MIXED, torch.device("cpu")), torch.get_num_threads()
        torch.set_num_threads(threads)
        out = ops.delta_rule(*inputs.all(), states, rows), ops.causal_conv(x, weight, before, rows)
        torch.set_num_threads(torch_threads)
        found.append((*out, states, before))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@every_ops
@pytest.mark.parametrize("count", [1, 20])
def test_rows_in_no_part_are_zeros(name: str, count: int) -> None:
    inputs, states = Inputs.drawn(30, (1, 2, 32, 16), torch.float32), drawn(1, 2, 32, 16)
    x, before = drawn(30, 8), drawn(1, 3, 8)
    rows = rows_of((count, 0, 0, 0))
    for got in (
        run(name, inputs, states, rows),
        OPS[name].causal_conv(x, drawn(8, 4), before, rows),
    ):
        assert not got[count:].any()
        assert got[:count].any(-1).all()


@every_ops
def test_wrong_shapes_are_refused(name: str) -> None:
    ops, rows = OPS[name], rows_of((4, 0, -1, 0))
    inputs = Inputs.drawn(4, (2, 4, 16, 32), torch.float32)
    states = drawn(2, 4, 16, 32)
    with pytest.raises(ConfigError, match="states are torch"):
        ops.delta_rule(*inputs.all(), states.bfloat16(), rows)
    with pytest.raises(ConfigError, match="a multiple of their heads"):
        ops.delta_rule(*inputs.all()[:2], drawn(4, 3, 32), *inputs.all()[3:], states, rows)
    with pytest.raises(ConfigError, match=r"expected torch.float32 \(2, 3, 8\)"):
        ops.causal_conv(drawn(4, 8), drawn(8, 4), drawn(2, 3, 9), rows)


@pytest.mark.parametrize("rows", [5, 200])
def test_agrees_with_transformers(rows: int) -> None:
    """Its chunked and its recurrent form, which the models' authors' weights are used with."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = Inputs.drawn(rows, (2, 4, 32, 16), torch.float32)
    states = drawn(1, 4, 32, 16, seed=3)
    before = states.clone()
    got = run("torch", inputs, states, rows_of((rows, 0, 0, 0)))
    for form in (module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule):
        q, k, v, decay, beta = (x[None] for x in inputs.all())
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        want, after = form(q, k, v, g=decay, beta=beta, initial_state=before, **flags)
        assert_near(got, want[0].double())
        assert_near(states, after.double())


@every_ops
def test_nothing_to_do(name: str) -> None:
    states = drawn(2, 4, 16, 32)
    inputs, before = Inputs.drawn(0, (2, 4, 16, 32), torch.float32), states.clone()
    assert run(name, inputs, states, rows_of()).shape == (0, 4, 32)
    assert torch.equal(states, before)


@pytest.mark.skipif(GPU == "cpu", reason="needs a GPU")
def test_in_a_graph() -> None:
    """Replays take what their tables hold by then."""
    ops, sizes = TritonDelta(), (2, 4, 128, 128)
    inputs = [x.cuda() for x in Inputs.drawn(3, sizes, torch.bfloat16).all()]
    states = drawn(4, 4, 128, 128).cuda()
    rows = PartRows.decodes(torch.zeros(3, 5, dtype=torch.int32, device="cuda"))
    ops.delta_rule(*inputs, states, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.delta_rule(*inputs, states, PartRows.decodes(rows.parts))
    for parts in ([(1, 7, 2, 2), (1, 9, 0, 1)], [(1, 8, 2, 2), (1, 10, 1, 1), (1, 0, -1, 3)]):
        step, before = rows_of(*parts), states.clone()
        rows.parts.zero_()[: len(parts)] = torch.from_numpy(step.table()).cuda()
        graph.replay()
        want = ops.delta_rule(*inputs, before, PartRows.of(step, torch.device("cuda")))
        assert torch.equal(out, want)
        assert torch.equal(states, before)
