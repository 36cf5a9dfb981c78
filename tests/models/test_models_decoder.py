"""The decoder against transformers' models, over the whole vocabulary at every position."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onestem.engine.step.runner import Runner
from onestem.models import linear
from onestem.models.decoder import Decoder, Layer
from onestem.models.description import Alibi, Learned, Rotary
from onestem.models.formats.products import Target
from onestem.models.mlp import ExpertLayer, SortedBlocks
from onestem.models.rope import Rope
from onestem.models.sizes import weight_bytes
from onestem.models.tensors import Tensors
from onestem.models.weights import load_decoder
from onestem.ops import Heads, resolve
from onestem.ops.layers import rotated
from onestem.ops.triton.experts import GroupedExperts
from onestem.ops.triton.tiled_experts import TiledExperts
from tests.models.dense import (
    Triple,
    dense_attend,
    fresh_states,
    log_probabilities,
    oracle,
    prompt,
)
from tests.models.tiny import SENSITIVITY, make_tiny

LENGTH = 90
PIECE = 32


def test_log_probabilities_equal_transformers(directory: Path, decoder: Decoder) -> None:
    ids = prompt(LENGTH, decoder.config.vocab_size)
    expected = oracle(directory, ids)
    found = log_probabilities(decoder, ids)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_an_mlp_in_pieces_equals_transformers(
    directory: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        linear.Linear, "pieces", lambda _, x: sizes.append(len(x)) or x.split(PIECE)
    )
    test_log_probabilities_equal_transformers(directory, decoder)
    assert max(sizes) > PIECE


def test_only_rows_that_are_read_go_through_the_last_layer_s_end(
    directory: Path, decoder: Decoder
) -> None:
    ids = prompt(LENGTH, decoder.config.vocab_size)
    positions, read = torch.arange(LENGTH), torch.tensor([2, 40, LENGTH - 1])
    attend = dense_attend(decoder.config, positions)
    hidden = decoder.forward(ids, positions, attend, read, fresh_states(decoder, 1, LENGTH))
    found = torch.log_softmax(decoder.logits(hidden), -1)
    torch.testing.assert_close(found, oracle(directory, ids)[read], atol=1e-4, rtol=0)
    none = decoder.forward(ids, positions, attend, read[:0], fresh_states(decoder, 1, LENGTH))
    assert none.shape == (0, decoder.config.hidden_size)


def test_far_positions_equal_transformers(llama: Path, tmp_path: Path) -> None:
    """RoPE at the end of the model's range, for every kind of scaling; learned positions."""
    for family in ("llama", "llama_llama3_rope", "llama_linear_rope", "gpt2"):
        path = make_tiny(family, tmp_path / family)
        decoder = load_decoder(path, dtype=torch.float32, device="cpu")
        limit = decoder.config.max_position_embeddings
        ids = prompt(limit, decoder.config.vocab_size)
        expected = oracle(path, ids)[-20:]
        found = log_probabilities(decoder, ids)[0, -20:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "gpt_oss", "gemma4_moe"])
