"""What is wrong with a GGUF file is told in one line, before memory is taken."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import OnestemError
from onestem.models.checkpoint import open_checkpoint
from onestem.models.config import GenerationDefaults, ModelConfig
from onestem.models.gguf.file import open_gguf
from onestem.models.tensors import Tensors
from tests.models.as_gguf import vocabulary, write_gguf
from tests.models.tiny import make_tiny

MOST_BYTES = 64 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    return write_whole(source, tmp_path_factory.mktemp("whole") / "model.gguf")


def write_whole(source: Path, file: Path) -> Path:
    """A model with a vocabulary: all bytes, two words and an end."""
    words = [*pre_tokenizers.ByteLevel.alphabet(), "ab", "abc", "<|end|>"]
    model = {"vocab": {word: i for i, word in enumerate(words)}, "merges": ["a b", "ab c"]}
    end = {"id": len(words) - 1, "content": "<|end|>", "special": True}
    fields = vocabulary({"model": model, "added_tokens": [end]}, "gpt-2")
    return write_gguf(source, file, change=lambda own: own.update(fields))


def read(file: Path, *, words: bool = True) -> None:
    """All that is read before the first weight."""
    config = ModelConfig.from_directory(file)
    GenerationDefaults.from_directory(file)
    open_checkpoint(file, Tensors(config), torch.float32, torch.device("cpu"))
    if words:
        Tokenizer.from_directory(file)


def refused(file: Path, told: str) -> None:
    with pytest.raises(OnestemError, match=told) as error:
        read(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


FIELDS = {
    "architecture": (
        {"general.architecture": "bloom"},
        r"general\.architecture is 'bloom', supported: llama, ",
    ),
    "missing": ({"llama.block_count": None}, r"llama\.block_count is missing, and llama needs it"),
    "a text": (
        {"llama.context_length": "long"},
        r"llama\.context_length is 'long', expected an integer",
    ),
    "a list": (
        {"llama.attention.head_count": [4, 2]},
        r"head_count is a list of 2, expected an integer",
    ),
    "zero": ({"llama.attention.head_count": 0}, r"head_count is 0, expected 1 or more"),
    "layers": ({"llama.block_count": 4096}, r"block_count is 4096, and it has 21 tensors"),
    "fewer layers": ({"llama.block_count": 1}, r"has no place for: blk\.1\.attn_k\.weight"),
    "values": (
        {"llama.attention.key_length": 16, "llama.attention.value_length": 8},
        r"value_length is 8",
    ),
    "rope": (
        {"llama.rope.dimension_count": 8},
        r"rope\.dimension_count is 8, supported: that of a head",
    ),
    "scaling": (
        {"llama.rope.scaling.type": "wild"},
        r"rope_type is 'wild', supported: default, linear",
    ),
    "model": (
        {"tokenizer.ggml.model": "rwkv"},
        r"tokenizer\.ggml\.model is 'rwkv', supported: gpt2",
    ),
    "no tokenizer": (
        {"tokenizer.ggml.model": None},
        r"has no tokenizer \(tokenizer\.ggml\.model\)",
    ),
    "pre": (
        {"tokenizer.ggml.pre": "bloom"},
        r"tokenizer\.ggml\.pre is 'bloom', supported: gpt-2, ",
    ),
    "no pre": ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is None, supported"),
    "no words": (
        {"tokenizer.ggml.tokens": None},
        r"tokenizer\.ggml\.tokens is missing, expected a list",
    ),
    "words twice": (
        {"tokenizer.ggml.tokens": ["a"] * 9},
        r"token_type has 259 kinds, and there are 9",
    ),
    "end": ({"tokenizer.ggml.eos_token_id": 999}, r"eos_token_id is 999, and there are 259 tokens"),
    "too many": (
        {"tokenizer.ggml.tokens": ["a"] * 300},
        r"has 300 tokens, and token_embd\.weight 288",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(source, whole, tmp_path, name):
    changes, told = FIELDS[name]
    words = {
        key: open_gguf(whole).header.strings(key)
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    }
    kinds = open_gguf(whole).header.numbers("tokenizer.ggml.token_type").tolist()
    own = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", **words}
    own["tokenizer.ggml.token_type"] = kinds

    def change(fields):
        fields |= own | changes
        for key in [key for key, value in fields.items() if value is None]:
            del fields[key]

    refused(write_gguf(source, tmp_path / "model.gguf", change=change), told)


def _without(arrays, name):
    del arrays[name]


def _other(array):
    return lambda arrays: arrays.update({"blk.0.attn_q.weight": array})


ARRAYS = {
    "a missing one": (
        lambda a: _without(a, "blk.1.attn_k.weight"),
        r"tensors that llama needs: blk\.1\.attn_k\.weight",
    ),
    "no embedding": (
        lambda a: _without(a, "token_embd.weight"),
        r"has no matrix token_embd\.weight",
    ),
    "a shape": (
        _other(np.zeros((8, 8), np.float32)),
        r"shapes: blk\.0\.attn_q\.weight is \[8, 8\], expected \[64, 64\]",
    ),
    "an unknown one": (
        lambda a: a.update(extra=np.zeros(4, np.float32)),
        r"has no place for: extra",
    ),
    "an unknown type": (
        _other(np.zeros((64, 64), np.int32)),
        r"blk\.0\.attn_q\.weight is I32, supported: F32, F16",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_tensors(source, tmp_path, name):
    change, told = ARRAYS[name]
    refused(write_gguf(source, tmp_path / "model.gguf", tensors=change), told)


def test_other_bytes(whole, tmp_path):
    file, data = tmp_path / "model.gguf", whole.read_bytes()

    def told(content: bytes, what: str) -> None:
        file.write_bytes(content)
        refused(file, what)

    told(b"", "begins with other bytes than GGUF: it is no GGUF file")
    told(b"GGML" + data[4:], "begins with other bytes than GGUF")
    told(data[:4] + struct.pack("<I", 1) + data[8:], "is GGUF of version 1, expected 2 and 3")
    told(data[:4] + struct.pack(">I", 3) + data[8:], "little-endian")
    told(data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "number of tensors is")
    told(data[:100], r"ends after 100 bytes, in its header \(.+\): it was cut")
    told(data[:-100], r"ends after \d+ bytes, and \S+ at \d+: it was cut")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_cut_file(whole, tmp_path, share):
    data = whole.read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: int(len(data) * share)])
    refused(tmp_path / "model.gguf", "it was cut")


def test_parts(source, tmp_path):
    first = write_gguf(source, tmp_path / "model.gguf", split=10)
    second = first.with_name("model-00002-of-00003.gguf")
    refused(second, r"is a part of a model: give the first, model-00001-of-00003\.gguf")
    first.rename(tmp_path / "other.gguf")
    refused(
        tmp_path / "other.gguf", "is one of 3 parts, expected the name NAME-00001-of-00003.gguf"
    )
    (tmp_path / "other.gguf").rename(first)
    second.rename(tmp_path / "away")
    refused(first, r"lacks parts that belong beside it: model-00002-of-00003\.gguf")
    (tmp_path / "away").rename(second)
    third = first.with_name("model-00003-of-00003.gguf")
    third.write_bytes(second.read_bytes())
    with pytest.raises(OnestemError, match=r"which \S+ has too"):
        read(first)


def test_overlapping_tensors(source, tmp_path):
    """Else a small file could ask for any memory."""
    file = write_gguf(source, tmp_path / "model.gguf")
    data, name = file.read_bytes(), b"blk.0.attn_k.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8 + 4
    file.write_bytes(data[:place] + struct.pack("<Q", 0) + data[place + 8 :])
    refused(file, "overlaps")


def damaged(data: bytes, end: int, draw: random.Random) -> bytes:
    """A file of which something before its data is other than it was."""
    content = bytearray(data)
    kind = draw.random()
    if kind < 0.1:
        return bytes(content[: draw.randrange(end)])
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        place = draw.randrange(4, end)
        if kind < 0.5:
            content[place] = draw.randrange(256)
        elif kind < 0.7:
            size = draw.choice((0, 1, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
            content[place : place + 8] = struct.pack("<Q", size)
        elif kind < 0.85:
            del content[place : place + draw.randint(1, 16)]
        else:
            content[place:place] = draw.randbytes(draw.randint(1, 16))
    return bytes(content)


@pytest.mark.filterwarnings("ignore")
def test_damaged_headers(whole, tmp_path):
    assert fuzz(whole, tmp_path, 400, seed=0) > 200


def fuzz(whole: Path, folder: Path, count: int, seed: int) -> int:
    """Read damaged headers; how many were refused in one line. Others may be read: a damaged name
    or a number may be as good as the one that was there."""
    data, draw, file = whole.read_bytes(), random.Random(seed), folder / "model.gguf"
    end = min(one.offset for one in open_gguf(whole).tensors.values())
    read(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = 0
    for i in range(count):
        file.unlink(missing_ok=True)
        file.write_bytes(damaged(data, end, draw))
        try:
            read(file, words=i % 4 == 0)
        except OnestemError as error:
            told += "\n" not in str(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_BYTES + len(data)
    return told
