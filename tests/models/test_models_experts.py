"""Experts of quantised checkpoints, and experts that are rounded when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onestem.models import builder, weights
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.format_errors import FormatError, format_errors
from onestem.models.formats.held import dense, rounded_weight
from onestem.models.formats.products import Target
from onestem.models.linear import held_tensors
from onestem.models.mlp import ExpertLayer, SortedBlocks
from onestem.models.sizes import formats_of, weight_bytes
from onestem.models.weights import checked_config, load_decoder
from onestem.ops.cpu import is_built
from onestem.ops.triton.experts import GroupedExperts
from onestem.ops.triton.tiled_experts import TiledExperts
from tests.models.as_gguf import CHANGES, write_gguf
from tests.models.dense import log_probabilities, most_off, prompt
from tests.models.quantised import FORMATS, Format, dequantised, fp8_blocks, mxfp4, quantised
from tests.models.tiny import make_tiny

CPU = torch.device("cpu")
IDS = prompt(24, 270)
# Formats, and what a CPU calls their products in bfloat16.
CHECKPOINTS: dict[str, tuple[Format, str]] = {
    "fp8 per channel": (FORMATS["fp8 per channel"], "from fp8 per channel"),
    "fp8 in blocks": (fp8_blocks(32, 32), "from fp8 in groups of 32"),
    "int8": (FORMATS["int8 without rounding of rows"], "int8 in groups of"),
    "packed int4": (FORMATS["packed int4"], "int4 in groups of 32"),
    "gptq, act-order": (FORMATS["gptq, act-order"], "int4 in groups of 32"),
    # Files of AWQ leave routers out: their rows are not whole words.
    "awq": (replace(FORMATS["awq"], left_out=("moe.gate",)), "int4 in groups of 32"),
}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's experts, under Triton's interpreter where there is none; other products are a
    CPU's."""
    monkeypatch.setattr(Target, "has_kernels", True)
    monkeypatch.setattr(Target, "multiplies", lambda *_: False)


def products_of(decoder: Decoder) -> list[SortedBlocks | GroupedExperts | TiledExperts]:
    layers = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertLayer)]
    assert layers
    return [layer.products for layer in layers]


def answers(path: Path, dtype: torch.dtype = torch.float32, **options: object) -> torch.Tensor:
    decoder = load_decoder(path, dtype=dtype, device="cpu", **options)
    return log_probabilities(decoder, IDS).float()


def without_orders(decoder: Decoder) -> int:
    """Bytes of weights, without the orders of inputs."""
    held = {id(one): one for layer in decoder.layers for one in held_tensors(layer)}
    for products in products_of(decoder):
        held |= {id(one): one for one in held_tensors(products)}
    of_all = (one.dtype == torch.int32 and one.ndim == 2 for one in held.values())
    orders = (one.dtype == torch.int64 for one in held.values())
    pairs = zip(held.values(), of_all, orders, strict=True)
    return decoder.weight_bytes - sum(one.nbytes for one, first, second in pairs if first or second)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_experts_of_a_checkpoint_keep_their_format(
    mixtral: Path, tmp_path: Path, name: str
) -> None:
    """On a CPU: the answers are those of what the format says, as near as those of its
    de-quantised twin in the same dtype."""
    form, kind = CHECKPOINTS[name]
    path = quantised(mixtral, tmp_path / "quantised", form)
    plain = dequantised(mixtral, tmp_path / "plain", form)
    exact = answers(plain)
    assert (answers(path) - exact).abs().max() < 1e-4
    off = (answers(plain, torch.bfloat16) - exact).abs().max()
    assert (answers(path, torch.bfloat16) - exact).abs().max() <= 2 * off
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    for products in products_of(decoder):
        kinds = {one.kind for mlp in products.experts for one in mlp.linears}
        assert not is_built() or all(kind in one for one in kinds)
    config, schemes = checked_config(path)
    assert weight_bytes(config, torch.bfloat16, CPU, schemes) == without_orders(decoder)


