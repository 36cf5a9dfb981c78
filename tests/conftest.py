"""What tests of many folders take."""

from __future__ import annotations

import pytest

from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template."""
    path = make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return path
