"""The trained model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onestem import LLM
from tests.trained.oracle import gguf_file

MODEL = gguf_file()
ENGINE = {"device": "cpu", "dtype": "float32", "kv_memory": "512MiB"}


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **ENGINE) as llm:
        yield llm
