"""`allowed_token_ids`, `bad_words` and vLLM's names of structured outputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onestem import LLM, SamplingParams
from onestem.errors import RequestError

PROMPT = "The town of"


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", kv_memory="64MiB") as made:
        yield made


def answers(llm: LLM, **fields):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, **fields)
    return llm.generate(PROMPT, params)[0].outputs


def test_only_what_is_allowed_is_sampled(llm) -> None:
    allowed = [70, 71, 72, 400]
    for one in answers(llm, allowed_token_ids=allowed, ignore_eos=True, min_tokens=12, n=3):
        assert len(one.token_ids) == 12
        assert set(one.token_ids) <= set(allowed)


def test_bad_words_do_not_stand_in_the_answer(llm) -> None:
    free = answers(llm, n=4, ignore_eos=True)
    words = {one.text.split()[1] for one in free} | {one.text.split()[0] for one in free}
    held = answers(llm, n=4, ignore_eos=True, bad_words=sorted(words))
    spelled = [llm.tokenizer.encode(form, add_special_tokens=False)
               for word in words for form in (word, " " + word)]  # fmt: skip
    for one in held:
        for ids in spelled:
            places = range(len(one.token_ids) - len(ids) + 1)
            assert not any(one.token_ids[at : at + len(ids)] == ids for at in places)


def test_rules_hold_beside_a_grammar(llm) -> None:
    digits = {token for token in range(llm.config.vocab_size)
              if llm.tokenizer.token_bytes(token) in (b"1", b"2")}  # fmt: skip
    for one in answers(
        llm, allowed_token_ids=sorted(digits), structured_outputs={"regex": "[0-9]{4}"}, n=3
    ):
        assert len(one.text) == 4
        assert set(one.text) <= {"1", "2"}


def test_what_allows_nothing_says_who_is_to_blame(llm) -> None:
    letter = llm.tokenizer.encode("a", add_special_tokens=False)
    (one,) = answers(llm, allowed_token_ids=letter, structured_outputs={"regex": "[0-9]+"})
    assert one.finish_reason == "error"
    assert "response_format and allowed_token_ids" in one.stop_reason


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"regex": "[a-c]{3}"}, lambda text: set(text) <= set("abc") and len(text) == 3),
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"json": '{"type": "boolean"}'}, lambda text: text in ("true", "false")),
        ({"json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        ({"grammar": 'root ::= "x" "y"'}, lambda text: text == "xy"),
        (SimpleNamespace(json=None, regex="[a-c]", choice=None), lambda text: text in "abc"),
    ],
)
def test_names_of_vllm(llm, given, fits) -> None:
    (one,) = answers(llm, structured_outputs=given)
    assert fits(one.text), one.text
    assert one.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, "expected at least one token id"),
        ({"allowed_token_ids": [10**6]}, "expected ids below"),
        ({"bad_words": [3]}, r"bad_words\[0\] is 3"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give exactly one of them"),
        ({"structured_outputs": {}}, "has 0 of json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is no JSON"),
        ({"structured_outputs": {"wonder": 1}}, "unknown field in structured_outputs"),
        ({"structured_outputs": 3}, "structured_outputs is 3"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "give one of them",
        ),
        ({"choices": ["a"], "bad_words": ["b"]}, "together with choices"),
    ],
)
def test_refused(llm, fields, message) -> None:
    with pytest.raises(RequestError, match=message):
        answers(llm, **fields)
