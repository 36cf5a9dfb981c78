"""Models whose weights stay in the blocks of their GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onestem.engine.step import cpu
from onestem.errors import WeightsError
from onestem.models import linear, weights
from onestem.models.config import ModelConfig
from onestem.models.decoder import Decoder
from onestem.models.format_errors import format_errors
from onestem.models.formats.products import CpuProduct
from onestem.models.formats.tables import PackedHead, PackedTable
from onestem.models.gguf.file import BLOCKS, open_gguf
from onestem.models.linear import Linear
from onestem.models.sizes import formats_of, weight_bytes
from onestem.models.updates import checked_tensors
from onestem.models.weights import load_decoder
from onestem.needs import needs_of
from onestem.ops.cpu import chosen_isa, is_built
from onestem.options import EngineOptions
from tests.engine.harness import answer, make_engine, requests_for, shared_prompts
from tests.engine.test_recorded import answers, open_llm
from tests.models.as_gguf import write_gguf
from tests.models.dense import log_probabilities, most_off, prompt, rows_are_bytes
from tests.models.tiny import make_tiny
from tests.parallel.test_parts import logits_of, together

pytestmark = pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")

CPU, HALF = torch.device("cpu"), torch.bfloat16
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 288}
CHANGES = {"gpt2": {"n_embd": 256, "vocab_size": 288}}
TIED, OWN_HEAD = "llama_mha_tied", "llama_biases"
IDS = prompt(24, 288)

# What files that are called so mix.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_output": "Q5_K"}


def mixed(name: str) -> str:
    """The type of a tensor of a Q4_K_M file, more or less."""
    return next((kind for part, kind in MIXED.items() if part in name), "Q4_K")


KINDS = {**{kind: kind for kind in BLOCKS}, "mixed": mixed}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind and family."""
    folder = tmp_path_factory.mktemp("kept")
    made: dict[str, Path] = {}

    def make(kind: str, family: str = TIED) -> Path:
        name = f"{family}-{kind}"
        if name not in made:
            source = make_tiny(family, folder / f"{name}-source", changes=CHANGES.get(family, WIDE))
            made[name] = write_gguf(source, folder / f"{name}.gguf", kind=KINDS[kind])
        return made[name]

    return make


def loaded(path: Path, dtype: torch.dtype = HALF) -> Decoder:
    return load_decoder(path, dtype=dtype, device=CPU)


def off(decoder: Decoder, exact: Decoder) -> float:
    return float((log_probabilities(decoder, IDS) - log_probabilities(exact, IDS)).abs().mean())


