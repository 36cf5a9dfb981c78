"""Operations beside products and attention: a row's bits alone are its bits at any place of any
number of rows, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onestem.engine.sampling.rows import SamplingRow
from onestem.engine.sampling.sampler import Sampler
from onestem.models.description import LayerHeads, Rotary
from onestem.models.rope import Rope
from onestem.ops import Angles, Heads, add_layer_norm, allocate_pages
from onestem.ops.cpu import CpuDelta, CpuLayers, CpuSampling, is_built
from onestem.request import SamplingParams
from onestem.request.outputs import TokenLogprobs

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

ROWS = (1, 2, 3, 17, 64, 700)
WIDTHS = (96, 100, 1024)
OPS = CpuLayers(deterministic=True)

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def assert_by_row(function: Callable[..., Tensor], *all_rows: Tensor) -> None:
    """`function` of some rows gives each the bits that it has alone; single rows from both ends."""
    count = len(all_rows[0])
    alone = {
        row: function(*(x[row : row + 1].clone() for x in all_rows))
        for row in {*range(min(3, count)), *range(max(0, count - 3), count), count // 2}
    }
    for rows in (n for n in ROWS if n <= count):
        for first in {0, count - rows}:
            got = function(*(x[first : first + rows].clone() for x in all_rows))
            for row, want in alone.items():
                if first <= row < first + rows:
                    assert torch.equal(bits(got[row - first]), bits(want[0])), (rows, row)


def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "silu_mul": OPS.silu_mul,
        "gelu_mul": OPS.gelu_mul,
        "gelu_tanh": lambda x: OPS.gelu(x, "tanh"),
        "gelu": lambda x: OPS.gelu(x, "none"),
        "sigmoid": OPS.sigmoid,
        "softcap": lambda x: x.div_(6.0).tanh_().mul_(6.0),
        "log_softmax": lambda x: torch.log_softmax(x.float(), -1),
    }


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", activations())
def test_activations(name, width, dtype):
    assert_by_row(activations()[name], drawn(max(ROWS), width, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width, dtype):
    x, weight = drawn(max(ROWS), width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
    delta = drawn(max(ROWS), width, dtype=dtype, seed=2)
    assert_by_row(lambda x, delta: OPS.add_rms_norm(x, delta, weight, 1e-6), x, delta)
    assert_by_row(lambda x: OPS.add_rms_norm(x, None, weight.float(), 1e-6), x)
    assert_by_row(lambda x, delta: add_layer_norm(x, delta, weight, weight, 1e-5), x, delta)


@every_dtype
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("heads", [5, 48])
def test_gates_of_delta_rules(heads, part, dtype):
    rates, steps = drawn(heads), drawn(heads, seed=1)
    both = drawn(max(ROWS), 2 * heads, dtype=dtype, seed=2)
    assert_by_row(lambda both: CpuDelta().gates(*both.split(heads, 1), rates, steps)[part], both)


@every_dtype
def test_sinks(dtype):
    sinks = drawn(5)

    def shared(out: Tensor, lse: Tensor) -> Tensor:
        OPS.share_sinks(out, lse, sinks)
        return out

    assert_by_row(shared, drawn(max(ROWS), 5, 16, dtype=dtype), drawn(max(ROWS), 5, seed=1))


class Described:
    """What `Rope` reads of a configuration."""

    def __init__(self, head_dim: int) -> None:
        self.heads = [LayerHeads(num_kv_heads=2, head_dim=head_dim)]
        self.rotaries = [Rotary(dim=head_dim, theta=1e4)]
        self.max_position_embeddings = 1 << 20


@every_dtype
@pytest.mark.parametrize("head_dim", [12, 64, 80])
def test_rotation(head_dim, dtype):
    """Angles, norms over heads, q, and what is written."""
    rope, norm = Rope(Described(head_dim), torch.device("cpu")), drawn(head_dim, seed=3).to(dtype)
    heads = Heads(3, 2, head_dim, q_norm=norm, k_norm=norm)
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 20, max(ROWS)))

    def angles(at: Tensor) -> Tensor:
        return torch.cat(rope.angles(at)[0], 1)

    def rotated(qkv: Tensor, at: Tensor) -> Tensor:
        pages = [
            allocate_pages(len(at), 1, 2, head_dim, dtype=dtype, device=at.device) for _ in range(2)
        ]
        turned = Angles(*(x.clone() for x in rope.angles(at)[0]))
        q = OPS.rope_write(qkv, heads, turned, torch.arange(len(at)), *pages)
        return torch.cat([q, *(x[:, 0] for x in pages)], 1)

    assert_by_row(angles, positions)
    assert_by_row(rotated, drawn(max(ROWS), 7 * head_dim, dtype=dtype), positions)


@pytest.mark.parametrize("vocab", [100, 1031])
def test_sums_of_logits_and_the_leading_ones(vocab):
    ops, logits = CpuSampling(), drawn(max(ROWS), vocab)
    assert_by_row(lambda x: ops.log_sums(x, torch.arange(len(x)))[:, None], logits)
    assert_by_row(lambda x: ops.leading(x, torch.arange(len(x)), 5)[0], logits)


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -1.0},
    {"repetition_penalty": 1.3},
    {"logit_bias": {40: 5.0, 41: -100.0}},
    {"min_tokens": 9, "stop_token_ids": [4]},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("vocab", [100, 1031])
def test_every_filter(vocab, mode):
    """Tokens and log-probabilities, some rows under a grammar's mask."""
    rng, logits = np.random.default_rng(0), drawn(60, vocab)
    words = -(-vocab // 32)
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (60, words)).astype(np.int32))

    def row(number: int) -> SamplingRow:
        settings = {"temperature": 1.0, **KINDS[number % len(KINDS)]}
        made = SamplingRow(
            SamplingParams(logprobs=3, max_tokens=99, **settings),
            seed=number,
            prompt_token_ids=tuple(range(number, number + 7)),
            token_index=3,
            output_token_ids=lambda: [number, 8, 8],
            stop_ids=[4, 5],
        )
        if number % 4 == 0:
            made.allowed_mask = masks[number]
        return made

    def sampled(numbers: list[int]) -> list[tuple[int, TokenLogprobs]]:
        sampler = Sampler(vocab, logprobs_mode=mode)
        found = sampler.sample(logits[numbers].clone(), [row(number) for number in numbers])
        assert not found.status.any()
        return [(int(token), found.entries[place]) for place, token in enumerate(found.ids)]

    alone = [sampled([number])[0] for number in range(60)]
    for count in (2, 7, 60):
        for _ in range(3):
            numbers = rng.permutation(60)[:count].tolist()
            assert sampled(numbers) == [alone[number] for number in numbers]


@every_dtype
@pytest.mark.parametrize("kind", ["tanh", "none"])
def test_gelu_and_sigmoid_are_exact_but_for_rounding(kind, dtype):
    """One rounding of the result, and three of float32 below 1 before x multiplies."""
    x = drawn(50, 100, dtype=dtype)
    half, small = torch.finfo(dtype).eps / 2, 3 * torch.finfo(torch.float32).eps
    want = F.gelu(x.double(), approximate=kind)
    allowed = half * want.abs() + small * x.abs().double()
    assert bool(((OPS.gelu(x, kind).double() - want).abs() <= allowed).all())
    logits = x.float()
    want = torch.sigmoid(logits.double())
    assert bool(((OPS.sigmoid(logits).double() - want).abs() <= small).all())
