"""pydantic-ai's models of OpenAI's chats, its responses, and of Anthropic."""

from __future__ import annotations

import asyncio

import pytest
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.clients.asked import BRIEF, CITIES, KEEPS_TOOLS, URL, USER, Answer, is_warm

APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])
SETTINGS = ModelSettings(max_tokens=80, temperature=0, parallel_tool_calls=False)


def model_of(api):
    if api == "messages":
        # It does not know which models of others can follow a schema.
        able = ModelProfile(supports_json_schema_output=True)
        provider = AnthropicProvider(base_url=URL, api_key="none")
        return AnthropicModel("embedded", provider=provider, profile=able)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind("embedded", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


class CallsFirst(AbstractCapability):
    """A call in the first step, and none in the second."""

    def get_model_settings(self):
        return lambda context: {"tool_choice": ["is_warm"] if context.run_step == 1 else "none"}


def run(agent, asked, streamed, **more):
    if not streamed:
        return agent.run_sync(asked, **more)

    async def ran():
        async with agent.run_stream(asked, **more) as found:
            pieces = [piece async for piece in found.stream_output(debounce_by=None)]
            assert pieces
            return found

    return asyncio.run(ran())


@APIS
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("output", ["text", "object"])
def test_a_tool_is_called_and_its_result_is_answered(api, streamed, output):
    agent = Agent(
        model_of(api), tools=[is_warm], capabilities=[CallsFirst()], model_settings=SETTINGS,
        output_type=str if output == "text" else ToolOutput(Answer), instructions=BRIEF,
    )  # fmt: skip
    found = run(agent, USER, streamed)
    messages = found.all_messages()
    asked, then = (one for one in messages if isinstance(one, ModelResponse))
    (call,) = [part for part in asked.parts if isinstance(part, ToolCallPart)]
    assert call.tool_name == "is_warm"
    assert call.args_as_dict()["city"] in CITIES
    returned = [part.content for one in messages for part in one.parts
                if isinstance(part, ToolReturnPart) and part.tool_name == "is_warm"]  # fmt: skip
    assert returned == [f"{call.args_as_dict()['city']} is warm."]
    # Responses have no reason of their own for calls.
    assert asked.finish_reason == ("stop" if api == "responses" else "tool_call")
    assert asked.usage.input_tokens > 10
    assert not KEEPS_TOOLS or then.usage.cache_read_tokens > asked.usage.input_tokens // 2
    if output == "object":
        assert isinstance(answer_of(found, streamed), Answer)
    else:
        assert answer_of(found, streamed) == "".join(
            part.content for part in then.parts if part.part_kind == "text"
        )


def answer_of(found, streamed):
    return asyncio.run(found.get_output()) if streamed else found.output


@APIS
def test_an_object_as_the_text(api):
    agent = Agent(model_of(api), output_type=NativeOutput(Answer), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(USER).output, Answer)
