"""Engines that die: one line that kills them costs itself, and no other line."""

from __future__ import annotations

import pytest

from onestem import LLM
from onestem.batch import EngineDiedError
from onestem.batch.workplace import Workplace
from onestem.jobs import run_file
from tests.batch.fakes import (
    FakeEngine,
    FakeTokenizer,
    completion,
    mixed_job,
    results,
    run_fake,
    write_lines,
)


class MortalEngine(FakeEngine):
    """Dies of a prompt, as of a device's fault: with all that it has."""

    def __init__(self, *poison: str, room: int = 5) -> None:
        super().__init__(room)
        self.poison = [[ord(c) + 3 for c in text] for text in poison]
        self.there: set[str] = set()

    def run(self, requests):
        self.there = set()

        def noted():
            for request in requests:
                self.there.add(request.request_id)
                yield request

        for output in super().run(noted()):
            self.there.discard(output.request_id)
            yield output

    def finish(self, request):
        ids = list(request.prompt_token_ids)
        if any(ids[-len(one) :] == one for one in self.poison):
            raise EngineDiedError("device-side assert", self.there)
        return super().finish(request)


def run_to_the_end(source, output, engine) -> list[str]:
    """Run a job as often as it takes; what the deaths say."""
    said = []
    for _ in range(20):
        try:
            run_fake(source, output, engine)
        except EngineDiedError as error:
            said.append(str(error))
        else:
            return said
    raise AssertionError("it does not end")


@pytest.mark.parametrize("room", [1, 5, 100])
def test_lines_that_kill_the_engine_are_errors_and_the_others_answered(tmp_path, room):
    source = mixed_job(tmp_path / "in.jsonl")
    run_fake(source, tmp_path / "whole.jsonl")
    whole = results(tmp_path / "whole.jsonl")
    engine = MortalEngine("question 7", "question 23", room=room)
    said = run_to_the_end(source, tmp_path / "out.jsonl", engine)
    assert len(said) == {1: 4, 5: 4, 100: 3}[room]
    assert "device-side assert: the same command goes on, with these lines one at" in said[0]
    found = results(tmp_path / "out.jsonl")
    died = [one for one in found if one["error"] and one["error"]["code"] == "engine_died"]
    assert [one["custom_id"] for one in died] == ["c7", "c23"]
    assert "died twice while it answered this line: device-side" in died[0]["error"]["message"]
    assert [one for one in found if one not in died] == [
        one for one in whole if one["custom_id"] not in ("c7", "c23") or one["error"]
    ]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.jsonl.")]


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


@pytest.mark.parametrize("error", [PanicException("overflow"), RuntimeError("a fault")])
def test_a_panic_over_one_text_costs_its_line(tmp_path, error):
    class Panicking(FakeTokenizer):
        def encode_batch(self, texts, **how):
            if any("p3" in raw.text for raw in texts):
                raise error
            return super().encode_batch(texts, **how)

    source = write_lines(tmp_path / "in.jsonl", [completion(str(i), f"p{i}") for i in range(9)])
    summary = run_fake(source, tmp_path / "out.jsonl", tokenizer=Panicking())
    assert summary.failed == 1
    bad = results(tmp_path / "out.jsonl")[3]
    told = f"the line cannot be read: {type(error).__name__}: {error}"
    assert bad["error"] == {"code": "invalid_request", "message": told, "line": 4}


def test_a_panic_of_the_real_engine_is_its_death(tmp_path, monkeypatch):
    lines = [completion(str(i), f"word {i}", max_tokens=3) for i in range(4)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    llm = LLM(dtype="float32", kv_memory="4MiB", device="cpu")

    def panicking() -> None:
        raise PanicException("overflow")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step_news", panicking)
        with pytest.raises(EngineDiedError, match=r"PanicException: overflow"):
            run_file(llm, source, output)
        patch.setattr(llm.engine.requests, "validate", lambda request: panicking())
        output = tmp_path / "refused.jsonl"
        assert run_file(llm, source, output, keep_going=True).failed == 4


def test_one_death_blames_nobody(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [completion(str(i), f"p{i}") for i in range(9)])
    engine = MortalEngine("p3")
    with pytest.raises(EngineDiedError, match="while it answered 5 lines"):
        run_fake(source, tmp_path / "out.jsonl", engine)
    summary = run_fake(source, tmp_path / "out.jsonl", FakeEngine())
    assert summary.failed == 0
    assert [one["custom_id"] for one in results(tmp_path / "out.jsonl")] == list("012345678")


def test_an_exception_of_the_real_engine_is_its_death(tmp_path, monkeypatch):
    lines = [completion(str(i), f"word {i}", max_tokens=3) for i in range(4)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    llm = LLM(dtype="float32", kv_memory="4MiB", device="cpu")
    run = llm.engine.launcher.runner.run

    def failing(inputs, prepared, ids):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(llm.engine.launcher.runner, "run", failing)
    with pytest.raises(EngineDiedError, match=r"4 lines of .*: RuntimeError: CUDA"):
        run_file(llm, source, output)
    assert Workplace(output).read_suspects() == {1, 2, 3, 4}
    monkeypatch.setattr(llm.engine.launcher.runner, "run", run)
    assert run_file(llm, source, output).failed == 0
