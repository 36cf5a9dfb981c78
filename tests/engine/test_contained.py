"""An error while one sequence's result is taken ends that request, never the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.engine import outputs
from onestem.engine.grammar.state import GrammarState
from onestem.engine.sampling.sampler import Sampler
from onestem.engine.step.results import Results
from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.request import Request
from onestem.scores import completion_tree
from tests.engine.harness import assert_idle
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

JSON = {"response_format": {"type": "json_object"}}
# Class, method, and the fields of the request that runs into it.
FAULTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "stop strings": (IncrementalDetokenizer, "append", {"stop": ["never found"]}),
    "stream": (IncrementalDetokenizer, "append", {"stream": True}),
    "end of the text": (IncrementalDetokenizer, "finish", {}),
    "mask": (GrammarState, "fill_mask", JSON),
    "grammar": (GrammarState, "accept", JSON),
    "log-probabilities": (Results, "_note_sampled", {"logprobs": 2}),
    "prompt's log-probabilities": (Results, "_take_span", {"prompt_logprobs": 1}),
    "choices": (Results, "_take_span", {"choices": ["yes", "no", "or else"]}),
    "scores": (Results, "_take_span", {"paths": tuple(completion_tree([[5, 6], [7]])[1])}),
    "best choice": (outputs, "_best_choice", {"choices": ["yes", "no", "or else"]}),
    "output": (outputs, "_completion", {"n": 3}),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = make_tiny("llama", tmp_path_factory.mktemp("contained") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    return LLM(path, dtype="float32", kv_memory="8MiB", max_model_len=256, device="cpu")


def request_of(llm: LLM, name: str, fields: dict[str, Any]) -> Request:
    fields = {"max_tokens": 8, "seed": 3, **fields}
    extra = {name: fields.pop(name) for name in ("stream", "paths") if name in fields}
    ids = llm.tokenizer.encode("The quick brown fox: " + name[-1])
    params = SamplingParams(**fields)
    return Request(request_id=name, prompt_token_ids=ids, params=params, **extra)


def run(llm: LLM, requests: list[Request], abort: str = "") -> dict[str, Any]:
    engine = llm.engine
    for request in requests:
        engine.add_request(request)
    found = {}
    while engine.has_unfinished():
        found |= {o.request_id: o for o in engine.step() if o.finished}
        engine.check()
        if abort and (ended := engine.abort(abort)) is not None:
            found[abort] = ended
    assert_idle(engine)
    return found


def breaking(fault: Callable, is_victim: Callable[[Any], bool]) -> Callable:
    def broken(*args: Any, **options: Any) -> Any:
        if any(map(is_victim, args)):
            raise ZeroDivisionError("a fault of ours")
        return fault(*args, **options)

    return broken


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_one_requests(llm, monkeypatch, caplog, name, abort):
    where, method, fields = FAULTS[name]
    others = [request_of(llm, f"other-{i}", kind) for i, (*_, kind) in enumerate(FAULTS.values())]
    undisturbed = run(llm, others)
    victim = request_of(llm, "victim", fields)
    mine = objects_of(llm, monkeypatch)

    def is_victim(one: Any) -> bool:
        return id(one) in mine or name_of(one) == "victim"

    monkeypatch.setattr(where, method, breaking(getattr(where, method), is_victim))
    with caplog.at_level(logging.ERROR):
        found = run(llm, [*others[:5], victim, *others[5:]], "victim" if abort else "")
    (end,) = {o.finish_reason for o in found["victim"].outputs}
    if end == "error":
        assert "ZeroDivisionError: a fault of ours" in found["victim"].outputs[0].stop_reason
        assert "ZeroDivisionError" in caplog.text
    assert end == "error" or abort
    for other in others:
        before, after = undisturbed[other.request_id], found[other.request_id]
        assert [o.token_ids for o in after.outputs] == [o.token_ids for o in before.outputs]
        assert [o.text for o in after.outputs] == [o.text for o in before.outputs]


def name_of(one: Any) -> str | None:
    """The request that an argument belongs to."""
    one = getattr(one, "sequence", one)
    state = getattr(one, "state", one)
    return getattr(getattr(state, "request", None), "request_id", None)


def objects_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of the victim's detokenizers and grammars, noted as they are made."""
    mine: set[int] = set()
    kept = []

    def noted(make: Callable) -> Callable:
        def sequence(state: Any, index: int) -> Any:
            one = make(state, index)
            if state.request.request_id == "victim":
                kept.append(one)
                mine.update({id(one.answer.detokenizer), id(one.answer.grammar)} - {id(None)})
            return one

        return sequence

    factory = llm.engine.requests.factory
    monkeypatch.setattr(factory, "sequence", noted(factory.sequence))
    make_detokenizer = factory.detokenizer

    def detokenizer(request: Any) -> Any:
        one = make_detokenizer(request)
        if request.request_id == "victim":
            kept.append(one)
            mine.add(id(one))
        return one

    monkeypatch.setattr(factory, "detokenizer", detokenizer)
    return mine


