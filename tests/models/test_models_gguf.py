"""GGUF files give what the models that they were written from give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from onestem.batch import model_identity
from onestem.build import pick_dtype
from onestem.errors import WeightsError
from onestem.models.checkpoint import open_checkpoint
from onestem.models.config import ModelConfig
from onestem.models.gguf import architectures, values
from onestem.models.gguf.architectures import ARCHITECTURES
from onestem.models.gguf.file import TYPES, RawTensor, open_gguf
from onestem.models.gguf.values import values_of
from onestem.models.gguf_tensors import gguf_tensors
from onestem.models.ranks import Ranks
from onestem.models.tensors import Tensors
from onestem.models.weights import load_decoder
from onestem.needs import needs_of
from onestem.ops.cpu import is_built
from onestem.options import EngineOptions
from tests.models.as_gguf import CHANGES, write_gguf
from tests.models.dense import log_probabilities, oracle, prompt
from tests.models.tiny import make_tiny

TOLERANCE = 1e-4

Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    """Directory of a family's tiny model."""
    folder = tmp_path_factory.mktemp("gguf")
    done: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in done:
            done[family] = make_tiny(family, folder / family, changes=CHANGES[family])
        return done[family]

    return make


@pytest.mark.parametrize("family", CHANGES)
def test_every_family(made, tmp_path, family):
    """Log-probabilities over the whole vocabulary equal those of transformers."""
    directory = made(family)
    file = write_gguf(directory, tmp_path / "model.gguf")
    decoder = load_decoder(file, dtype=torch.float32, device="cpu")
    ids = prompt(64, decoder.config.vocab_size)
    torch.testing.assert_close(
        log_probabilities(decoder, ids)[0], oracle(directory, ids), atol=TOLERANCE, rtol=0
    )


def test_every_architecture_is_tried(made, tmp_path):
    tried = set()
    for family in CHANGES:
        file = write_gguf(made(family), tmp_path / f"{family}.gguf")
        tried.add(open_gguf(file).header.fields["general.architecture"])
    assert tried == set(ARCHITECTURES)


@pytest.mark.parametrize("family", ["llama", "falcon_40b", "gpt_oss", "gpt2", "qwen3_5"])
def test_a_rank_reads_its_part(made, tmp_path, family):
    file = write_gguf(made(family), tmp_path / "model.gguf")
    config = ModelConfig.from_directory(file)

    def source(where: Path, tensors: Tensors):
        return open_checkpoint(where, tensors, torch.float32, torch.device("cpu"))

    for rank in range(2):
        tensors = Tensors(config, Ranks(rank, 2, None))
        ours, truth = source(file, tensors), source(made(family), tensors)
        for spec in tensors:
            assert torch.equal(ours(spec), truth(spec)), spec.name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_their_numbers(made, tmp_path, kind):
    """As the model whose weights are the numbers that the blocks stand for."""
    wanted = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]

    def widen(arrays):
        for name, array in arrays.items():
            if array.ndim > 1 and array.shape[-1] % block == 0:
                stored = gguf.quants.quantize(array, wanted)
                arrays[name] = gguf.quants.dequantize(stored, wanted)

    blocks = write_gguf(made("llama"), tmp_path / "blocks.gguf", kind=kind)
    plain = write_gguf(made("llama"), tmp_path / "plain.gguf", tensors=widen)
    assert blocks.stat().st_size < plain.stat().st_size
    ids = prompt(32, 288)
    ours, truth = (
        log_probabilities(load_decoder(one, dtype=torch.float32, device="cpu"), ids)
        for one in (blocks, plain)
    )
    assert torch.equal(ours, truth)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_blocks_are_arranged_as_their_numbers(made, tmp_path, family):
    file = write_gguf(made(family), tmp_path / "model.gguf", kind="Q8_0")
    tensors = Tensors(ModelConfig.from_directory(file))
    held = gguf_tensors(file, tensors)
    for spec in tensors.matrices:
        one = held[spec.name]
        if one.parts[0].kind == "Q8_0":
            assert torch.equal(one.groups(None).dense(), one.read(None, torch.float32)), spec.name


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_and_their_numbers(tmp_path, kind, monkeypatch):
    """A reader gives blocks as they are, and numbers in pieces as in one."""
    monkeypatch.setattr(values, "CHUNK", 2 * 512)
    known = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[known]
    row_bytes = 512 // block * block_bytes
    stored = np.random.default_rng(0).integers(0, 64, (7, row_bytes), np.uint8)  # all finite
    (tmp_path / "data").write_bytes(b"before" + stored.tobytes())
    raw = RawTensor("a", (7, 512), kind, row_bytes, tmp_path / "data", 6)
    assert np.array_equal(raw.blocks(), stored)
    assert np.array_equal(raw.blocks(2, 5), stored[2:5])
    truth = torch.from_numpy(gguf.quants.dequantize(stored, known)).reshape(7, 512)
    assert torch.equal(values_of(raw, torch.float32), truth)
    assert torch.equal(values_of(raw, torch.bfloat16), truth.bfloat16())
    with torch.inference_mode():  # as checks of formats read
        assert torch.equal(values_of(raw, torch.float32), truth)


