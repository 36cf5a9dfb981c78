"""instructor: objects through tools and through JSON schemas."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest
from instructor import Mode

from tests.server.clients.asked import URL, USER, Answer

ASKED = {"model": "embedded", "messages": [{"role": "user", "content": USER}],
         "max_tokens": 200, "max_retries": 0}  # fmt: skip
COLD = {"temperature": 0}


def openai_client(mode):
    made = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(made, mode=mode)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_chats(mode):
    once = {} if mode is Mode.JSON_SCHEMA else {"parallel_tool_calls": False}
    made = openai_client(mode).create(**ASKED, **COLD, **once, response_model=Answer)
    assert isinstance(made, Answer)
    assert made._raw_response.usage.prompt_tokens > 10


def test_an_object_that_grows():
    pieces = list(
        openai_client(Mode.JSON_SCHEMA).create_partial(**ASKED, **COLD, response_model=Answer)
    )
    assert Answer.model_validate(pieces[-1].model_dump())


@pytest.mark.parametrize("mode", [Mode.RESPONSES_TOOLS])
def test_responses(mode):
    made = openai_client(mode).create(
        messages=ASKED["messages"],
        model="embedded",
        max_output_tokens=200,
        temperature=0,
        response_model=Answer,
        max_retries=0,
    )
    assert isinstance(made, Answer)


@pytest.mark.parametrize("mode", [Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS])
def test_messages(mode):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), mode=mode
    )
    made = client.create(**ASKED, extra_body=COLD, response_model=Answer)
    assert isinstance(made, Answer)
    assert made._raw_response.usage.output_tokens > 5
