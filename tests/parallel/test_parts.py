"""Ranks that hold a model together give what the whole gives, and each reads its part alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onestem.errors import ConfigError
from onestem.models import checkpoint
from onestem.models.checkpoint import open_checkpoint
from onestem.models.config import ModelConfig
from onestem.models.cuts import Cut
from onestem.models.decoder import Decoder
from onestem.models.formats import products
from onestem.models.formats.held import Channels, Weight, dense, rounded_weight
from onestem.models.formats.products import Target, projection
from onestem.models.linear import Layout
from onestem.models.names import Role
from onestem.models.part import part_of, sizes_of
from onestem.models.ranks import ALONE, Ranks
from onestem.models.shards import opened
from onestem.models.sizes import weight_bytes
from onestem.models.tensors import Tensors
from onestem.models.updates import checked_tensors, write_tensors
from onestem.models.weights import load_decoder
from onestem.ops.cpu import is_built
from onestem.shapes import find_shape, shape_names
from tests.models.changed import changed_model, tensors_of
from tests.models.dense import dense_attend, fresh_states, prompt
from tests.models.quantised import FORMATS, mxfp4, quantised
from tests.models.tiny import FAMILIES, make_tiny
from tests.parallel.gloo import Answer, on_processes
from tests.parallel.threads import on_ranks

CPU = torch.device("cpu")
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
SIZES = (2, 4)
TOLERANCE = 1e-5  # of the largest logit; sums have another order
IDS = prompt(40, 270)

Tiny = Callable[[str], Path]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda family: make_tiny(family, root / family))


def logits_of(decoder: Decoder) -> Tensor:
    positions = torch.arange(len(IDS))
    attend = dense_attend(decoder.part, positions)
    hidden = decoder.forward(IDS, positions, attend, states=fresh_states(decoder, 1, len(IDS)))
    return decoder.logits(hidden)


def together(path: Path, size: int, **options: Any) -> tuple[list[Decoder], list[Tensor]]:
    """The decoders of ranks, and what each of them gives."""

    def one(ranks: Ranks) -> tuple[Decoder, Tensor]:
        decoder = load_decoder(path, **{**FLOAT32, **options}, ranks=ranks)
        return decoder, logits_of(decoder)

    pairs = on_ranks(size, one)
    return [decoder for decoder, _ in pairs], [logits for _, logits in pairs]


def check(found: list[Tensor], whole: Tensor) -> None:
    """All ranks give the same bits, and what the whole gives but for the order of sums."""
    assert all(torch.equal(one, found[0]) for one in found[1:])
    assert found[0].is_contiguous()
    assert found[0].shape == whole.shape
    assert (found[0] - whole).abs().max() <= TOLERANCE * whole.abs().max()
    assert torch.equal(found[0].argmax(1), whole.argmax(1))


@pytest.mark.parametrize("name", shape_names())
def test_a_rank_s_cuts_are_the_tensors_of_its_part(name: str) -> None:
    """What the whole model's table says of a rank, and the table of the rank's smaller model."""
    config = ModelConfig.from_directory(find_shape(name))
    for size in (1, *SIZES, 8):
        for rank in range(size if size in sizes_of(config) else 0):
            ranks = Ranks(rank, size, None)
            shapes = {}
            for spec in Tensors(config, ranks):
                shape = list(spec.shape)
                if spec.cut is not None:
                    shape[spec.cut.dim] = len(spec.cut)
                shapes[spec.name] = tuple(shape)
            assert shapes == Tensors(part_of(config, ranks)).shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_every_family(tiny: Tiny, family: str) -> None:
    path = tiny(family)
    whole = load_decoder(path, **FLOAT32)
    expected = logits_of(whole)
    assert whole.part is whole.config
    sizes = [size for size in SIZES if size in sizes_of(whole.config)]
    # One has six heads, others two key heads of the delta rule.
    assert len(sizes) == 2 or family == "mpt_clip" or whole.config.delta is not None
    for size in sizes:
        decoders, found = together(path, size)
        check(found, expected)
        for decoder in decoders:
            assert decoder.config == whole.config
            assert decoder.num_parameters == whole.num_parameters
            assert decoder.weight_bytes == weight_bytes(decoder.part, torch.float32, CPU)
            assert decoder.part.num_q_heads * size == whole.config.num_q_heads
            assert decoder.state_bytes * size == whole.state_bytes
            kv = decoder.kv_bytes_per_token / whole.kv_bytes_per_token
            assert 1 / size <= kv <= 1
            assert kv == 1 / size or min(h.num_kv_heads for h in whole.config.heads) < size
            plain = [tensor for tensor in decoder.tensors if not tensor.is_mkldnn]
            for storage in {tensor.untyped_storage() for tensor in plain}:
                held = [one.nbytes for one in plain if one.untyped_storage() == storage]
                assert storage.nbytes() <= sum(held)  # no view of a whole
        # Norms, routers and what there is of other kinds are whole on each.
        assert sum(decoder.weight_bytes for decoder in decoders) < 1.5 * whole.weight_bytes


@pytest.mark.parametrize(
    ("family", "name"),
    [("phi", name) for name in FORMATS]
    + [
        ("llama_biases", "fp8 in blocks"),
        ("llama_biases", "gptq, act-order"),
        ("llama_biases", "awq"),
        ("mixtral", "fp8 in blocks"),
        ("phi3", "packed int4, zero points"),
        ("gemma4", "int8"),
        ("qwen3_5", "fp8 in blocks"),
        ("qwen3_5", "gptq, act-order"),
    ],
)
def test_parts_of_every_format(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    """A part of a stored weight is that of the whole's, to the last bit."""
    form = FORMATS[name]
    left_out = (*form.left_out, "conv1d", "in_proj_a", "in_proj_b")
    path = quantised(tiny(family), tmp_path / "quantised", replace(form, left_out=left_out))
    config = ModelConfig.from_directory(path)
    sizes = [size for size in SIZES if size in sizes_of(config)]
    source = open_checkpoint(path, Tensors(config), torch.float32, CPU)
    wholes = {
        module: dense(source.weight(spec), torch.float32)
        for module, (_, spec) in source.schemes.items()
    }
    assert len(wholes) >= 8
    for size in sizes:
        kept = 0
        for rank in range(size):
            tensors = Tensors(config, Ranks(rank, size, None))
            part = open_checkpoint(path, tensors, torch.float32, CPU)
            for module, whole in wholes.items():
                spec = part.schemes[module][1]
                weight: Weight = part.weight(spec)
                expected = whole if spec.cut is None else spec.cut.of(whole)
                assert torch.equal(dense(weight, torch.float32), expected), (rank, module)
                kept += not isinstance(weight, Tensor)
        assert kept == size * len(wholes)
    whole_logits = logits_of(load_decoder(path, **FLOAT32))
    for size in sizes:
        check(together(path, size)[1], whole_logits)
    with monkeypatch.context() as patched:  # rows are multiplied as they are
        patched.setattr(products, "is_built", lambda: False)
        exact = logits_of(load_decoder(path, **FLOAT32))
        for size in sizes:
            check(together(path, size)[1], exact)
    off = (whole_logits - exact).abs().max()
    assert (off > 1e-3) == (FORMATS[name].rounds and is_built())


