"""Tiny models, made once for all of the engine's tests."""

from __future__ import annotations

from functools import cache

import pytest

from onestem.engine.engine import Engine
from onestem.engine.schedule.waiting import SourceError
from tests.engine.harness import oracle_greedy, oracle_logprobs, shared_prompts
from tests.models.tiny import make_tiny

NEW_TOKENS = 6


@pytest.fixture(autouse=True)
def steps_that_fail(request, monkeypatch):
    """An engine goes on after a step that fails; a test does not, unless it is marked."""
    failed: list[Exception] = []
    contain = Engine._contain

    def noted(self, error, draft):
        if not isinstance(error, SourceError):
            failed.append(error)
        contain(self, error, draft)

    monkeypatch.setattr(Engine, "_contain", noted)
    yield failed
    if failed and request.node.get_closest_marker("steps_fail") is None:
        raise failed[0]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a family's tiny model."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def path(family: str):
        return make_tiny(family, root / family)

    return path


@pytest.fixture(scope="session")
def expected(tiny):
    """Greedy tokens and per-step log-probabilities of the shared prompts, by transformers."""

    @cache
    def of(family: str):
        path = tiny(family)
        tokens = [oracle_greedy(path, prompt, NEW_TOKENS) for prompt in shared_prompts()]
        logprobs = [
            oracle_logprobs(path, prompt + new)
            for prompt, new in zip(shared_prompts(), tokens, strict=True)
        ]
        return tokens, logprobs

    return of