def test_scales_that_are_not_finite(tmp_path):
    (tmp_path / "data").write_bytes(bytes([0, 0x7E]) + bytes(16))
    raw = RawTensor("a", (1, 32), "Q4_0", 18, tmp_path / "data", 0)
    with pytest.raises(WeightsError, match="a has scales that are not finite: the file is damaged"):
        values_of(raw, torch.float32)


def test_a_file_that_becomes_shorter(tmp_path):
    (tmp_path / "data").write_bytes(bytes(100))
    raw = RawTensor("a", (1, 32), "F32", 128, tmp_path / "data", 0)
    with pytest.raises(WeightsError, match="a was cut while it was read"):
        values_of(raw, torch.float32)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")],
)
def test_dtype_of_most_weights(made, tmp_path, kind, dtype):
    file = write_gguf(made("llama"), tmp_path / "model.gguf", kind=kind)
    assert ModelConfig.from_directory(file).torch_dtype == dtype


def test_blocks_of_large_models_stay(made, tmp_path, monkeypatch):
    """Also on a CPU without instructions for bfloat16, as they have products of their own."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    cpu = torch.device("cpu")
    small = ModelConfig.from_directory(write_gguf(made("llama"), tmp_path / "b.gguf", kind="Q8_0"))
    assert pick_dtype("auto", small, cpu) == torch.float32
    monkeypatch.setattr(architectures, "SMALL_MODEL", 1)
    large = ModelConfig.from_directory(write_gguf(made("llama"), tmp_path / "b.gguf", kind="Q8_0"))
    assert pick_dtype("auto", large, cpu) == (torch.bfloat16 if is_built() else torch.float32)
    whole = ModelConfig.from_directory(write_gguf(made("llama"), tmp_path / "w.gguf", kind="BF16"))
    assert pick_dtype("auto", whole, cpu) == torch.float32


def test_parts_are_one_model(made, tmp_path):
    whole = write_gguf(made("qwen3"), tmp_path / "whole.gguf")
    first = write_gguf(made("qwen3"), tmp_path / "model.gguf", split=7)
    assert first.name == "model-00001-of-00004.gguf"
    file, one = open_gguf(first), open_gguf(whole)
    assert len(file.parts) == 4
    assert file.num_bytes == sum(part.stat().st_size for part in tmp_path.glob("model-*"))
    assert file.tensors.keys() == one.tensors.keys()
    ids = prompt(16, 288)
    ours, truth = (
        log_probabilities(load_decoder(path, dtype=torch.float32, device="cpu"), ids)
        for path in (first, whole)
    )
    assert torch.equal(ours, truth)


def test_numbers_of_32_bits_are_what_their_writer_had(made, tmp_path):
    file = write_gguf(made("granite"), tmp_path / "model.gguf")
    assert ModelConfig.from_directory(file).residual_scale == 0.6


def test_what_becomes_of_blocks_is_told(made, tmp_path):
    file = write_gguf(made("llama"), tmp_path / "model.gguf", kind="Q4_0")
    needs = needs_of(EngineOptions(model=str(file), device="cpu", kv_memory="1MiB"))
    assert needs.quantization == "Q4_0, de-quantised to float32 as they are read"
    assert needs.file_bytes == file.stat().st_size
    assert needs.problem is None


def test_identity_is_of_all_parts(made, tmp_path):
    first = write_gguf(made("llama"), tmp_path / "model.gguf", split=12)
    before = model_identity(first)
    last = open_gguf(first).parts[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert model_identity(first) != before


def test_unknown_fields_are_named(made, tmp_path, caplog):
    def change(fields):
        fields["llama.attention.sliding_window"] = 4096

    file = write_gguf(made("llama"), tmp_path / "model.gguf", change=change)
    ModelConfig.from_directory(file)
    assert "llama.attention.sliding_window: not known here, and left out" in caplog.text