@pytest.mark.parametrize("name", FORMATS)
def test_any_part_of_a_stored_weight(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Spans that words and groups do not end with."""
    path = quantised(tiny("llama_biases"), tmp_path / "quantised", FORMATS[name])
    config = ModelConfig.from_directory(path)
    tensors = Tensors(config)
    source = open_checkpoint(path, tensors, torch.float32, CPU)
    for role in (Role.OUTPUT, Role.UP, Role.Q):
        weight = tensors.layers[1][role]
        whole = source(weight)
        for spans in ([(3, 11), (20, 29)], [(0, 1)], [(61, 64)], [(8, 40)], [(5, 37)], [(0, 48)]):
            for dim in (0, 1) if len(spans) == 1 else (0,):
                cut = Cut(dim, tuple(spans))
                part = source(replace(weight, cut=cut))
                assert torch.equal(part, cut.of(whole)), (role, cut)


@pytest.mark.parametrize("family", ["phi", "llama_biases"])
def test_act_order_stays_in_codes(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """A rank's groups are filled up, and multiplied as codes."""
    path = quantised(tiny(family), tmp_path / "quantised", FORMATS["gptq, act-order"])
    options = {"dtype": torch.bfloat16}
    whole = load_decoder(path, device="cpu", **options)
    exact = logits_of(load_decoder(path, **FLOAT32))
    off = (logits_of(whole) - exact).abs().max()
    for size in SIZES:
        decoders, found = together(path, size, **options)
        for decoder in decoders:
            down = decoder.layers[1].mlp.down
            assert down.in_features == decoder.part.intermediate_size
            assert not is_built() or down.kind.startswith("int4 in groups of 32")
        assert (found[0] - exact).abs().max() <= 2 * off


def test_experts_of_four_bits(tiny: Tiny, tmp_path: Path) -> None:
    path = mxfp4(tiny("gpt_oss"), tmp_path / "mxfp4")
    whole = load_decoder(path, **FLOAT32)
    for size in (2, 3):
        ranks = Ranks(0, size, None)
        if size in sizes_of(whole.config):
            decoders, found = together(path, size)
            check(found, logits_of(whole))
            sizes = [decoder.part.experts.intermediate_size for decoder in decoders]
            assert sizes == [32, 64]
        else:
            with pytest.raises(ConfigError, match=r"num_attention_heads \(4\).*over 3.*1, 2 "):
                part_of(whole.config, ranks)
    with pytest.raises(ConfigError, match=r"96 in blocks of 32: mxfp4.*over 4 devices.*1, 2 for"):
        load_decoder(path, **FLOAT32, ranks=Ranks(0, 4, None))


@pytest.mark.parametrize("name", ["int8", "fp8 per channel", "gptq, act-order"])
def test_quantised_experts(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Cut by columns; int8's rows are rounded as the whole rows are."""
    path = quantised(tiny("mixtral"), tmp_path / "quantised", FORMATS[name])
    decoders, found = together(path, 2)
    check(found, logits_of(load_decoder(path, **FLOAT32)))
    of_ranks = [decoder.layers[1].mlp.products.experts for decoder in decoders]
    sizes = [32, 64] if "gptq" in name else [48, 48]
    assert [mlps[3].down.in_features for mlps in of_ranks] == sizes


@pytest.mark.parametrize("rows", ["as they are", "rounded"])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_parts_are_rounded_when_they_are_loaded(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, form: Any, rows: str
) -> None:
    """As the whole is: channels, groups that a cut divides, and rows."""
    options = {"quantization": form}
    if rows == "as they are":
        monkeypatch.setattr(products, "is_built", lambda: False)
    for family in ("phi", "gpt2", "mixtral"):
        whole = load_decoder(tiny(family), **FLOAT32, **options)
        for size in SIZES:
            decoders, found = together(tiny(family), size, **options)
            for decoder in decoders:
                assert form in decoder.layers[0].qkv.kind
                assert form in decoder.layers[0].output.kind or (form, size) == ("int4", 4)
            check(found, logits_of(whole))


@pytest.mark.parametrize("cuts", [(0, 64, 192, 256), (0, 96, 100, 256), (0, 16, 256)])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_a_part_is_rounded_as_in_the_whole(form: Any, cuts: tuple[int, ...]) -> None:
    """To the last bit, wherever it is cut; a row of zeros too."""
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    weight[:, 97] *= 9
    whole = dense(rounded_weight(weight, form), torch.float32)

    def one(ranks: Ranks) -> Tensor:
        part = weight[:, cuts[ranks.rank] : cuts[ranks.rank + 1]]
        return dense(rounded_weight(part, form, ranks), torch.float32)

    assert torch.equal(torch.cat(on_ranks(len(cuts) - 1, one), dim=1), whole)


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_rows_of_parts_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    """Products of int8 on a CPU, where one part's values are far smaller than the other's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 200, generator=generator).to(dtype)
    x[:, :80] /= 50
    x[3], x[4, 80:] = 0, 0
    weight = rounded_weight(torch.randn(40, 200, generator=generator), "int8")
    assert isinstance(weight, Channels)
    bias = torch.randn(40, generator=generator).to(dtype)
    target = Target(dtype, CPU, Layout.PLAIN)

    def one(ranks: Ranks) -> Tensor:
        at = slice(0, 80) if ranks.rank == 0 else slice(80, 200)
        part = Channels(weight.codes[:, at].contiguous(), weight.scales)
        own = bias if ranks.rank == 0 else torch.zeros_like(bias)
        return ranks.sum(projection([part], own, None, target, ranks)(x[:, at]))

    whole = projection([weight], bias, None, target)(x)
    assert all(torch.equal(found, whole) for found in on_ranks(2, one))


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, 4) for family in ("gpt_oss", "olmo2", "gpt2", "falcon_40b", "mixtral")]
    + [(family, 2) for family in ("qwen3_5", "qwen3_next")],
)
def test_parts_are_written_again(tiny: Tiny, tmp_path: Path, family: str, size: int) -> None:
    other = changed_model(tiny(family), tmp_path / "other")

    def one(ranks: Ranks) -> Tensor:
        decoder = load_decoder(tiny(family), **FLOAT32, ranks=ranks)
        write_tensors(decoder, checked_tensors(decoder.config, tensors_of(other).items()))
        return logits_of(decoder)

    check(on_ranks(size, one), logits_of(load_decoder(other, **FLOAT32)))


@pytest.mark.parametrize("family", ["phi", "gpt2", "gemma4_image", "qwen3_5_image", "qwen3_next"])
def test_random_weights_and_an_uneven_vocabulary(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """They are the whole's; the last rank has fewer rows of head, bias and tables."""
    fields = json.loads((tiny(family) / "config.json").read_text())
    text = fields.get("text_config", fields)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        text |= {name: 283} if name in text else {}
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        text |= {name: 2 * text[name]} if name in text else {}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {"random_weights": True, "seed": 3}
    whole = load_decoder(tmp_path, **FLOAT32, **options)
    for size in SIZES:
        check(together(tmp_path, size, **options)[1], logits_of(whole))


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_attention_heads": 71, "hidden_size": 142}, 2, r"num_attention_heads \(71\).*1 for"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, r"heads \(6\).*1, 2, 3, 6, 12"),
        ({"intermediate_size": 3, "num_attention_heads": 4}, 4, r"intermediate_size \(3\).*1, 2 "),
        ({}, 4, r"linear_num_key_heads \(2\).*1, 2 for"),
    ],
)
def test_what_does_not_divide_is_named(
    tiny: Tiny, tmp_path: Path, changes: dict[str, int], size: int, words: str
) -> None:
    family = "yi" if changes else "qwen3_5"
    fields = json.loads((tiny(family) / "config.json").read_text()) | {"head_dim": 2} | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {**FLOAT32, "random_weights": True}
    with pytest.raises(ConfigError, match=f"{words}.*this model") as error:
        load_decoder(tmp_path, **options, ranks=Ranks(1, size, None))
    assert f"over {size} devices" in str(error.value)


