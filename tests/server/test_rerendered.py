"""Templates that write earlier turns differently: `usage` and the log say what that costs."""

from __future__ import annotations

import json
import logging

import pytest

from onestem.engine.text.tokenizer import Tokenizer
from onestem.request import Request, Rerendered
from onestem.server.log_lines import line_of
from onestem.server.records.rerendered import kind_of
from tests.engine.tiny_tokenizers import LLAMA_3_TEMPLATE, make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import running
from tests.server.test_batches import create, ended

THOUGHT = "<think>Z</think>ZZZ"
KEEPS = LLAMA_3_TEMPLATE
# As Qwen's: the reasoning of earlier answers is dropped.
STRIPS = KEEPS.replace(
    "message['content'] | trim", "message['content'].split('</think>')[-1] | trim"
)
# As Qwen's with `enable_thinking` false: what stands before an answer is dropped afterwards.
BEGINS = KEEPS.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}")


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Server of a template, on a tiny model."""

    def started(template):
        root = tmp_path_factory.mktemp("rerendered")
        make_byte_level_tokenizer(make_tiny("llama", root / "m"), VOCAB_SIZE, template=template)
        return running(root / "state", model=root / "m", engine={"kv_memory": "8MiB"})

    return started


@pytest.fixture
def told(caplog):
    """Fields of the log's lines about it, by event."""
    caplog.set_level(logging.DEBUG, "onestem.server")
    return lambda event: [r.fields for r in caplog.records if r.getMessage() == event]


def test_a_prompt_is_rendered_once(serve, monkeypatch):
    """Also where calls are held to their schemas, which asks how the prompt ends."""
    rendered = []
    render = Tokenizer.chat

    def counted(tokenizer, messages, *given, **how):
        rendered.append(messages[-1]["content"])
        return render(tokenizer, messages, *given, **how)

    monkeypatch.setattr(Tokenizer, "chat", counted)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    body = {
        "messages": [{"role": "user", "content": "Once?"}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 1,
    }
    opens = KEEPS.replace("{% endif %}", "<think>{% endif %}{# <tool_call> tools </think> #}")
    with serve(opens) as server, server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert rendered.count("Once?") == 1
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        raw = json.dumps(line).encode()
        batch = ended(http, create(http, raw, endpoint=line["url"])["id"])
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert rendered.count("Once?") == 2


def turn(http, messages, **how):
    body = {"messages": messages, "temperature": 0, "return_token_ids": True, **how}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def two_turns(http, question, **how):
    """An answer and the next; what is stored of the first that the second prompt has not."""
    asked = [{"role": "user", "content": question}]
    first = turn(http, asked, **how)
    (choice,) = first["choices"]
    asked += [choice["message"], {"role": "user", "content": "And then?"}]
    second = turn(http, asked, **how)
    stored = [*first["prompt_token_ids"], *choice["token_ids"][:-1]]
    prompt = second["prompt_token_ids"]
    pairs = zip(stored, prompt, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(stored))
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == same
    return first, second, len(stored) - same


def test_a_template_that_keeps_what_was_said(serve, told):
    with serve(KEEPS) as server, server.http() as http:
        (token,) = server.service.model.tokenizer.encode("Z", add_special_tokens=False)
        for question in ("One?", "Two?"):
            first, second, lost = two_turns(http, question, allowed_token_ids=[token], max_tokens=6)
            assert first["choices"][0]["message"]["content"] == "ZZZZZZ"
            assert lost == 0
            assert "rerendered_tokens" not in second["usage"]["prompt_tokens_details"]
        server.check()
    assert told("rerendered") == []


def test_a_template_that_drops_reasoning(serve, told):
    with serve(STRIPS) as server, server.http() as http:
        for question in ("One?", "Two?", "Three?"):
            first, second, lost = two_turns(http, question, guided_regex=THOUGHT)
            assert first["choices"][0]["message"]["content"] == THOUGHT
            assert lost > 3
            assert second["usage"]["prompt_tokens_details"]["rerendered_tokens"] == lost
        # A prompt of no chat is never explained: it may differ where it likes.
        ids = [*first["prompt_token_ids"], 1, 2, 3]
        plain = http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1}).json()
        assert set(plain["usage"]["prompt_tokens_details"]) == {"cached_tokens"}
        server.check()
    (line,) = told("rerendered")
    assert (line["kind"], line["key"], line["app"]) == ("reasoning", None, None)
    assert line["tokens"] >= lost - 2  # questions have other lengths, answers have not
    (texts,) = told("rerendered_texts")
    assert texts["earlier"].startswith("<think>Z")
    assert texts["now"].startswith("ZZZ<|eot_id|>")
    assert "think" not in line_of("rerendered", line)


def test_a_stream_says_it_too(serve):
    with serve(STRIPS) as server, server.http() as http:
        asked = [{"role": "user", "content": "One?"}]
        first = turn(http, asked, guided_regex=THOUGHT)
        body = {
            "messages": [*asked, first["choices"][0]["message"], *asked],
            "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        lost = len(first["choices"][0]["token_ids"]) - 1
        events = http.post("/v1/chat/completions", json=body).text
        assert f'"rerendered_tokens":{lost}' in events


def test_what_stands_before_an_answer_is_dropped(serve, told):
    with serve(BEGINS) as server, server.http() as http:
        (token,) = server.service.model.tokenizer.encode("Z", add_special_tokens=False)
        how = {"allowed_token_ids": [token], "max_tokens": 6}
        _, second, lost = two_turns(http, "One?", **how)
        begins = server.service.model.tokenizer.encode_control("<think>\n\n</think>\n\n")
        prefilled = len(begins) - 1
        assert lost == prefilled + 5
        assert second["usage"]["prompt_tokens_details"]["rerendered_tokens"] == lost
        # Another question parts before all that.
        other = turn(http, [{"role": "user", "content": "One!"}], **how)
        assert "rerendered_tokens" not in other["usage"]["prompt_tokens_details"]
        server.check()
    (line,) = told("rerendered")
    assert (line["kind"], line["offset"]) == ("generation_prompt", 0)


@pytest.mark.parametrize(
    ("earlier", "now", "offset", "kind"),
    [
        ("<think>So", "Yes.", 3, "reasoning"),
        ("Yes, it is", "Yes, it", 3, "tokens"),
        ('{"a":1,"b', '{"a": 1, "', 3, "whitespace"),
        ("Yes.", "No, not", 3, "text"),
        ("<think>\n\n", "Yes.", 1, "generation_prompt"),
        ("", "Yes.", 3, "text"),
    ],
)
def test_kinds(earlier, now, offset, kind):
    rerendered = Rerendered(at=9, num_tokens=5, offset=offset, earlier=(1,))
    request = Request(request_id="a", prompt_token_ids=[1], prefilled_tokens=2)
    assert kind_of(rerendered, request, earlier, now) == kind