@pytest.mark.parametrize("family", [TIED, OWN_HEAD, "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities(files, monkeypatch, family, kind):
    """Are off by no more than those of the numbers in 16 bits (`most_off`)."""
    path = files(kind, family)
    kept, exact = loaded(path), loaded(path, torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(weights, "kept_by", lambda target, quantization: lambda scheme: False)
        rounded = loaded(path)
    names = {kind} if kind != "mixed" else {"Q4_K", "Q5_K", "Q6_K"}
    linears = [one for layer in kept.layers for one in layer.linears]
    assert {name for one in linears for name in one.kind.split("; ")} == names
    assert isinstance(kept.head, PackedHead)
    assert isinstance(kept.embedding, PackedTable)
    assert isinstance(exact.layers[0].output, Linear)
    assert isinstance(rounded.layers[0].output, Linear)
    assert off(kept, exact) < most_off() * off(rounded, exact)


def test_a_tied_head_has_the_codes_of_the_table(files):
    decoder = loaded(files("mixed"))
    assert decoder.head.codes is decoder.embedding.packed
    apart = loaded(files("mixed", OWN_HEAD))
    assert apart.head.codes is not apart.embedding.packed


def test_steps_are_padded_for_products_by_amx_alone(files, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "_has_amx", lambda: True)
    path = files("Q8_0")
    source = path.with_name(f"{path.stem}-source")
    kinds = {"attn_v": "F16"}
    half = write_gguf(source, tmp_path / "half", kind=lambda name: kinds.get(name[6:12], "Q8_0"))
    whole = load_decoder(path, dtype=HALF, device=CPU, quantization="int8")
    assert [one.padded_rows(5) for one in (loaded(path), whole, loaded(half))] == [5, 5, 8]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("family", [TIED, "llama"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "mixed"])
def test_bytes(files, family, kind, dtype):
    """Are known before, and those of the file."""
    path = files(kind, family)
    decoder = loaded(path, dtype)
    config = ModelConfig.from_directory(path)
    forms = formats_of(config, None, dtype, CPU)
    assert weight_bytes(config, dtype, CPU, forms) == decoder.weight_bytes
    if dtype == HALF:
        stored = sum(raw.num_bytes for raw in open_gguf(path).tensors.values())
        assert decoder.weight_bytes < 1.15 * stored or kind == "mixed"


def tokens(path: Path, **options) -> list[list[int]]:
    outputs = answer(make_engine(path, dtype=HALF, **options), requests_for(shared_prompts()))
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(outputs))]


@pytest.mark.parametrize("kind", ["Q4_1", "mixed"])
def test_answers_do_not_depend_on_sharing(files, kind):
    path = files(kind)
    found = [tokens(path, share=mode) for mode in ("full", "storage", "off")]
    found.append(tokens(path, max_step_tokens=16, num_pages=64))
    for other in found[1:]:
        differ = sum(a != b for a, b in zip(found[0], other, strict=True))
        # A near tie falls the other way more often; with AMX few rows are not rounded as many are.
        assert differ <= (3 if chosen_isa() == "amx_bf16" else rows_are_bytes())


def test_steps_of_mixed_formats_are_recorded(files, monkeypatch):
    found = []
    for most in (4, 0):
        monkeypatch.setattr(cpu, "MOST_ROWS", most)
        with open_llm(files("mixed"), dtype="bfloat16") as llm:
            found.append(answers(llm, 0, requests=4))
            recorded = llm.engine.launcher.runner.recorded
            assert len({rows for rows, _ in recorded}) == most
            assert None not in recorded.values()
    assert found[0] == found[1]


@pytest.mark.parametrize("family", [TIED, OWN_HEAD])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "mixed"])
def test_ranks_have_parts_of_blocks(files, kind, family):
    path = files(kind, family)
    whole = loaded(path)
    decoders, found = together(path, 2, dtype=HALF)
    for decoder in decoders:
        assert isinstance(decoder.layers[0].mlp.down, CpuProduct)
        assert isinstance(decoder.embedding, PackedTable)
    expected = logits_of(whole)
    for logits in found:
        assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_ranks_agree_on_padding(tmp_path, monkeypatch):
    """Where groups of 32 divide unevenly, and 16 columns of one rank stay in 16 bits."""
    monkeypatch.setattr(linear, "_has_amx", lambda: True)
    path = make_tiny("llama_head_dim", tmp_path)
    decoders, _ = together(path, 4, dtype=HALF, quantization="int4")
    assert len({one.padded_rows(3) for one in decoders}) == 1


def test_another_format_that_is_asked_for_is_made_of_the_numbers(files):
    path = files("Q4_1")
    decoder = load_decoder(path, dtype=HALF, device=CPU, quantization="int8")
    assert decoder.layers[0].output.kind == "int8 per channel, rows in int8"


def test_weights_cannot_be_written(files):
    decoder = loaded(files("mixed"))
    with pytest.raises(WeightsError, match="the weights are Q4_K, Q6_K, Q5_K, which cannot be"):
        checked_tensors(decoder.config, (), decoder.quantised)


def test_what_is_kept_is_told(files):
    options = {"model": str(files("mixed")), "device": "cpu", "kv_memory": "1MiB"}
    needs = needs_of(EngineOptions(**options, dtype="bfloat16"))
    assert needs.quantization == "Q4_K, Q6_K, Q5_K, kept as they are stored"
    assert needs.copies == []
    assert needs.weight_bytes == loaded(files("mixed")).weight_bytes
    assert needs_of(EngineOptions(**options)).quantization.endswith(
        "de-quantised to float32 as they are read"
    )


def test_errors_of_products(files):
    found = list(format_errors(files("mixed"), dtype=HALF, device=CPU))
    assert {one.kind for one in found} == {"Q4_K", "Q5_K", "Q6_K"}
    assert len(found) == 14
    assert all(0 < one.products < 2**-7 for one in found)
