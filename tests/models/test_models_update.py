"""A decoder whose tensors are written again is the one that is loaded from them, in each layout."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from onestem.errors import WeightsError
from onestem.models import sizes
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.formats.products import Target
from onestem.models.linear import Layout
from onestem.models.updates import checked_tensors, write_tensors
from onestem.models.weights import load_decoder
from tests.models.changed import changed_model, tensors_of
from tests.models.quantised import FORMATS, quantised
from tests.models.tiny import FAMILIES, load_oracle, make_tiny

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
    return lambda layout: monkeypatch.setattr(sizes, "choose_layout", lambda *_, **__: layout)


def held(decoder: Decoder) -> list[Tensor]:
    """Every tensor of a decoder, packed ones as they were before."""
    return [one.to_dense() if one.is_mkldnn else one for one in decoder.tensors]


def equal(a: Decoder, b: Decoder) -> bool:
    pairs = zip(held(a), held(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def addresses(decoder: Decoder) -> list[int]:
    return [tensor.data_ptr() for tensor in decoder.tensors if not tensor.is_mkldnn]


@pytest.mark.parametrize("family", FAMILIES)
def test_written_tensors_are_those_of_the_checkpoint(family, layout_of, tmp_path):
    path = make_tiny(family, tmp_path / "before")
    other = changed_model(path, tmp_path / "after")
    # What a trainer has: other names of some families, and experts in one tensor.
    of_trainer = load_oracle(other).state_dict()
    for number, (layout, dtype) in enumerate(LAYOUTS):
        tensors = of_trainer if number % 2 else tensors_of(other)
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
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "falcon_40b",
        "gpt2",
        "phi",
        "phi3",
        "glm4_moe",
        "gpt_oss",
        "gemma3_image",
        "gemma4_image",
    ],
)
def test_one_tensor_after_another(family, layout, dtype, layout_of, tmp_path):
    """In any order, and each of them alone makes a difference."""
    path = make_tiny(family, tmp_path / "before")
    other = changed_model(path, tmp_path / "after")
    layout_of(layout)
    decoder = load_decoder(path, dtype=dtype, device="cpu")
    after = load_decoder(other, dtype=dtype, device="cpu")
    named = list(tensors_of(other).items())
    random.Random(0).shuffle(named)
    now = [tensor.clone() for tensor in held(decoder)]
    for one in named:
        tensors = checked_tensors(decoder.config, [one])
        write_tensors(decoder, tensors)
        before, now = now, [tensor.clone() for tensor in held(decoder)]
        pairs = zip(before, now, strict=True)
        assert all(torch.equal(x, y) for x, y in pairs) is (not tensors), one[0]
    assert equal(decoder, after)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "glm4_moe"])
def test_experts_of_a_gpu_are_written_in_place(family, layout_of, tmp_path, monkeypatch):
    path = make_tiny(family, tmp_path / "before")
    other = changed_model(path, tmp_path / "after")
    layout_of(Layout.PLAIN)
    monkeypatch.setattr(Target, "has_kernels", True)
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    after = load_decoder(other, dtype=torch.bfloat16, device="cpu")
    assert any(one.ndim == 3 for one in held(decoder))
    where = addresses(decoder)
    for one in tensors_of(other).items():
        write_tensors(decoder, checked_tensors(decoder.config, [one]))
    assert equal(decoder, after)
    assert addresses(decoder) == where


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_released_weights_come_back_or_are_given_again(family, layout, dtype, layout_of, tmp_path):
    path = make_tiny(family, tmp_path / "tiny")
    layout_of(layout)
    decoder = load_decoder(path, dtype=dtype, device="cpu")
    want = load_decoder(path, dtype=dtype, device="cpu")
    decoder.release(keep=True)
    decoder.restore()
    assert equal(decoder, want)
    decoder.release(keep=False)
    sizes = [t.untyped_storage().nbytes() for t in decoder.tensors if not t.is_mkldnn]
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
        ("a/path", "got 'a/path', expected pairs of a name and a tensor"),
        (tensors, r"got \{.*, expected pairs"),
        ([(name, whole), name], f"got '{name}', expected pairs"),
        ([whole], r"got tensor\(.*, expected pairs"),
        (7, "got 7, expected pairs"),
        ([(name, whole.to("meta"))], f"without values .*{name}"),
        ([("lm_head.weight", whole)], r"lm_head.weight is \[64, 64\], expected \[288, 64\]"),
    ]:
        with pytest.raises(WeightsError, match=reason):
            checked_tensors(config, given)
    head = ("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert checked_tensors(config, [head]) == {}  # tied: it is the embedding
    assert checked_tensors(config, []) == {}


def test_experts_are_given_together_or_one_by_one(tmp_path):
    path = make_tiny("mixtral", tmp_path / "tiny")
    config = ModelConfig.from_directory(path)
    together = load_oracle(path).state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    single = checked_tensors(config, [(name, together[name])])
    assert len(single) == 8
    assert single.keys() <= checked_tensors(config, tensors_of(path).items()).keys()
    assert single.keys() == checked_tensors(config, single.items()).keys()
    for given, reason in [
        ([(name, together[name]), *single.items()], r"1\.mlp\.experts\.0\.w1\.weight is given tw"),
        ([(name, together[name][:3])], r"gate_up_proj is \[3, 192, 64\], expected \[4, 192, 64\]"),
    ]:
        with pytest.raises(WeightsError, match=reason):
            checked_tensors(config, given)


def test_quantised_weights_are_not_written(tmp_path):
    path = make_tiny("llama", tmp_path / "tiny")
    decoder = load_decoder(path, dtype=torch.float32, device="cpu", quantization="int8")
    with pytest.raises(WeightsError, match=r"weights are int8, .* load the model in 16 bits"):
        checked_tensors(decoder.config, tensors_of(path).items(), decoder.quantised)
    stored = quantised(path, tmp_path / "stored", FORMATS["gptq"])
    decoder = load_decoder(stored, dtype=torch.float32, device="cpu")
    with pytest.raises(WeightsError, match="weights are gptq, which cannot be written again"):
        checked_tensors(decoder.config, tensors_of(path).items(), decoder.quantised)
