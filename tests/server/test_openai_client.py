"""The openai client, unchanged, against the server; answers are those of the engine alone."""

from __future__ import annotations

import json

import openai
import pytest

from onestem.llm import LLM
from onestem.request import SamplingParams

FACTS = "Document: The tower of Oakham is 1250 metres high. It was built in 1903.\n"
CHAT = [{"role": "user", "content": FACTS + "How high is the tower?"}]


@pytest.fixture(scope="module")
def client(embedded):
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm():
    return LLM(kv_memory="64MiB", device="cpu", dtype="float32")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").object == "model"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


def test_chat_is_the_engines_answer(client, llm):
    expected = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=20))[0]
    made = client.chat.completions.create(
        model="embedded", messages=CHAT, temperature=0, max_completion_tokens=20
    )
    assert made.choices[0].message.content == expected.outputs[0].text
    assert made.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert made.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_the_second_time_the_prompt_is_cached(client):
    prompt = "A prompt that nobody else has sent, of a good many words. " * 3
    first, second = (
        client.completions.create(model="embedded", prompt=prompt, max_tokens=1) for _ in range(2)
    )
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert first.usage.prompt_tokens_details.cached_tokens < 5


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer(client, n):
    asked = {"model": "embedded", "messages": CHAT, "max_tokens": 12, "n": n, "seed": 7}
    whole = client.chat.completions.create(**asked, temperature=1.5)
    texts, reasons, usage = [""] * n, [None] * n, None
    stream = client.chat.completions.create(
        **asked, temperature=1.5, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.total_tokens == whole.usage.total_tokens


def test_chat_logprobs(client, llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    expected = llm.chat(CHAT, params)[0].outputs[0]
    asked = {"model": "embedded", "messages": CHAT, "temperature": 0, "max_tokens": 5}
    made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = made.choices[0].logprobs.content
    for entry, token, logprobs in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(logprobs[token].logprob, abs=1e-4)
        assert bytes(entry.bytes) == llm.tokenizer.token_bytes(token)
        assert len(entry.top_logprobs) == 3
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completion_logprobs_and_offsets(client):
    asked = {"model": "embedded", "prompt": FACTS, "temperature": 0, "max_tokens": 6, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    starts = [len("".join(whole.logprobs.tokens[:i])) for i in range(6)]
    assert whole.logprobs.text_offset == starts
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert [o for chunk in chunks for o in chunk.logprobs.text_offset] == starts
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_stop(client):
    asked = {"model": "embedded", "prompt": FACTS + "Question: How high", "temperature": 0}
    free = client.completions.create(**asked, max_tokens=30).choices[0].text
    stop = free[5:8]
    for stream in (False, True):
        made = client.completions.create(**asked, max_tokens=30, stop=[stop], stream=stream)
        choices = [c for chunk in made for c in chunk.choices] if stream else made.choices
        assert "".join(choice.text for choice in choices) == free[: free.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_lists_of_prompts(client, llm):
    texts = ["One and", "Two and two is", "Three"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    params = SamplingParams(temperature=0, max_tokens=4, n=2)
    expected = [o.text for answer in llm.generate(texts, params) for o in answer.outputs]
    for prompt in (texts, ids):
        made = client.completions.create(
            model="embedded", prompt=prompt, temperature=0, max_tokens=4, n=2,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert [choice.text for choice in made.choices] == expected
        assert [choice.prompt_token_ids for choice in made.choices] == [
            ids[i // 2] for i in range(6)
        ]
        assert [choice.index for choice in made.choices] == list(range(6))
        assert made.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(model="embedded", prompt=ids[0], temperature=0, max_tokens=4)
    assert one.choices[0].text == expected[0]
    stream = client.completions.create(
        model="embedded", prompt=texts, temperature=0, max_tokens=4, n=2, stream=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    streamed, told = [""] * 6, [[] for _ in range(6)]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            told[choice.index] += getattr(choice, "prompt_token_ids", [])
    assert streamed == expected
    assert told == [ids[i // 2] for i in range(6)]
    first, *others = client.chat.completions.create(
        model="embedded", messages=CHAT, max_tokens=4, stream=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert first.prompt_token_ids == llm.tokenizer.apply_chat_template(CHAT)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in others)


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"height": {"type": "integer", "minimum": 0, "maximum": 9999}},
        "required": ["height"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="embedded",
        messages=CHAT,
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "h", "schema": schema}},
    )
    assert isinstance(json.loads(made.choices[0].message.content)["height"], int)


def test_penalties_bias_and_seed_change_what_they_should(client, llm):
    asked = {"model": "embedded", "prompt": "Hello", "max_tokens": 6}
    token = llm.tokenizer.encode("x", add_special_tokens=False)[0]
    biased = client.completions.create(**asked, logit_bias={str(token): 100}, temperature=0)
    assert biased.choices[0].text == llm.tokenizer.decode([token] * 6)
    seeded = [
        client.completions.create(**asked, seed=3, temperature=2).choices[0].text for _ in range(2)
    ]
    assert seeded[0] == seeded[1]
    repeated = client.completions.create(
        **asked, logit_bias={str(token): 20}, temperature=0, frequency_penalty=2,
        presence_penalty=2,
    )  # fmt: skip
    params = SamplingParams(
        logit_bias={token: 20}, temperature=0, frequency_penalty=2, presence_penalty=2, max_tokens=6
    )
    assert repeated.choices[0].text == llm.generate("Hello", params)[0].outputs[0].text


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(client, llm, max_tokens):
    """As lm-eval scores: the prompt's tokens with their log-probabilities, the first has none."""
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    expected = llm.generate(FACTS, params)[0]
    asked = {"model": "embedded", "temperature": 0, "max_tokens": max_tokens, "logprobs": 2}
    for prompt in (FACTS, list(expected.prompt_token_ids)):
        made = client.completions.create(prompt=prompt, echo=True, **asked)
        choice = made.choices[0]
        answer = expected.outputs[0] if max_tokens else None
        text = FACTS + (answer.text if answer else "")
        assert choice.text == text
        ids = [*expected.prompt_token_ids, *(answer.token_ids if answer else ())]
        entries = [*expected.prompt_logprobs, *(answer.logprobs if answer else ())]
        found = choice.logprobs
        assert len(found.tokens) == len(found.text_offset) == len(ids)
        assert ids[0] in llm.tokenizer.special_ids  # BOS, which the text does not have
        starts = [len("".join(found.tokens[1:i])) for i in range(len(ids))]
        assert found.text_offset == starts
        assert "".join(found.tokens[1:]) == text
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        for token, entry, value in zip(ids, entries, found.token_logprobs, strict=True):
            if entry is not None:
                assert value == pytest.approx(entry[token].logprob, abs=1e-5)
        assert made.usage.completion_tokens == max_tokens
    for bad in ({"stream": True}, {"extra_body": {"prompt_logprobs": 1}}):
        with pytest.raises(openai.BadRequestError, match="echo and"):
            client.completions.create(prompt=FACTS, echo=True, **asked, **bad)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        client.completions.create(prompt=FACTS, model="embedded", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs and stream"):
        client.completions.create(
            prompt=FACTS, model="embedded", stream=True, extra_body={"prompt_logprobs": 1}
        )
