"""Each tiny model is written and loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from onestem.models.decoder import Decoder
from onestem.models.weights import load_decoder
from tests.models.tiny import FAMILIES, make_tiny


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and on a busy machine wait long for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def decoder(directory: Path) -> Decoder:
    return load_decoder(directory, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a family's tiny model. Not to be written to."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda family: make_tiny(family, root / family))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that need no family in particular. Not to be written to."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))
