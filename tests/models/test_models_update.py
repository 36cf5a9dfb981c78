"""A decoder whose tensors are written again is the one that is loaded from them, in each layout."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models import weights
from onestem.models.decoder import Decoder
from onestem.models.linear import Layout
from onestem.models.weights import checked_tensors, load_decoder, write_tensors
from tests.models.changed import changed_model, tensors_of
from tests.models.tiny import FAMILIES, make_tiny

LAYOUTS = [
    (Layout.PLAIN, torch.float32),
    (Layout.PACKED, torch.float32),
    (Layout.PACKED_AND_PLAIN, torch.float32),
    (Layout.PLAIN, torch.bfloat16),
    (Layout.PACKED_FLOAT32, torch.bfloat16),
]


@pytest.fixture
def layout_of(monkeypatch):
    """Have all models loaded in a layout."""
    return lambda layout: monkeypatch.setattr(weights, "choose_layout_of", lambda *_: layout)


def held(decoder: Decoder) -> list[Tensor]:
    """Every tensor of a decoder, packed ones as they were before."""
    return [one.to_dense() if one.is_mkldnn else one for one in decoder._tensors()]


def equal(a: Decoder, b: Decoder) -> bool:
    pairs = zip(held(a), held(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def addresses(decoder: Decoder) -> list[int]:
    return [tensor.data_ptr() for tensor in decoder._tensors() if not tensor.is_mkldnn]


@pytest.mark.parametrize("family", FAMILIES)
def test_written_tensors_are_those_of_the_checkpoint(family, layout_of, tmp_path):
    path = make_tiny(family, tmp_path / "before")
    other = changed_model(path, tmp_path / "after")
    tensors = tensors_of(other)
    for layout, dtype in LAYOUTS:
        layout_of(layout)
        before = load_decoder(path, dtype=dtype, device="cpu")
        after = load_decoder(other, dtype=dtype, device="cpu")
        assert not equal(before, after)
        where = addresses(before)
        write_tensors(before, checked_tensors(before.config, tensors.items()))
        assert equal(before, after), layout
        kept = layout in (Layout.PLAIN, Layout.PACKED_AND_PLAIN, Layout.PACKED)
        assert not kept or addresses(before) == where


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "falcon_40b", "gpt2", "phi", "qwen3"])
def test_one_tensor_after_another(family, layout, dtype, layout_of, tmp_path):
    """In any order, and each of them alone makes a difference."""
    path = make_tiny(family, tmp_path / "before")
    other = changed_model(path, tmp_path / "after")
    layout_of(layout)
    decoder = load_decoder(path, dtype=dtype, device="cpu")
    after = load_decoder(other, dtype=dtype, device="cpu")
    named = list(checked_tensors(decoder.config, tensors_of(other).items()).items())
    random.Random(0).shuffle(named)
    for name, tensor in named:
        before = [one.clone() for one in held(decoder)]
        write_tensors(decoder, {name: tensor})
        pairs = zip(before, held(decoder), strict=True)
        assert not all(torch.equal(x, y) for x, y in pairs), name
    assert equal(decoder, after)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_released_weights_come_back_or_are_given_again(layout, dtype, layout_of, tmp_path):
    path = make_tiny("qwen2", tmp_path / "tiny")
    layout_of(layout)
    decoder = load_decoder(path, dtype=dtype, device="cpu")
    want = load_decoder(path, dtype=dtype, device="cpu")
    decoder.release(keep=True)
    decoder.restore()
    assert equal(decoder, want)
    decoder.release(keep=False)
    sizes = [t.untyped_storage().nbytes() for t in decoder._tensors() if not t.is_mkldnn]
    assert sum(sizes) == 0
    decoder.restore()
    for name, tensor in checked_tensors(decoder.config, tensors_of(path).items()).items():
        write_tensors(decoder, {name: tensor})
    assert equal(decoder, want)


def test_what_is_refused(tmp_path):
    path = make_tiny("qwen2", tmp_path / "tiny")
    config = load_decoder(path, dtype=torch.float32, device="cpu").config
    tensors = tensors_of(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = tensors[name]
    for given, reason in [
        ([("model.extra", whole)], "no place for: model.extra"),
        ([(name, whole[:3])], rf"{name} is \[3, 64\], expected \[64, 64\]"),
        ([(name, whole.long())], f"{name} is int64"),
        ([(name, whole), (name, whole)], f"{name} is given twice"),
        ([(name, whole.numpy())], f"{name} is ndarray, expected a tensor"),
        ([(name, whole.to("meta"))], f"without values .*{name}"),
        ([("lm_head.weight", whole)], r"lm_head.weight is \[64, 64\], expected \[288, 64\]"),
    ]:
        with pytest.raises(WeightsError, match=reason):
            checked_tensors(config, given)
    head = ("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert checked_tensors(config, [head]) == {}  # tied: it is the embedding
    assert checked_tensors(config, []) == {}
