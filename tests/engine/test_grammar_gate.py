"""Grammars are compiled off the engine's main thread: who waits for one holds up nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from onestem import LLM, SamplingParams
from onestem.engine.engine import Engine
from onestem.errors import RequestError
from onestem.request import Request, RequestOutput
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

pytest.importorskip("xgrammar")

SLOW = {"enum": ["yes", "no"]}
# Passes all checks before compiling: in strict mode no items are allowed that no keyword names.
BAD = {"type": "array", "minItems": 1}


class Elsewhere:
    """xgrammar's compiler in any thread but the main one; `SLOW` when they are let."""

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler
        self.let = threading.Event()

    def compile_grammar(self, grammar: str) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        if "yes" in grammar:
            assert self.let.wait(60)
        return self._compiler.compile_grammar(grammar)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_tiny("llama", tmp_path_factory.mktemp("gate") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return LLM(path, dtype="float32", kv_memory="8MiB", seed=0)


@pytest.fixture
def compiler(llm: LLM) -> Iterator[Elsewhere]:
    grammars = llm.engine._grammars
    assert grammars is not None
    elsewhere = Elsewhere(grammars._loaded()[0])
    grammars._compiled.clear()
    loaded, grammars._compiler = grammars._compiler, elsewhere
    yield elsewhere
    elsewhere.let.set()
    grammars._compiler = loaded


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
    """Steps until these have ended, or forty more steps than their tokens take."""
    ended: dict[str, RequestOutput] = {}
    for _ in range(80):
        if names <= ended.keys():
            return ended
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"{names - ended.keys()} did not end in 80 steps")


def drain(engine: Engine) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    engine.check()
    return ended


def test_nobody_waits_for_anothers_grammar(llm: LLM, compiler: Elsewhere) -> None:
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


def test_a_jobs_grammar_holds_up_no_interactive_request(llm: LLM, compiler: Elsewhere) -> None:
    engine = llm.engine
    engine.add_job("job", [request("slow", SLOW), request("bad", BAD), request("last")])
    engine.add_request(request("plain"))
    assert run_until(engine, {"plain"}).keys() == {"plain"}
    compiler.let.set()
    ended = drain(engine)
    assert ended["slow"].outputs[0].finish_reason == "stop"
    assert ended["last"].outputs[0].finish_reason == "length"
    assert ended["bad"].outputs[0].finish_reason == "error"
    assert engine.job_ids == []


def test_a_job_with_a_held_request_can_be_removed(llm: LLM, compiler: Elsewhere) -> None:
    engine = llm.engine
    engine.add_job("job", [request("slow", SLOW), request("last")])
    engine.step()
    assert engine.has_unfinished()
    engine.remove_job("job")
    assert not engine.has_unfinished()


def test_a_grammar_that_is_none_ends_its_request_alone(llm: LLM, compiler: Elsewhere) -> None:
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


def test_a_held_request_can_be_aborted(llm: LLM, compiler: Elsewhere) -> None:
    engine = llm.engine
    engine.add_request(request("slow", SLOW))
    aborted = engine.abort("slow")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished()
    assert engine._factory._prepared == {}


def test_a_grammar_is_kept_until_all_choices_are_open(
    llm: LLM, compiler: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onestem.engine.grammar.compiler._CACHE_ENTRIES", 0)
    engine = llm.engine
    engine.add_request(request("many", SLOW, n=3, seed=1))
    compiler.let.set()
    for number in range(3):
        engine.add_request(request(str(number), {"enum": [number]}))
    ended = drain(engine)
    for choice in ended["many"].outputs:
        assert json.loads(llm.tokenizer.decode(choice.token_ids)) in ("yes", "no")


def test_what_is_refused_without_compiling_is_refused_at_once(
    llm: LLM, compiler: Elsewhere
) -> None:
    with pytest.raises(RequestError, match="'multipleOf' of a number"):
        llm.engine.add_request(request("bad", {"type": "number", "multipleOf": 7}))
    assert not llm.engine.has_unfinished()