def test_a_gpu_s_experts_equal_transformers(
    family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels, under its interpreter where there is no GPU."""
    monkeypatch.setattr(Target, "has_kernels", True)
    decoder = load_decoder(tiny(family), dtype=torch.float32, device="cpu")
    experts = [one for layer in decoder.layers for one in _expert_layers(layer)]
    assert experts
    assert all(isinstance(one.products, GroupedExperts | TiledExperts) for one in experts)
    ids = prompt(12, decoder.config.vocab_size)
    found = log_probabilities(decoder, ids)[0]
    torch.testing.assert_close(found, oracle(tiny(family), ids), atol=1e-4, rtol=0)


def test_hiding_any_one_key_shows(decoder: Decoder) -> None:
    """What the tiny models are for: one key less, in one layer, moves the row's answer."""
    ids = prompt(LENGTH, decoder.config.vocab_size)
    plain = log_probabilities(decoder, ids)[0]
    triples = _triples(decoder, random.Random(0))
    for first in range(0, len(triples), 16):
        part = triples[first : first + 16]
        hidden = log_probabilities(decoder, ids, part)
        for copy, (layer, row, key) in enumerate(part):
            moved = (hidden[copy, row] - plain[row]).abs().max().item()
            assert moved > SENSITIVITY, (layer, row, key, moved)


def _triples(decoder: Decoder, chance: random.Random) -> list[Triple]:
    """Keys of the last row, its ends included, and of random rows; in every layer."""
    triples = []
    for layer, window in enumerate(decoder.config.sliding_windows):
        if decoder.config.has_state(layer):
            continue
        for row in [LENGTH - 1] * 32 + [chance.randrange(1, LENGTH) for _ in range(14)]:
            first = max(0, row + 1 - (window or LENGTH))
            triples.append((layer, row, chance.randint(first, row)))
        first = max(0, LENGTH - (window or LENGTH))
        triples += [(layer, LENGTH - 1, first), (layer, LENGTH - 1, LENGTH - 1)]
    return triples


def test_rows_may_come_in_any_order(decoder: Decoder) -> None:
    """Nothing in a layer looks across rows but attention, and the delta rule."""
    if decoder.config.delta is not None:
        return
    ids = prompt(40, decoder.config.vocab_size)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    attend = dense_attend(decoder.config, order)
    shuffled = decoder.logits(decoder.forward(ids[order], order, attend)).log_softmax(-1)
    plain = log_probabilities(decoder, ids)[0]
    torch.testing.assert_close(shuffled, plain[order], atol=1e-4, rtol=0)


def test_one_row_and_no_rows(llama: Path) -> None:
    decoder = load_decoder(llama, dtype=torch.float32, device="cpu")
    one = log_probabilities(decoder, torch.tensor([7]))
    torch.testing.assert_close(one[0], oracle(llama, torch.tensor([7])), atol=1e-4, rtol=0)
    empty = torch.zeros(0, dtype=torch.int64)
    states = decoder.forward(empty, empty, dense_attend(decoder.config, empty))
    assert decoder.logits(states).shape == (0, decoder.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [linear.Layout.PLAIN, linear.Layout.PACKED_FLOAT32])
def test_sixteen_bits_err_no_more_than_transformers(
    llama: Path,
    dtype: torch.dtype,
    layout: linear.Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Error against float32 at most 1.5 times that of the oracle in the same dtype."""
    monkeypatch.setattr("onestem.models.sizes.choose_layout", lambda *_, **__: layout)
    decoder = load_decoder(llama, dtype=dtype, device="cpu")
    assert decoder.dtype == dtype
    ids = prompt(LENGTH, decoder.config.vocab_size)
    exact = oracle(llama, ids)
    allowed = 1.5 * (oracle(llama, ids, dtype) - exact).square().mean()
    assert (log_probabilities(decoder, ids)[0] - exact).square().mean() <= allowed


@pytest.mark.parametrize(
    "family",
    [
        "falcon_40b", "falcon_rw", "mpt", "phi", "gpt2", "gemma2", "gemma3", "olmo2", "granite",
        "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "gemma4_moe", "gemma4_image",
    ],
)  # fmt: skip
def test_every_kind_of_block_in_sixteen_bits(family: str, tiny: Callable[[str], Path]) -> None:
    path = tiny(family)
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    ids = prompt(LENGTH, decoder.config.vocab_size)
    exact = oracle(path, ids)
    allowed = 1.5 * (oracle(path, ids, torch.bfloat16) - exact).square().mean()
    assert (log_probabilities(decoder, ids)[0] - exact).square().mean() <= allowed


# What a family does and others do not, and the same left out or done in another way.
MUTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "no clipping": ("mpt_clip", {"qkv_clip": None}),
    "gelu for its tanh form": ("gpt2", {"mlp": "gelu"}),
    "tanh form for gelu": ("falcon", {"mlp": "gelu_tanh"}),
    "MLP behind attention": ("falcon_40b", {"block": "sequential"}),
    "MLP beside attention": ("falcon_rw", {"block": "parallel_two_norms"}),
    "all of a head turned": ("phi", {"positions": Rotary(32)}),
    "nothing turned": ("phi", {"positions": Learned()}),
    "biases twice": ("falcon_rw", {"positions": Alibi((0.25, 0.0625, 2.0**-6, 2.0**-8))}),
    "biases of more heads": ("mpt_clip", {"positions": Alibi(Alibi.of_heads(8).slopes[:6])}),
    "another epsilon": ("gpt2", {"norm_eps": 1e-2}),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_a_family_does_shows(mutation: str, tmp_path: Path) -> None:
    """The check against transformers would fail without it."""
    family, changes = MUTATIONS[mutation]
    path = make_tiny(family, tmp_path)
    right = load_decoder(path, dtype=torch.float32, device="cpu")
    config = dataclasses.replace(right.config, **changes)
    parts = (right.embedding, right.layers, right.norm, right.head, right.num_parameters)
    wrong = Decoder(config, *parts, positions=right.positions)
    ids = prompt(LENGTH, config.vocab_size)
    assert (log_probabilities(wrong, ids)[0] - oracle(path, ids)).abs().max() > 2e-4


def test_learned_positions_count(tmp_path: Path) -> None:
    path = make_tiny("gpt2", tmp_path)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    decoder.positions = decoder.positions.roll(1, dims=0)
    ids = prompt(40, decoder.config.vocab_size)
    assert (log_probabilities(decoder, ids)[0] - oracle(path, ids)).abs().max() > SENSITIVITY


def test_logits_are_float32_in_every_dtype(llama: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoder = load_decoder(llama, dtype=dtype, device="cpu")
        assert decoder.logits(torch.ones(2, 64, dtype=dtype)).dtype == torch.float32


def test_counts(directory: Path, decoder: Decoder) -> None:
    config = decoder.config
    shapes = Tensors(config).shapes.values()
    assert decoder.num_parameters == sum(torch.Size(shape).numel() for shape in shapes)
    # A tied head is packed beside the embedding; layers are kept packed and plain where memory
    # allows. Nothing else is held twice.
    copies = config.tie_embeddings and decoder.head.packed is not None
    extra = config.vocab_size * config.hidden_size if copies else 0
    if decoder.layers[0].qkv.layout is linear.Layout.PACKED_AND_PLAIN:
        linears = [linear for layer in decoder.layers for linear in _linears(layer)]
        linears += [decoder.vectors.projection] if decoder.vectors else []
        extra += sum(one.in_features * one.out_features for one in linears)
    assert decoder.weight_bytes == 4 * (decoder.num_parameters + extra)
    assert weight_bytes(config, torch.float32, torch.device("cpu")) == decoder.weight_bytes
    runner = Runner(decoder, resolve("torch"), num_pages=1, page_size=2, share="full")
    pages = {id(one): one for pair in runner.pages.values() for one in pair}.values()
    assert decoder.kv_bytes_per_token * 4 == sum(one.nbytes for one in pages)


def _linears(layer: Layer) -> list[linear.Linear]:
    """All products, those of experts too."""
    products = [mlp.products for mlp in _expert_layers(layer)]
    assert all(isinstance(one, SortedBlocks) for one in products)
    return [*layer.linears, *(one for p in products for mlp in p.experts for one in mlp.linears)]


def _expert_layers(layer: Layer) -> list[ExpertLayer]:
    found = [layer.mlp, layer.beside.experts if layer.beside else None]
    return [one for one in found if isinstance(one, ExpertLayer)]


def test_plain_tied_head_is_the_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear.Layout.PLAIN
    monkeypatch.setattr("onestem.models.sizes.choose_layout", lambda *_, **__: plain)
    path = make_tiny("qwen2", tmp_path)
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    assert decoder.head.weight is decoder.embedding
    assert decoder.weight_bytes == 2 * decoder.num_parameters


def test_rotation_depends_on_distance_alone(decoder: Decoder) -> None:
    rope, config = Rope(decoder.config, torch.device("cpu")), decoder.config
    heads = Heads(1, 1, config.head_dim)
    qkv = torch.randn(1, 3 * config.head_dim, generator=torch.Generator().manual_seed(0))

    def product(q_position: int, k_position: int) -> torch.Tensor:
        angles = [rope.angles(torch.tensor([p]))[0] for p in (q_position, k_position)]
        (q, _, _), (_, k, _) = (rotated(qkv, heads, a) for a in angles)
        return (q * k).sum()

    torch.testing.assert_close(product(17, 5), product(112, 100), atol=1e-4, rtol=0)
