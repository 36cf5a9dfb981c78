from __future__ import annotations

import pytest

from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A tiny random model with a tokenizer: fast, and it never ends by itself."""
    path = make_tiny("llama", tmp_path_factory.mktemp("server") / "tiny")
    make_byte_level_tokenizer(path, VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A server of the embedded model, nobody needs a key."""
    with running(tmp_path_factory.mktemp("state")) as server:
        yield server
        server.check()
