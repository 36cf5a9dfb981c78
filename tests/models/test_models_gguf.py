"""GGUF files give what the models that they were written from give."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from onestem.models.gguf.architectures import ARCHITECTURES
from onestem.models.gguf.file import open_gguf
from onestem.models.weights import load_decoder
from tests.models.as_gguf import CHANGES, write_gguf
from tests.models.dense import log_probabilities, oracle, prompt
from tests.models.tiny import make_tiny

TOLERANCE = 1e-4


@functools.cache
def source(family: str, folder: Path) -> Path:
    return make_tiny(family, folder / family, changes=CHANGES[family])


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return lambda family: source(family, folder)


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
