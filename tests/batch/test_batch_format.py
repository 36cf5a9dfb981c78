"""What each line of the input turns into: an answer, or an error object in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onestem.batch import lines as batch_lines
from tests.batch.fakes import (
    BOS,
    FIRST_BYTE,
    MAX_LEN,
    FakeEngine,
    FakeTokenizer,
    chat,
    completion,
    results,
    run_fake,
    write_lines,
)


def run_lines(
    tmp_path: Path, *lines: dict[str, Any] | bytes, **changes: Any
) -> list[dict[str, Any]]:
    source = write_lines(tmp_path / "in.jsonl", lines)
    run_fake(source, tmp_path / "out.jsonl", **changes)
    return results(tmp_path / "out.jsonl")


def error_of(tmp_path: Path, line: dict[str, Any] | bytes, **changes: Any) -> dict[str, Any]:
    """The error of a line between two good ones, which are answered all the same."""
    before, result, after = run_lines(
        tmp_path, completion("before"), line, completion("after"), **changes
    )
    assert before["error"] is None
    assert after["error"] is None
    assert result["response"] is None
    assert result["error"]["line"] == 2
    assert "\n" not in result["error"]["message"]
    return result["error"] | {"custom_id": result["custom_id"]}


def without(line: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b"not json", "invalid_json_line", "not JSON"),
        (b"[1, 2]", "invalid_json_line", "expected an object"),
        (b'{"custom_id": "x"', "invalid_json_line", "not JSON"),
        (b'{"custom_id": NaN}', "invalid_json_line", "NaN is not a JSON value"),
        (b'{"custom_id": "x", "custom_id": "y"}', "invalid_json_line", "stands twice"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", "not UTF-8"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", "unpaired"),
        (b"[" * 100_000, "invalid_json_line", "nests too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json_line", "an integer has over 4300 digits"),
        (b"\x00\x00", "invalid_json_line", "not JSON"),
        (without(completion("x"), "custom_id"), "missing_custom_id", "no custom_id"),
        (completion("x") | {"custom_id": None}, "missing_custom_id", "no custom_id"),
        (completion("x") | {"custom_id": 7}, "invalid_custom_id", "custom_id is 7"),
        (completion(""), "invalid_custom_id", "non-empty"),
    ],
)
def test_lines_without_a_custom_id(tmp_path, line, code, words):
    error = error_of(tmp_path, line)
    assert error["code"] == code
    assert words in error["message"]
    assert error["custom_id"] is None


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (completion("before"), "duplicate_custom_id", "earlier line"),
        (completion("x") | {"priority": 1}, "unknown_field", "'priority'"),
        (completion("x") | {"method": "GET"}, "invalid_method", "expected POST"),
        (without(completion("x"), "method"), "invalid_method", "expected POST"),
        (completion("x") | {"url": "/v1/embeddings"}, "invalid_url", "/v1/chat/completions"),
        (completion("x") | {"url": ["/v1/completions"]}, "invalid_url", "expected"),
        (without(completion("x"), "url"), "invalid_url", "expected"),
        (completion("x") | {"body": "text"}, "invalid_body", "expected an object"),
        (without(completion("x"), "body"), "invalid_body", "expected an object"),
    ],
)
def test_lines_with_a_custom_id(tmp_path, line, code, words):
    error = error_of(tmp_path, line)
    assert error["code"] == code
    assert words in error["message"]
    assert error["custom_id"] == line["custom_id"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (completion("x", "a" * MAX_LEN), "tokens, limit is"),
        (completion("x", "refuse me"), "the tokenizer refuses"),
        (completion("x", []), "no tokens"),
        (completion("x", 5), "text or a list of token ids"),
        (completion("x", [1, -1]), "token id in prompt"),
        (completion("x", [1, True]), "token id in prompt"),
        (completion("x", [1, 2**31]), "token id in prompt"),
        (completion("x", [1, "a"]), "token id in prompt"),
        (completion("x", ["a", "b"]), "list of 2 prompts"),
        (completion("x", [[1], [2]]), "list of 2 prompts"),
        (completion("x", [[["a"]]]), "token id in prompt"),
        (completion("x", None), "no prompt"),
        (completion("x", wonder=1), "unknown field in body: 'wonder'"),
        (completion("x", guided_backend="a"), "unknown field"),
        (completion("x", messages=[]), "unknown field"),
        (completion("x", top_logprobs=3), "unknown field"),
        (completion("x", stream=True), "stream is True: not supported"),
        (completion("x", echo=True), "echo is True: not supported"),
        (completion("x", best_of=3), "best_of is 3: not supported"),
        (completion("x", suffix="s"), "suffix"),
        (completion("x", max_tokens=0), "max_tokens is 0"),
        (completion("x", max_tokens="9"), "max_tokens is '9', expected an integer"),
        (completion("x", max_tokens=True), "max_tokens is True"),
        (completion("x", temperature=-1), "temperature is -1"),
        (completion("x", temperature="hot"), "temperature is 'hot', expected a number"),
        (completion("x", top_p=0), "top_p is 0"),
        (completion("x", n=0), "n is 0"),
        (completion("x", seed=2**64), "seed"),
        (completion("x", stop=[1]), "stop[0] is 1"),
        (completion("x", stop=""), "stop is ''"),
        (completion("x", stop_token_ids=5), "stop_token_ids is 5"),
        (completion("x", logit_bias={"a": 1}), "a key of logit_bias"),
        (completion("x", logit_bias={"1": 101}), "logit_bias[1]"),
        (completion("x", logit_bias={"1": 1, "01": 2}), "each token id once"),
        (completion("x", logprobs=True), "logprobs is True, expected an integer"),
        (completion("x", choices=["a"], n=2), "n is 2"),
        (completion("x", response_format={"type": "xml"}), "response_format.type"),
        (completion("x", response_format={"type": "json_schema"}), "needs json_schema"),
        (completion("x", ignore_eos="yes"), "true or false"),
        (completion("x", model=3), "model is 3"),
        (completion("x", user=3), "user is 3"),
        (chat("x", "a" * MAX_LEN), "tokens, limit is"),
        (chat("x", 7), "text or a list of text parts"),
        (chat("x", [{"type": "image_url", "image_url": {}}]), "content[0].type is 'image_url'"),
        (chat("x", tools=[{"type": "function"}]), "tools"),
        (chat("x", top_logprobs=2), "top_logprobs needs logprobs: true"),
        (chat("x", logprobs=2), "logprobs is 2, expected true or false"),
        (chat("x", max_tokens=3, max_completion_tokens=4), "differ"),
        (chat("x", prompt="a"), "unknown field"),
        (chat("x") | {"body": {}}, "body has no messages"),
        (chat("x") | {"body": {"messages": []}}, "at least one message"),
        (
            chat("x") | {"body": {"messages": [{"role": "user", "content": "a", "nick": "b"}]}},
            "unknown field in messages[0]: 'nick'",
        ),
        (chat("x") | {"body": {"messages": [{"role": "tool", "content": "a"}]}}, "tool_call_id"),
        (chat("x") | {"body": {"messages": [{"content": "a"}]}}, "role is missing"),
        (chat("x") | {"body": {"messages": ["a"]}}, "expected an object"),
    ],
)
def test_bad_bodies(tmp_path, line, words):
    error = error_of(tmp_path, line)
    assert words in error["message"]
    assert error["code"] == "invalid_request"
    assert error["custom_id"] == "x"


def test_messages_of_errors_are_short(tmp_path):
    error = error_of(tmp_path, completion("x", choices=["a" * 5000, "a" * 5000]))
    assert len(error["message"]) <= 500


def test_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    error = error_of(tmp_path, completion("x", "a" * 1000))
    assert error["code"] == "line_too_long"
    assert error["custom_id"] is None


def test_a_duplicate_of_a_bad_line_is_one(tmp_path):
    lines = [completion("a", wonder=1), completion("a")]
    bad, again = run_lines(tmp_path, *lines, keep_going=True)
    assert bad["error"]["code"] == "invalid_request"
    assert again["error"]["code"] == "duplicate_custom_id"


def test_line_ends_and_blank_lines(tmp_path):
    a, b, c = (json.dumps(completion(name)).encode() for name in "abc")
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + a + b"\r\n\r\n  \t\n" + b + b"\nbad\r\n" + c)
    summary = run_fake(source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in found] == ["a", "b", None, "c"]
    assert found[2]["error"]["line"] == 5
    assert (summary.total, summary.ok, summary.failed, summary.exit_code) == (4, 3, 1, 1)
    assert summary.last_line().endswith("4 lines, 1 failed")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_input(tmp_path, content):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    for _ in range(2):
        summary = run_fake(source, tmp_path / "out.jsonl")
        assert (summary.total, summary.exit_code) == (0, 0)
        assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_all_parameters_reach_the_engine(tmp_path):
    engine = FakeEngine()
    given = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x", "y"], "seed": 3,
        "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 2.5}, "logprobs": 3,
        "response_format": {"type": "json_object"}, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9],
        "prompt_logprobs": 1, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    labels = {"user": "me", "metadata": {"a": "b"}, "stream": False, "best_of": 1, "echo": None}
    run_lines(tmp_path, completion("a", **given, **labels), run=engine.run)
    params = engine.seen[0].params
    expected = given | {"stop": ("x", "y"), "logit_bias": {5: 2.5}, "stop_token_ids": (9,)}
    assert {name: getattr(params, name) for name in given} == expected


def test_choices_reach_the_engine(tmp_path):
    engine = FakeEngine()
    run_lines(tmp_path, completion("a", choices=["yes", "no"]), run=engine.run)
    assert engine.seen[0].params.choices == ("yes", "no")


def test_lengths_when_none_is_given(tmp_path):
    engine = FakeEngine()
    lines = [
        completion("a"),
        chat("b"),
        chat("c", max_completion_tokens=9),
        chat("d", max_tokens=None),
    ]
    run_lines(tmp_path, *lines, run=engine.run, planner=None)
    assert [request.params.max_tokens for request in engine.seen] == [16, None, 9, None]


def test_prompts_become_token_ids(tmp_path):
    engine = FakeEngine()
    lines = [
        completion("a", "AB"),
        completion("b", [7, 8]),
        completion("c", ["AB"]),
        completion("d", [[7, 8]]),
    ]
    run_lines(tmp_path, *lines, run=engine.run, planner=None)
    text = [BOS, 65 + FIRST_BYTE, 66 + FIRST_BYTE]
    assert [request.prompt_token_ids for request in engine.seen] == [text, [7, 8], text, [7, 8]]


def test_texts_are_tokenised_in_chunks(tmp_path):
    tokenizer = FakeTokenizer()
    run_lines(tmp_path, *(completion(f"c{i}") for i in range(600)), tokenizer=tokenizer)
    assert tokenizer.batches == [256, 256, 88]


def test_a_model_without_tokenizer_answers_token_ids(tmp_path):
    lines = [completion("a", [5, 6], logprobs=1), completion("b"), chat("c")]
    a, b, c = run_lines(tmp_path, *lines, tokenizer=None, token_bytes=None)
    choice = a["response"]["body"]["choices"][0]
    assert choice["token_ids"]
    assert a["response"]["body"]["prompt_token_ids"] == [5, 6]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
    assert "no tokenizer" in b["error"]["message"]
    assert "no tokenizer" in c["error"]["message"]


def test_chat_result(tmp_path):
    (record,) = run_lines(tmp_path, chat("a", model="my-model", n=2, logprobs=True, top_logprobs=2))
    assert record["id"].startswith("batch_req_")
    assert record["custom_id"] == "a"
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 0, "tiny")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"]["role"] == "assistant"
    tokens = body["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == body["choices"][0]["message"]["content"]
    assert tokens[0]["logprob"] == -0.5
    assert tokens[0]["bytes"] == list(tokens[0]["token"].encode())
    assert [top["logprob"] for top in tokens[0]["top_logprobs"]] == [-0.5, -1.5]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "prompt_logprobs" not in body


def test_lines_may_name_the_models_that_are_served(tmp_path):
    lines = [completion("a", model="big"), completion("b", model="gpt"), completion("c")]
    a, b, c = run_lines(tmp_path, *lines, model_names=["small", "big"])
    assert [record["response"]["body"]["model"] for record in (a, c)] == ["big", "tiny"]
    assert b["error"]["code"] == "model_not_found"
    assert b["error"]["message"] == "there is no model 'gpt' here, there is small, big"


def test_completion_result(tmp_path):
    (record,) = run_lines(
        tmp_path, completion("a", logprobs=3, prompt_logprobs=0, return_token_ids=True)
    )
    body = record["response"]["body"]
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(len(choice["text"])))
    assert logprobs["top_logprobs"][0]["bytes:\\xc5"] == -9999.0  # not UTF-8, probability 0
    assert choice["token_ids"] == [ord(letter) + FIRST_BYTE for letter in choice["text"]]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["100"] == {"logprob": -2.0, "decoded_token": "a"}
    assert body["prompt_token_ids"] == [BOS, 100, 101, 102]


def test_completion_logprobs_have_the_sampled_token_alone_at_zero(tmp_path):
    (record,) = run_lines(tmp_path, completion("a", logprobs=0))
    logprobs = record["response"]["body"]["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [
        [token] for token in logprobs["tokens"]
    ]


def test_no_logprobs_unless_asked(tmp_path):
    a, b = run_lines(tmp_path, completion("a"), chat("b", logprobs=False))
    assert a["response"]["body"]["choices"][0]["logprobs"] is None
    assert b["response"]["body"]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprob", [float("nan"), None])
def test_what_the_engine_cannot_answer_becomes_an_error(tmp_path, logprob):
    class Failing(FakeEngine):
        def finish(self, request):
            output = super().finish(request)
            if len(request.prompt_token_ids) > 4:
                if logprob is None:
                    output.outputs[0].finish_reason = "error"
                    output.outputs[0].stop_reason = "the pool is too small"
                else:
                    output.outputs[0].logprobs[0] = {output.outputs[0].token_ids[0]: logprob}
            return output

    error = error_of(tmp_path, completion("x", "longer", logprobs=1), run=Failing().run)
    assert error["code"] == "engine_error"
    not_a_number = "the model gave a log-probability that is not a number"
    assert error["message"] == ("the pool is too small" if logprob is None else not_a_number)


def test_a_result_is_one_line_for_every_reader(tmp_path):
    name = "a\u2028b\u0085c\x0bd\re\nf é 😀"
    run_lines(tmp_path, completion(name))
    text = (tmp_path / "out.jsonl").read_bytes().decode()
    assert len(text.splitlines()) == 1
    assert json.loads(text)["custom_id"] == name
    assert "é 😀" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = [
    "n",
    "stop",
    "seed",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "model",
    "prompt",
    "messages",
    "metadata",
    "stream",
    "tools",
    "choices",
    "response_format",
    "stop_token_ids",
    "top_k",
    "temperature",
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)
RECORDS = st.builds(
    lambda line, body, top: line | {"body": line["body"] | body} | top,
    st.sampled_from([completion("a"), chat("b"), completion("c", [3, 4])]),
    BODIES,
    st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), JSON, max_size=1),
)
RAW = (
    st.binary(max_size=30)
    | RECORDS.map(lambda r: json.dumps(r).encode())
    | st.just(b"")
    | st.just(b" \r")
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(RAW.filter(lambda raw: b"\n" not in raw), max_size=8),
    end=st.sampled_from([b"\n", b"\r\n", b""]),
)
def test_any_lines_give_one_result_each(tmp_path_factory, lines, end):
    folder = tmp_path_factory.mktemp("fuzz")
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes((end or b"\n").join(lines) + end)
    first = lines[0].removeprefix(b"\xef\xbb\xbf") if lines else b""
    expected = [i for i, raw in enumerate([first, *lines[1:]], 1) if raw.strip()]
    summary = run_fake(source, output, keep_going=True)
    found = [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    assert [int(record["id"].split("_")[3]) for record in found] == expected
    assert all((record["response"] is None) != (record["error"] is None) for record in found)
    assert summary.total == len(expected)
    answered = [record["custom_id"] for record in found if record["error"] is None]
    assert len(set(answered)) == len(answered)
