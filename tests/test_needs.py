"""What a model needs, before it is loaded."""

from __future__ import annotations

import pytest

from onestem.models import weights
from onestem.models.config import ModelConfig
from onestem.models.linear import Layout
from onestem.needs import needs_of
from onestem.options import EngineOptions
from tests.models.tiny import make_tiny


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
    monkeypatch.setattr(weights, "choose_layout", lambda *_: layout)
    needs = needs_of(EngineOptions(model=model, device="cpu", dtype="float32"))
    assert needs.file_bytes == (model / "model.safetensors").stat().st_size
    tied = ModelConfig.from_directory(model).tie_embeddings and layout is not Layout.PLAIN
    assert needs.copies == told + ["the embedding also as the head"] * tied