@pytest.mark.parametrize(
    "name",
    [
        "gptq, act-order",
        "fp8 in blocks",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("awq", "int8", "fp8 per channel")),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_experts_of_a_checkpoint_keep_their_format_on_a_gpu(
    mixtral: Path, tmp_path: Path, name: str
) -> None:
    form, _ = CHECKPOINTS[name]
    path = quantised(mixtral, tmp_path / "quantised", form)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    assert all(isinstance(one, TiledExperts) for one in products_of(decoder))
    plain = dequantised(mixtral, tmp_path / "plain", form)
    exact = answers(plain)[:, :8]
    found = log_probabilities(decoder, IDS[:8])
    assert (found - exact).abs().max() < 1e-4
    config, schemes = checked_config(path)
    expected, held = weight_bytes(config, torch.float32, CPU, schemes), without_orders(decoder)
    # Scales are expected in 16 bits; those of codes of 8 bits need 32 here.
    assert expected == held or ("8" in name and expected < held < 1.03 * expected)


@pytest.mark.usefixtures("gpu")
def test_experts_of_other_groups_are_widened_on_a_gpu(mixtral: Path, tmp_path: Path) -> None:
    """Kernels take groups of whole 32 columns."""
    path = quantised(mixtral, tmp_path / "quantised", fp8_blocks(24, 40))
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    assert all(isinstance(one, GroupedExperts) for one in products_of(decoder))
    config, schemes = checked_config(path)
    assert weight_bytes(config, torch.float32, CPU, schemes) == decoder.weight_bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A GGUF file of each type of blocks."""
    folder = tmp_path_factory.mktemp("gguf")
    source = make_tiny("mixtral", folder / "source", changes=CHANGES["mixtral"])
    return lambda kind: write_gguf(source, folder / f"{kind}.gguf", kind=kind)


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_experts_of_a_gguf_file_stay_in_its_blocks(
    files: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by no more than their numbers in 16 bits (`most_off`)."""
    path = files(kind)
    exact = answers(path)
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    for products in products_of(decoder):
        assert {one.kind for mlp in products.experts for one in mlp.linears} == {kind}
    config, schemes = checked_config(path)
    for forms in (schemes, formats_of(config, None, torch.bfloat16, CPU)):
        found = weight_bytes(config, torch.bfloat16, CPU, forms)
        # Each product of a table has the table.
        assert found == decoder.weight_bytes or (
            kind == "MXFP4" and found == pytest.approx(decoder.weight_bytes, rel=1e-3)
        )
    off = (log_probabilities(decoder, IDS) - exact).abs().mean()
    monkeypatch.setattr(weights, "kept_by", lambda *_: lambda scheme: False)
    assert off < most_off() * (answers(path, torch.bfloat16) - exact).abs().mean()


@pytest.mark.parametrize(
    "kind", ["Q4_0", *(pytest.param(one, marks=pytest.mark.soak) for one in ("Q8_0", "MXFP4"))]
)
@pytest.mark.usefixtures("gpu")
def test_experts_of_a_gguf_file_stay_in_its_blocks_on_a_gpu(
    files: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files(kind)
    exact = answers(path)[:, :8]
    monkeypatch.setattr(weights, "kept_by", lambda *_: lambda scheme: True)
    decoder = load_decoder(path, dtype=torch.float32, device="cpu")
    assert all(isinstance(one, TiledExperts) for one in products_of(decoder))
    assert (log_probabilities(decoder, IDS[:8]) - exact).abs().max() < 1e-4


def rounded_twin(source: Path, target: Path, form: str) -> Path:
    """A copy with the values that `--quantization` rounds to, in float32."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    held = load_file(source / "model.safetensors")

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return dense(rounded_weight(weight.float(), form), torch.float32)

    for name, tensor in held.items():
        if "layers" not in name or "norm" in name or "router" in name or "moe.gate" in name:
            continue
        if tensor.ndim == 3:  # [num, in_features, out_features] of gpt-oss
            held[name] = torch.stack([rounded(one.T).T for one in tensor]).contiguous()
        elif name.endswith(".weight"):
            held[name] = rounded(tensor)
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("family", "form"), [("mixtral", "int4"), ("mixtral", "fp8"), ("gpt_oss", "int4")]
)
def test_experts_are_rounded_when_they_are_loaded(
    tmp_path: Path, family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored one by one or in one tensor; one after the other."""
    path = make_tiny(family, tmp_path / family)
    exact = answers(rounded_twin(path, tmp_path / "twin", form))
    sizes: list[Sequence[int]] = []

    def noted(weight: torch.Tensor, *rest: object) -> object:
        sizes.append(weight.shape)
        return rounded_weight(weight, *rest)

    monkeypatch.setattr(builder, "rounded_weight", noted)
    monkeypatch.setattr(builder, "rounds_head", lambda *_: False)
    assert (answers(path, quantization=form) - exact).abs().max() < 1e-4
    assert all(len(size) == 2 for size in sizes)
    config = ModelConfig.from_directory(path)
    experts = config.experts
    assert experts is not None
    ends = sum(size == (config.hidden_size, experts.intermediate_size) for size in sizes)
    assert ends == experts.num * sum(experts.layers)


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_bytes_of_rounded_experts_are_known_before(mixtral: Path, form: str) -> None:
    config = ModelConfig.from_directory(mixtral)
    decoder = load_decoder(mixtral, dtype=torch.bfloat16, device="cpu", quantization=form)
    formats = formats_of(config, form, torch.bfloat16, CPU)
    assert weight_bytes(config, torch.bfloat16, CPU, formats) == decoder.weight_bytes
    for products in products_of(decoder):
        assert all(form in one.kind for mlp in products.experts for one in mlp.linears)


def test_errors_of_experts_are_told(mixtral: Path, tmp_path: Path) -> None:
    """The same rounding as of the other modules; three products of it."""

    def errors(path: Path, **options: object) -> list[FormatError]:
        return list(format_errors(path, dtype=torch.float32, device=CPU, **options))

    form = FORMATS["int8 without rounding of rows"]
    path = quantised(mixtral, tmp_path / "quantised", form)
    assert sum("experts" in module for module in checked_config(path)[1]) == 2 * 4 * 3
    alone, against = errors(path), errors(path, original=mixtral)
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"]
    modules += [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert [one.module for one in alone] == [one.module for one in against] == modules
    assert all(one.weights is None and one.products < 1e-5 for one in alone[8:])
    rounded = [one for one in errors(mixtral, quantization="int4") if one.module != "lm_head"]
    assert [one.module for one in rounded] == modules
    for found in (against, rounded):
        assert all(0.5 < one.weights / found[0].weights < 2 for one in found[8:])
        assert all(one.weights < one.products < 4 * one.weights for one in found[8:])
    path = mxfp4(make_tiny("gpt_oss", tmp_path / "gpt_oss"), tmp_path / "mxfp4")
    for one in errors(path, quantization="fp8"):  # experts stay in mxfp4
        assert (one.weights is None) == one.module.endswith("experts")