class _Counted:
    """An open file that counts the bytes that are read of it."""

    def __init__(self, handle: Any, count: Callable[[Tensor], Tensor]) -> None:
        self.handle, self.count = handle, count

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        return self.count(self.handle.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        part, count = self.handle.get_slice(name), self.count

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, at: Any) -> Tensor:
                return count(part[at])

        return Slice()


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama_mha_tied", None), ("gpt2", None), ("phi3", None), ("mixtral", None)]
    + [("phi", name) for name in ("fp8 per channel", "packed int4", "gptq", "awq")],
)
def test_each_rank_reads_its_part_alone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, name: str | None
) -> None:
    path = tiny(family)
    if name is not None:
        path = quantised(path, tmp_path / "quantised", FORMATS[name])
    read: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        read.append(tensor.nbytes)
        return tensor

    config = ModelConfig.from_directory(path)
    monkeypatch.setattr(checkpoint, "opened", lambda file: _Counted(opened(file), count))

    def bytes_read(ranks: Ranks) -> int:
        tensors = Tensors(config, ranks)
        source = open_checkpoint(path, tensors, torch.float32, CPU)
        read.clear()  # scales, which are checked
        for tensor in tensors:
            for experts in source.singles(tensor) or [[tensor]]:
                for one in experts:
                    source(one)
        return sum(read)

    whole = bytes_read(ALONE)
    parts = [bytes_read(Ranks(rank, 2, None)) for rank in range(2)]
    if name is None:
        part = part_of(config, Ranks(0, 2, None))
        assert parts[0] == 4 * Tensors(part).num_parameters
    # What both read are norms, routers and, of codes, their scales.
    assert whole <= sum(parts) < 1.2 * whole
    assert max(parts) < 0.6 * whole


def test_processes_that_speak_through_gloo(tiny: Tiny, tmp_path: Path) -> None:
    """The real collectives, in each dtype."""
    path = tiny("olmo2")
    answers: list[Answer] = on_processes(2, path, IDS.tolist(), tmp_path)
    whole = load_decoder(path, **FLOAT32)
    check([answer.logits for answer in answers], logits_of(whole))
    for rank, answer in enumerate(answers):
        assert answer.rank == rank
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(answer.sums[dtype], torch.full((3, 5), 3.0, dtype=dtype))
            expected = torch.tensor([[1, 1, 2, 2], [1, 1, 2, 2], [1, 1, 2, 2]], dtype=dtype)
            assert torch.equal(answer.gathered[dtype], expected)
