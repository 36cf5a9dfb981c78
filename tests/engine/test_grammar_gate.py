"""Grammars are compiled beside the engine: who waits for one holds up nobody else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from onestem import LLM, SamplingParams
from onestem.engine.engine import Engine
from onestem.engine.grammar.kept import Kept
from onestem.errors import RequestError
from onestem.request import Request, RequestOutput
from tests.engine.held_grammars import HeldTrials
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

pytest.importorskip("xgrammar")

SLOW = {"enum": ["yes", "no"]}
# Passes all checks before compiling: in strict mode no items are allowed that no keyword names.
BAD = {"type": "array", "minItems": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_tiny("llama", tmp_path_factory.mktemp("gate") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return LLM(path, dtype="float32", kv_memory="8MiB", seed=0)


@pytest.fixture
def compiler(llm: LLM) -> Iterator[HeldTrials]:
    grammars = llm.engine.requests.grammars
    assert grammars is not None
    grammars.kept = Kept(1 << 20)
    held = HeldTrials(grammars, "yes")
    yield held
    held.restore()


def request(name: str, schema: dict[str, Any] | None = None, **fields: Any) -> Request:
    response_format = schema and {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }
    params = SamplingParams(
        max_tokens=40, response_format=response_format, ignore_eos=schema is None, **fields
    )
    return Request(request_id=name, prompt_token_ids=[5, 6, 7], params=params)


def run_until(engine: Engine, names: set[str]) -> dict[str, RequestOutput]:
    """Steps until these have ended, or those that are not held would have ended long ago."""
    ended: dict[str, RequestOutput] = {}
    late = time.monotonic() + 60
    while time.monotonic() < late:
        if names <= ended.keys():
            return ended
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"{names - ended.keys()} did not end")


def drain(engine: Engine) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    engine.check()
    return ended


def test_nobody_waits_for_anothers_grammar(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.add_request(request("slow", SLOW))
    engine.add_request(request("plain"))
    engine.add_request(request("quick", {"enum": ["a", "b"]}))
    assert engine.num_waiting == 3
    ended = run_until(engine, {"plain", "quick"})
    assert "slow" not in ended
    assert engine.num_waiting == 1
    assert engine.has_unfinished()
    compiler.let.set()
    answer = drain(engine)["slow"].outputs[0]
    assert json.loads(llm.tokenizer.decode(answer.token_ids)) in ("yes", "no")


def test_a_jobs_grammar_holds_up_no_interactive_request(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.requests.add_job("job", [request("slow", SLOW), request("bad", BAD), request("last")])
    engine.add_request(request("plain"))
    assert run_until(engine, {"plain"}).keys() == {"plain"}
    compiler.let.set()
    ended = drain(engine)
    assert ended["slow"].outputs[0].finish_reason == "stop"
    assert ended["last"].outputs[0].finish_reason == "length"
    assert ended["bad"].outputs[0].finish_reason == "error"
    assert engine.requests.job_ids == []


def test_a_job_with_a_held_request_can_be_removed(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.requests.add_job("job", [request("slow", SLOW), request("last")])
    engine.step()
    assert engine.has_unfinished()
    engine.requests.remove_job("job")
    assert not engine.has_unfinished()


def test_a_grammar_that_is_none_ends_its_request_alone(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.add_request(request("bad", BAD))
    engine.add_request(request("plain"))
    ended = drain(engine)
    assert ended["plain"].outputs[0].finish_reason == "length"
    answer = ended["bad"].outputs[0]
    assert answer.finish_reason == "error"
    assert "schema cannot be used: minItems is greater" in str(answer.stop_reason)
    engine.add_request(request("bad"))  # its id is free again
    drain(engine)


def test_a_held_request_can_be_aborted(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.add_request(request("slow", SLOW))
    aborted = engine.abort("slow")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished()
    assert engine.requests.factory._prepared == {}


def test_a_grammar_is_kept_until_all_choices_are_open(llm: LLM, compiler: HeldTrials) -> None:
    engine = llm.engine
    engine.requests.grammars.kept = Kept(0)
    engine.add_request(request("many", SLOW, n=3, seed=1))
    compiler.let.set()
    for number in range(3):
        engine.add_request(request(str(number), {"enum": [number]}))
    ended = drain(engine)
    for choice in ended["many"].outputs:
        assert json.loads(llm.tokenizer.decode(choice.token_ids)) in ("yes", "no")


def test_what_is_refused_without_compiling_is_refused_at_once(
    llm: LLM, compiler: HeldTrials
) -> None:
    with pytest.raises(RequestError, match="'multipleOf' of a number"):
        llm.engine.add_request(request("bad", {"type": "number", "multipleOf": 7}))
    assert not llm.engine.has_unfinished()