def test_a_stop_string_inside_a_choice_is_refused(llm):
    for fields in ({"stop": ["e"]}, {"stop_token_ids": [3]}, {"min_tokens": 2}, {"n": 2}):
        with pytest.raises(ValueError, match="together with choices"):
            SamplingParams(choices=["yes", "no"], **fields)
    assert llm.generate("a", SamplingParams(choices=["yes", "no"]))[0].outputs[0].text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_own_answers(llm, monkeypatch, temperature):
    others = [request_of(llm, f"other-{i}", {"temperature": temperature}) for i in range(3)]
    undisturbed = run(llm, others)
    launch = Sampler.launch

    @torch.inference_mode()
    def damaged(self: Sampler, logits: Any, step: Any) -> Any:
        broken = np.flatnonzero(step.table.rows["seed_low"] == 99)
        logits[broken] = float("nan")
        return launch(self, logits, step)

    monkeypatch.setattr(Sampler, "launch", damaged)
    victim = request_of(llm, "victim", {"n": 2, "seed": 99, "temperature": temperature})
    found = run(llm, [others[0], victim, *others[1:]])
    for one in others:
        assert found[one.request_id].outputs == undisturbed[one.request_id].outputs
    for output in found["victim"].outputs:
        assert output.finish_reason == "error"
        assert "the logits are not finite" in str(output.stop_reason)


def test_more_tokens_at_least_than_any_sequence_has(llm):
    """They do not fit in the sampler's 32 bits."""
    for least in (2**31 - 1, 2**31, 2**70):
        fields = {"min_tokens": least, "max_tokens": None, "ignore_eos": False}
        found = run(llm, [request_of(llm, "long", fields), request_of(llm, "other", {})])
        assert found["long"].outputs[0].finish_reason == "length"
        assert found["other"].outputs[0].finish_reason == "length"


def test_what_the_sampler_cannot_take_is_refused_alone(llm, monkeypatch):
    """A fault while a row is told to the sampler ends its answer."""
    known = Sampler._new_record

    def broken(self: Sampler, row: Any) -> bytes:
        if row.seed == 99:
            raise ZeroDivisionError("a fault of ours")
        return known(self, row)

    monkeypatch.setattr(Sampler, "_new_record", broken)
    victim = request_of(llm, "victim", {"n": 2, "seed": 99})
    found = run(llm, [request_of(llm, "a", {}), victim, request_of(llm, "b", {"n": 3})])
    assert {o.finish_reason for o in found["victim"].outputs} == {"error"}
    assert {o.finish_reason for name in "ab" for o in found[name].outputs} == {"length"}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_that_ends_too_early_is_an_error(llm, ignore_eos):
    schema = {"name": "a", "schema": {"type": "boolean"}}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 60, "min_tokens": 50, "temperature": 0, "ignore_eos": ignore_eos,
    }  # fmt: skip
    found = run(llm, [request_of(llm, "victim", fields), request_of(llm, "other", {})])
    (output,) = found["victim"].outputs
    assert output.finish_reason == "error"
    assert "response_format and min_tokens together" in str(output.stop_reason)
    assert found["other"].outputs[0].finish_reason == "length"
