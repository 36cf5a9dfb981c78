"""Quantised checkpoints are what their formats say, alone and fused, in every mode of sharing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onestem.errors import ConfigError, UnsupportedError, WeightsError
from onestem.models.checkpoint import open_checkpoint
from onestem.models.config import ModelConfig
from onestem.models.decoder import Layer
from onestem.models.format_errors import FormatError, format_errors
from onestem.models.formats import products
from onestem.models.formats.held import Channels, Groups, Weight, dense, rounded_weight
from onestem.models.formats.products import Target, projection
from onestem.models.linear import Layout, Projection, held_tensors
from onestem.models.sizes import formats_of, weight_bytes
from onestem.models.tensors import Tensors
from onestem.models.weights import checked_config, load_decoder, random_decoder
from onestem.needs import needs_of
from onestem.ops.cpu import is_built
from onestem.ops.rounding import RoundedRows, RoundRows, rounded_rows
from onestem.options import EngineOptions
from onestem.shapes import find_shape
from tests.engine.harness import answer, make_engine, requests_for, shared_prompts
from tests.models.dense import log_probabilities, prompt
from tests.models.quantised import FORMATS, dequantised, mxfp4, quantised, unchanged
from tests.models.tiny import make_tiny

CPU = torch.device("cpu")
IDS = prompt(24, 270)
MODES = ("full", "storage", "off")
PLAIN = Target(torch.float32, CPU, Layout.PLAIN)

built = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")


@pytest.fixture(scope="module", params=["llama_biases", "phi"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phi's rows are brought into another order, and its linear layers have biases."""
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("phi", tmp_path_factory.mktemp("phi"))


