"""What a sweep tries, and what it goes on with."""

from __future__ import annotations

from typing import Any, cast

import pytest

from onestem_lab.peers.run import interleaved, parse
from onestem_lab.peers.settings import ENGINES, combined, default, sweep


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sweep_tries_the_default_first_and_nothing_twice(engine: str, dtype: str) -> None:
    tried = sweep(engine, dtype)
    assert tried[0] == default(engine, dtype)
    assert all(tried.count(one) == 1 for one in tried)
    assert {frozenset(one) for one in tried} == {frozenset(tried[0])}


def test_what_made_it_faster_is_taken_together() -> None:
    base = default("vllm", "float32")
    runs = [
        {"settings": base, "seconds": 10.0},
        {"settings": {**base, "block_size": 32}, "seconds": 9.0},
        {"settings": {**base, "eager": True}, "seconds": 11.0},
        {"settings": {**base, "max_num_batched_tokens": 512}, "seconds": 8.0},
        {"settings": {**base, "max_num_batched_tokens": 8192}, "seconds": 9.5},
        {"settings": {**base, "preload": False}, "error": "no such library"},
    ]
    assert combined("vllm", "float32", runs) == {
        **base,
        "block_size": 32,
        "max_num_batched_tokens": 512,
    }
    assert combined("vllm", "float32", runs[:1]) == base


def test_where_the_default_fails_the_best_of_the_others_is_taken() -> None:
    base = default("transformers", "float32")
    runs = [
        {"settings": base, "error": "out of memory"},
        {"settings": {**base, "batch_size": 16}, "seconds": 4.0},
    ]
    assert combined("transformers", "float32", runs) == {**base, "batch_size": 16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--settings", "vllm"], "expected ENGINE:JSON-OBJECT"),
        (["--settings", "nope:{}"], "expected ENGINE:JSON-OBJECT"),
        (["--settings", "vllm:[1]"], "expected ENGINE:JSON-OBJECT"),
        (["--best-from", "/nowhere"], "--best-from /nowhere: FileNotFoundError"),
        (["--threads", "0"], "--threads is 0, expected at least 1"),
        (["--scale", "-1"], "--scale is -1.0, expected above 0"),
        (["0.1b-nope"], "case is '0.1b-nope'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["run", *given])
    with pytest.raises(SystemExit) as stopped:
        parse()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 1), (60.0, 3)])
def test_no_turn_begins_after_the_last(seconds: float, turns: int) -> None:
    class Counted:
        def run(self, engine: str, settings: dict[str, Any], turn: int) -> dict[str, Any]:
            return {"turn": turn}

    runs = interleaved(cast(Any, Counted()), {"onestem": {}, "vllm": {}}, 3, seconds)
    assert [len(of) for of in runs.values()] == [turns, turns]
