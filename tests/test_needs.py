"""What a model needs, before it is loaded."""

from __future__ import annotations

import json

import pytest

from onestem import LLM, SamplingParams
from onestem.models import sizes
from onestem.models.config import ModelConfig
from onestem.models.linear import Layout
from onestem.needs import needs_of
from onestem.options import EngineOptions
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout.PACKED_FLOAT32, ["matrices also packed, in float32"]),
        (Layout.PACKED_AND_PLAIN, ["matrices also plain, for many rows"]),
        (Layout.PACKED, []),
        (Layout.PLAIN, []),
    ],
)
def test_models_tells_the_files_from_the_memory(tmp_path, monkeypatch, layout, told):
    model = make_tiny("llama", tmp_path / "llama")
    monkeypatch.setattr(sizes, "choose_layout", lambda *_, **__: layout)
    needs = needs_of(EngineOptions(model=model, device="cpu", dtype="float32"))
    assert needs.file_bytes == (model / "model.safetensors").stat().st_size
    tied = ModelConfig.from_directory(model).tie_embeddings and layout is not Layout.PLAIN
    assert needs.copies == told + ["the embedding also as the head"] * tied


def test_ends_are_named_by_any_file(tmp_path):
    """A chat model made of a base model: its tokenizer alone has the end of a turn."""
    model = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(model, vocab_size=VOCAB_SIZE)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    of_text = needs_of(EngineOptions(model=model, device="cpu")).ends
    file.write_text(json.dumps(settings | {"eot_token": "b"}))
    of_turn = needs_of(EngineOptions(model=model, device="cpu")).ends
    assert settings["eos_token"] in of_text.values()
    assert set(of_turn.values()) - set(of_text.values()) == {"b"}
    with LLM(model, device="cpu", kv_memory="8MiB") as llm:
        (end,) = of_turn.keys() - of_text.keys()
        params = SamplingParams(max_tokens=8, logit_bias={end: 100.0}, temperature=0)
        (answer,) = llm.generate("a", params)
    assert (answer.outputs[0].finish_reason, len(answer.outputs[0].token_ids)) == ("stop", 1)