def _tokens(path: Path, **options: object) -> list[list[int]]:
    engine = make_engine(path, **options)
    outputs = answer(engine, requests_for(shared_prompts()))
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(outputs))]


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_what_its_format_says(original: Path, tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    path = quantised(original, tmp_path / "quantised", form)
    tensors = Tensors(ModelConfig.from_directory(path))
    specs = {spec.name: spec for spec in tensors}
    source = open_checkpoint(path, tensors, torch.float32, CPU)
    found = 0
    for index, (tensor, weight) in enumerate(
        sorted(load_file(original / "model.safetensors").items())
    ):
        if unchanged(tensor, form):
            continue
        meant = form.write(weight.double(), index)[1]
        # Of one rounding to float32.
        read = dense(source.weight(specs[tensor]), torch.float32)
        torch.testing.assert_close(read.double(), meant, rtol=2**-23, atol=0)
        found += 1
    assert found >= 10
    plain = dequantised(original, tmp_path / "plain", form)
    answers = [
        log_probabilities(load_decoder(one, dtype=torch.float32, device="cpu"), IDS)
        for one in (path, plain)
    ]
    off = (answers[0] - answers[1]).abs().max()
    rounds = form.rounds and is_built()
    assert off > 1e-3 if rounds else off < 1e-4


@pytest.mark.parametrize("name", ["fp8 in blocks", "int8", "gptq, act-order", "awq"])
def test_answers_do_not_depend_on_sharing(llama: Path, tmp_path: Path, name: str) -> None:
    """And are those of the weights' values, where products round no rows."""
    form = FORMATS[name]
    path = quantised(llama, tmp_path / "quantised", form)
    tokens = [_tokens(path, share=mode) for mode in MODES]
    tokens.append(_tokens(path, max_step_tokens=16, num_pages=64))
    assert all(other == tokens[0] for other in tokens[1:])
    plain = _tokens(dequantised(llama, tmp_path / "plain", form))
    assert form.rounds or plain == tokens[0]


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_weights_are_rounded_when_they_are_loaded(llama: Path, form: str) -> None:
    whole = load_decoder(llama, dtype=torch.bfloat16, device="cpu")
    decoder = load_decoder(llama, dtype=torch.bfloat16, device="cpu", quantization=form)
    assert form in decoder.layers[0].qkv.kind
    assert decoder.num_parameters == whole.num_parameters
    engines = [make_engine(llama, quantization=form, share=mode) for mode in ("full", "off")]
    outputs = [answer(engine, requests_for(shared_prompts())) for engine in engines]
    for number, output in outputs[0].items():
        assert output.outputs[0].token_ids == outputs[1][number].outputs[0].token_ids
    random = load_decoder(
        llama, dtype=torch.float32, device="cpu", random_weights=True, quantization=form
    )
    assert form in random.layers[0].mlp.down.kind


def test_random_weights_do_not_ask_how_a_checkpoint_is_stored(llama: Path, tmp_path: Path) -> None:
    path = quantised(llama, tmp_path / "awq", FORMATS["awq"])
    options = {"dtype": torch.float32, "device": "cpu", "random_weights": True}
    decoders = [load_decoder(one, **options) for one in (path, llama)]
    assert torch.equal(*(log_probabilities(decoder, IDS) for decoder in decoders))


def test_what_is_quantised_is_not_rounded_again(llama: Path, tmp_path: Path) -> None:
    path = quantised(llama, tmp_path / "awq", FORMATS["awq"])
    with pytest.raises(ConfigError, match=r"quantization is fp8.*quantised \(awq\): leave it out"):
        load_decoder(path, dtype=torch.float32, device="cpu", quantization="fp8")


def test_a_quantised_head_and_table_are_read(llama: Path, tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    path = quantised(llama, tmp_path / "quantised", form)
    plain = dequantised(llama, tmp_path / "plain", form)
    held = {one: load_file(one / "model.safetensors") for one in (path, plain)}
    for name in ("lm_head", "model.embed_tokens"):
        stored, meant = form.write(held[plain][f"{name}.weight"].double(), 0)
        held[plain][f"{name}.weight"] = meant.float()
        del held[path][f"{name}.weight"]
        held[path] |= {f"{name}.{part}": one.contiguous() for part, one in stored.items()}
    for one, tensors in held.items():
        save_file(tensors, one / "model.safetensors")
    first, second = (
        log_probabilities(load_decoder(one, dtype=torch.float32, device="cpu"), IDS)
        for one in (path, plain)
    )
    assert (first - second).abs().max() < 1e-4


def _edited(path: Path, **tensors: Tensor | None) -> None:
    held = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path / "model.safetensors")


AT = "model.layers.1.self_attn.k_proj"
WRONG = {
    "lacks": ("gptq", {f"{AT}.qzeros": None}, rf"lacks tensors .*{AT}\.qzeros$"),
    "unknown": ("awq", {f"{AT}.g_idx": torch.zeros(64)}, rf"no place for: {AT}\.g_idx$"),
    "shape": ("awq", {f"{AT}.scales": torch.zeros(3, 32)}, r"\[3, 32\], expected \[2, 32\]"),
    "dtype": ("awq", {f"{AT}.qweight": torch.zeros(64, 4).long()}, r"qweight is I64, expected I32"),
    "scales": (
        "fp8 in blocks",
        {f"{AT}.weight_scale_inv": torch.zeros(2, 3)},
        rf"{AT}\.weight_scale_inv is \[2, 3\], expected",
    ),
    "flat scales": (
        "fp8 in blocks",
        {f"{AT}.weight_scale_inv": torch.zeros(4)},
        rf"{AT}\.weight_scale_inv is \[4\], expected",
    ),
    "no scale": ("int8", {f"{AT}.weight_scale": None}, rf"lacks tensors .*{AT}\.weight_scale$"),
    "no scales of blocks": (
        "fp8 in blocks",
        {f"{AT}.weight_scale_inv": None},
        rf"lacks tensors .*{AT}\.weight_scale_inv$",
    ),
    "two scales": (
        "fp8 in blocks",
        {f"{AT}.weight_scale": torch.ones(1)},
        rf"no place for: {AT}\.weight_scale$",
    ),
    "zeros": ("int8", {f"{AT}.weight_zero_point": torch.ones(32, 1)}, "is not 0, expected"),
    "shape of codes": (
        "packed int4",
        {f"{AT}.weight_shape": torch.tensor([7, 9])},
        rf"{AT}\.weight_shape is \[7, 9\], expected \[32, 64\]",
    ),
    "groups": (
        "gptq",
        {f"{AT}.g_idx": torch.zeros(64, dtype=torch.int32)},
        rf"{AT}\.g_idx does not name 32 inputs for each group: the file is damaged",
    ),
    "no groups": (
        "gptq",
        {f"{AT}.g_idx": torch.full((64,), -1, dtype=torch.int32)},
        "g_idx does not name 32",
    ),
    **{
        f"{value} in {form}": (
            form,
            {f"{AT}.{name}": torch.full(shape, float(value))},
            rf"model\.safetensors: {AT}\.{name} has numbers that are not finite: the file",
        )
        for form, name, shape, value in (
            ("int8", "weight_scale", (32, 1), "nan"),
            ("awq", "scales", (2, 32), "inf"),
            ("gptq", "scales", (2, 32), "-inf"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(llama: Path, tmp_path: Path, case: str) -> None:
    name, tensors, words = WRONG[case]
    path = quantised(llama, tmp_path / "x", FORMATS[name])
    _edited(path, **tensors)
    with pytest.raises(WeightsError, match=words):
        load_decoder(path, dtype=torch.float32, device="cpu")
    assert re.search(words, needs_of(EngineOptions(path, kv_memory="4MiB")).problem or "")


@pytest.mark.parametrize(
    ("form", "scales"),
    [("int8", "weight_scale"), ("awq", "scales"), ("packed int4", "weight_scale")],
)
def test_scales_that_are_0_are_named(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, scales: str
) -> None:
    """A module may have weights that are all 0, so it is loaded."""
    path = quantised(llama, tmp_path / "x", FORMATS[form])
    load_decoder(path, dtype=torch.float32, device="cpu")
    assert not caplog.text
    name = f"{AT}.{scales}"
    changed = load_file(path / "model.safetensors")[name]
    changed[0] = 0
    _edited(path, **{name: changed})
    load_decoder(path, dtype=torch.float32, device="cpu")
    (line,) = caplog.messages
    assert line == f"scales that are 0, whose weights are 0 then: {name}"


def test_families_with_turned_weights_are_refused(tmp_path: Path) -> None:
    path = make_tiny("gpt2", tmp_path / "gpt2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "quantization_config": FORMATS["int8"].config})
    )
    name = "transformer.h.0.attn.c_attn.weight"
    _edited(path, **{name: load_file(path / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(UnsupportedError, match="quantised weights of GPT2LMHeadModel"):
        load_decoder(path, dtype=torch.float32, device="cpu")


def _random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _channels(out: int, size: int, dtype: torch.dtype, seed: int = 0) -> Channels:
    codes, scales = rounded_rows(_random((out, size), seed), dtype)
    return Channels(codes, scales[:, 0])


def _groups(out: int, size: int, group: int, seed: int = 0, *, order: bool = False) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (out, size), generator=generator).to(torch.uint8)
    shape = (out, size // group)
    zeros = torch.randint(0, 17, shape, generator=generator).to(torch.int16)
    scales = torch.rand(shape, generator=generator) + 0.5
    at = torch.randperm(size, generator=generator) if order else None
    return Groups(codes, scales, zeros, group, 4, at)


def _meant(weight: Weight) -> Tensor:
    """float64."""
    if isinstance(weight, Tensor):
        return weight.double()
    if isinstance(weight, Channels):
        return weight.codes.double() * weight.scales.double()[:, None]
    wide = [t.double().repeat_interleave(weight.group, 1) for t in (weight.zeros, weight.scales)]
    value = (weight.codes.double() - wide[0]) * wide[1]
    if weight.order is None:
        return value
    turned = torch.empty_like(value)
    turned[:, weight.order] = value
    return turned


def _rounded(x: Tensor, largest: float) -> Tensor:
    """What a product of int8 rows multiplies, in float64: each row by its own maximum, in
    float32."""
    scales = (x.float().abs().amax(1, keepdim=True) / largest).clamp_min(1e-30)
    return (x.float() / scales).round().double() * scales.double()


def _close(y: Tensor, exact: Tensor, eps: float) -> None:
    """One rounding of results and float32 sums beside the largest result."""
    assert y.shape == exact.shape
    off = (y.double() - exact).abs()
    assert (off <= eps * exact.abs() + 2**-18 * exact.abs().max()).all()


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_round_each_row_by_itself(dtype: torch.dtype) -> None:
    parts = [_channels(48, 96, torch.int8, 0), _channels(16, 96, torch.int8, 1)]
    bias, x = _random((64,), 2).to(dtype), _random((40, 96), 3).to(dtype)
    x[5] = 0
    x[6] *= 1000
    exact = _rounded(x, 127) @ torch.cat([_meant(part) for part in parts]).t() + bias.double()
    layer = projection(parts, bias, None, Target(dtype, CPU, Layout.PLAIN))
    assert layer.kind == "int8 per channel, rows in int8"
    y = layer(x)
    assert y.dtype == dtype
    _close(y, exact, torch.finfo(dtype).eps)
    for rows in (0, 1, 7):
        assert torch.equal(layer(x[:rows]), y[:rows])
    if dtype == torch.float32 and not torch.cuda.is_available():  # under Triton's interpreter
        whole = Channels(*map(torch.cat, zip(*map(_fields, parts))))
        tiled = products.GpuChannels(whole, bias, Target(dtype, CPU, Layout.PLAIN))
        for rows in (0, 1, 40):
            assert torch.equal(tiled(x[:rows]), y[:rows])
            assert torch.equal(tiled(rounded_rows(x[:rows], torch.int8)), y[:rows])


@pytest.mark.skipif(torch.cuda.is_available(), reason="under Triton's interpreter")
def test_norms_and_gates_round_for_products_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU: the same bits, and products round what attention gives alone."""
    monkeypatch.setattr(products.GpuChannels, "takes", lambda *_: True)
    config = ModelConfig.from_directory(find_shape("0.1b")).first_layers(2)
    config = replace(config, vocab_size=32, intermediate_size=192)
    decoder = random_decoder(config, dtype=torch.float32, device=CPU, quantization="int8")
    ids = torch.arange(3)
    rounded: list[int] = []

    def forward() -> Tensor:
        width = config.num_q_heads * config.head_dim
        return decoder.forward(ids, ids, lambda _, qkv, *__: qkv[:, :width].unflatten(1, (-1, 64)))

    for layer in decoder.layers:
        for product in _products(layer):
            assert isinstance(product, products.GpuChannels)
            monkeypatch.setattr(product, "rounds", None)
            monkeypatch.setattr(product, "round_rows", _noting(rounded, product.out_features))
    apart = forward()
    in_order = [one.out_features for layer in decoder.layers for one in _products(layer)]
    assert rounded == in_order
    rounded.clear()
    for layer in decoder.layers:
        for product in _products(layer):
            monkeypatch.setattr(product, "rounds", torch.int8)
    assert torch.equal(forward(), apart)
    assert rounded == [layer.output.out_features for layer in decoder.layers]


@pytest.mark.skipif(torch.cuda.is_available(), reason="under Triton's interpreter")
def test_what_needs_rows_as_they_are_has_them_beside_those_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates of the delta rule, and experts beside a shared one."""
    path = make_tiny("qwen3_5_moe", tmp_path)
    monkeypatch.setattr(
        products.GpuChannels, "takes", lambda weight, *_: min(weight.codes.shape) > 8
    )
    decoder = load_decoder(path, dtype=torch.float32, device="cpu", quantization="int8")
    together = log_probabilities(decoder, IDS)
    rounded: list[int] = []
    for layer in decoder.layers:
        for product in layer.linears:
            if isinstance(product, products.GpuChannels):
                monkeypatch.setattr(product, "round_rows", _noting(rounded, product.out_features))
    assert torch.equal(log_probabilities(decoder, IDS), together)
    assert rounded == [layer.output.out_features for layer in decoder.layers]
    for layer in decoder.layers:
        for product in layer.linears:
            monkeypatch.setattr(product, "rounds", None)
    assert torch.equal(log_probabilities(decoder, IDS), together)


def _products(layer: Layer) -> tuple[Projection, ...]:
    return layer.qkv, layer.output, *layer.mlp.linears


def _noting(noted: list[int], what: int) -> RoundRows:
    def round_rows(x: Tensor, dtype: torch.dtype) -> RoundedRows:
        noted.append(what)
        return rounded_rows(x, dtype)

    return round_rows


def _fields(channels: Channels) -> tuple[Tensor, Tensor]:
    return channels.codes, channels.scales


def test_without_the_extension_weights_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_built", lambda: False)
    for weight, kind in (
        (_channels(16, 32, torch.int8), "int8 per channel"),
        (_groups(16, 32, 32), "int4 in groups of 32"),
    ):
        layer, x = projection([weight], None, None, PLAIN), _random((3, 32), 1)
        assert layer.kind == f"float32, plain, from {kind}"
        _close(layer(x), x.double() @ _meant(weight).t(), 2**-20)


@built
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "order"), [(64, False), (64, True), (192, False)])
def test_4_bits_on_a_cpu(group: int, order: bool, dtype: torch.dtype) -> None:
    """A group that is wider than the product's is cut."""
    size = 4 * group
    weight, bias = _groups(32, size, group, order=order), _random((32,), 1).to(dtype)
    layer = projection([weight], bias, None, Target(dtype, CPU, Layout.PLAIN))
    assert layer.kind == f"int4 in groups of {group}"
    held = sum({id(tensor): tensor.nbytes for tensor in held_tensors(layer)}.values())
    assert held == 32 * size // 2 + (4 + 1) * 32 * size // 64 + 4 * 32 + 8 * size * order
    for rows in (0, 1, 2, 3, 40):
        x = _random((rows, size), rows).to(dtype)
        exact = x.double() @ _meant(weight).t() + bias.double()
        off = (layer(x).double() - exact).abs()
        # Of many rows in bfloat16 weights are rounded to it; results always are.
        total = x.double().abs() @ (_meant(weight).abs() + 8 * 1.5).t() + bias.double().abs()
        assert (off <= torch.finfo(dtype).eps * total).all()


def test_parts_of_different_kinds_are_products_of_their_own() -> None:
    parts: list[Weight] = [
        _groups(16, 64, 32, 0, order=True),
        _random((24, 64), 1),
        _groups(8, 64, 32, 2, order=True),
        _channels(8, 64, torch.float8_e4m3fn, 3),
    ]
    bias, at = _random((56,), 4), torch.randperm(56, generator=torch.Generator().manual_seed(5))
    x = _random((9, 64), 6)
    exact = x.double() @ torch.cat([_meant(part) for part in parts]).t()[:, at] + bias.double()
    layer = projection(parts, bias, at, PLAIN)
    assert layer.kind.count(";") == 2  # those in groups are told once
    assert (layer.out_features, layer.in_features) == (56, 64)
    _close(layer(x), exact, 2**-20)
    assert layer.pieces(x) == (x,)


@built
@pytest.mark.parametrize("rows", [1, 2])
def test_parts_of_a_cpu_round_results_with_their_bias_once(rows: int) -> None:
    """One row of them is written where it belongs."""
    parts: list[Weight] = [_groups(48, 64, 32), _channels(8, 64, torch.int8, 3)]
    bias, x = _random((56,), 4).bfloat16(), _random((rows, 64), 6).bfloat16()
    target = Target(torch.bfloat16, CPU, Layout.PLAIN)
    of_parts = zip(parts, bias.split([48, 8]), strict=True)
    alone = [projection([part], of, None, target)(x) for part, of in of_parts]
    assert torch.equal(projection(parts, bias, None, target)(x), torch.cat(alone, dim=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="under Triton's interpreter")
def test_products_of_a_gpu_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter: their rows' order, bias, and both ways."""
    weight, bias = _groups(48, 128, 32, order=True), _random((48,), 1).half()
    target = Target(torch.float16, CPU, Layout.PLAIN)
    layer = products.GpuGroups(weight, bias, target)
    assert layer.scratch_bytes == 2 * 48 * 128
    held = 64 * (64 + 4 * 4 + 4 * 4)
    assert sum(one.nbytes for one in held_tensors(layer)) == held + 2 * 48 + 8 * 128
    x = _random((9, 128), 2).half() / 16
    exact = x.double() @ _meant(weight).t() + bias.double()
    for most in (9, 8):
        monkeypatch.setattr(layer, "most", most)
        y = layer(x)
        assert (y.double() - exact).abs().max() < 2**-9 * exact.abs().max()


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_rounding_is_to_the_nearest(form: str) -> None:
    weight = _random((16, 192))
    weight[3] = 0
    value = dense(rounded_weight(weight, form), torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    off = (value - weight).abs()
    assert torch.equal(value[3], weight[3])
    if form == "fp8":  # three bits behind the first, and a smallest step
        assert (off <= weight.abs() * 2**-4 * 1.001 + largest / 448 * 2**-10 * 1.001).all()
    elif form == "int8":
        assert (off <= largest / 127 / 2 * 1.001).all()
    else:
        most = weight.unflatten(1, (-1, 64)).abs().amax(2).repeat_interleave(64, 1)
        assert (off <= most / 7.5 / 2 * 1.001).all()


def test_int4_leaves_odd_widths_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny("llama", tmp_path / "odd")
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "gate_proj" in name or "up_proj" in name:
            tensors[name] = tensors[name][:80].contiguous()
        elif "down_proj" in name:
            tensors[name] = tensors[name][:, :80].contiguous()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu", quantization="int4")
    layer = decoder.layers[0]
    assert ["int4" in one.kind for one in layer.mlp.linears] == [True, False]
    record = next(one for one in caplog.records if "widths" in one.getMessage())
    assert "int4 does not take the widths of 2 modules" in record.getMessage()
    assert "layers.1.mlp.down_proj" in record.getMessage()
    expected = formats_of(decoder.config, "int4", torch.bfloat16, CPU)
    assert weight_bytes(decoder.config, torch.bfloat16, CPU, expected) == decoder.weight_bytes
    modules = format_errors(path, dtype=torch.bfloat16, device=CPU, quantization="int4")
    assert not [one for one in modules if "down_proj" in one.module]


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_known_before(llama: Path, form: str, dtype: torch.dtype) -> None:
    config = ModelConfig.from_directory(llama)
    decoder = load_decoder(llama, dtype=dtype, device="cpu", quantization=form)
    assert (
        weight_bytes(config, dtype, CPU, formats_of(config, form, dtype, CPU))
        == decoder.weight_bytes
    )
    assert decoder.scratch_bytes == 0


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_checkpoint_are_known_before(llama: Path, tmp_path: Path, name: str) -> None:
    path = quantised(llama, tmp_path / "x", FORMATS[name])
    config, schemes = checked_config(path)
    decoder = load_decoder(path, dtype=torch.bfloat16, device="cpu")
    found = weight_bytes(config, torch.bfloat16, CPU, schemes)
    orders = {
        id(tensor): tensor.nbytes
        for layer in decoder.layers
        for tensor in held_tensors(layer)
        if tensor.dtype == torch.int64
    }
    assert found == decoder.weight_bytes - sum(orders.values())


def test_errors_of_formats_are_told(llama: Path, tmp_path: Path) -> None:
    def errors(path: Path, **options: object) -> list[FormatError]:
        return list(format_errors(path, dtype=torch.float32, device=CPU, **options))

    assert errors(llama) == []
    with pytest.raises(ConfigError, match=r"are not quantised, .* or give --quantization"):
        errors(llama, original=llama)
    rounded = errors(llama, quantization="int8")
    assert [one.module for one in rounded][:2] == [
        f"model.layers.0.self_attn.{name}_proj" for name in "qk"
    ]
    assert [one.module for one in rounded][14:] == ["lm_head"] * is_built()
    weights = load_file(llama / "model.safetensors")[f"{rounded[0].module}.weight"]
    value = dense(rounded_weight(weights, "int8"), torch.float32)
    off = ((value - weights).double().norm() / weights.double().norm()).item()
    assert rounded[0].weights == pytest.approx(off, rel=1e-5)
    # Rows' rounding comes on top: two errors of a like size.
    if is_built():
        assert 1.2 * off < rounded[0].products < 2.5 * off
    form = FORMATS["gptq_v2 of 8 bits, act-order, k left out"]
    path = quantised(llama, tmp_path / "x", form)
    alone, against = errors(path), errors(path, original=llama)
    assert len(alone) == len(against) == 12
    assert all(one.weights is None and one.products < 1e-5 for one in alone)
    assert all(1e-4 < one.weights < 1e-2 and one.products > 1e-4 for one in against)


def test_errors_of_mxfp4_are_told(tmp_path: Path) -> None:
    original = make_tiny("gpt_oss", tmp_path / "gpt_oss")
    path, modules = mxfp4(original, tmp_path / "mxfp4"), []
    for one in format_errors(path, dtype=torch.float32, device=CPU):
        assert one.weights is None
        assert one.products < 1e-5
        modules.append(one.module)
    assert modules == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    # The bytes are random: weights against the original are as far off as two random ones are.
    against = list(format_errors(path, dtype=torch.float32, device=CPU, original=original))
    assert all(one.weights > 0.9 and one.products > 0.9 for one in against)
