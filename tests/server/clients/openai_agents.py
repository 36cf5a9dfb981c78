"""The Agents SDK of OpenAI, over responses and over chats."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    AgentHooks,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.server.clients.asked import BRIEF, CITIES, KEEPS_TOOLS, URL, USER, Answer, is_warm

APIS = pytest.mark.parametrize("api", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
STREAMED = pytest.mark.parametrize("streamed", [False, True])
ONCE = {"tool_choice": "required", "parallel_tool_calls": False}
set_tracing_disabled(True)


class Hooks(AgentHooks):
    """Takes the tools away once one has been called."""

    def __init__(self, left: list[bool]) -> None:
        self._left = left

    async def on_tool_end(self, context, agent, tool, result):
        self._left[0] = False


@pytest.fixture
def run():
    """Runs an agent; all runs of a test have one loop, as its client's connections need."""
    with asyncio.Runner() as runner:
        yield lambda *given, **more: runner.run(_run(*given, **more))


async def _run(agent, asked, streamed, **more):
    if not streamed:
        return await Runner.run(agent, asked, **more)
    found = Runner.run_streamed(agent, asked, **more)
    types = {event.type async for event in found.stream_events()}
    assert types >= {"raw_response_event", "run_item_stream_event"}
    return found


def agent_of(api, **more):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(
        temperature=0, max_tokens=80, include_usage=True, **more.pop("settings", {})
    )
    model = api("embedded", client)
    return Agent("Weather", instructions=BRIEF, model=model, model_settings=settings, **more)


@APIS
@STREAMED
def test_a_tool_is_called_and_its_result_is_sent_back(run, api, streamed):
    """A run that ends with the tool's result, and a run after it that has both."""
    agent = agent_of(
        api, tools=[function_tool(is_warm)], settings=ONCE, tool_use_behavior="stop_on_first_tool"
    )
    called = run(agent, USER, streamed)
    assert called.final_output in {f"{city} is warm." for city in CITIES}
    first = called.raw_responses[0]
    assert first.usage.input_tokens > 10
    assert first.usage.output_tokens > 5
    items = [*called.to_input_list(), {"role": "user", "content": "And now?"}]
    agent.model_settings = ModelSettings(
        temperature=0, tool_choice="none", max_tokens=80, include_usage=True
    )
    then = run(agent, items, streamed)
    assert then.final_output
    (answered,) = then.raw_responses
    read = answered.usage.input_tokens_details.cached_tokens
    assert not KEEPS_TOOLS or read >= first.usage.input_tokens - 8


@APIS
@STREAMED
def test_the_loop_of_an_agent(run, api, streamed):
    """Call, result and text in one run: after its first call no tool is left."""
    if not KEEPS_TOOLS and api is OpenAIResponsesModel:
        pytest.skip("the model talks on, and this client takes a cut answer for an error")
    left = [True]
    tool = function_tool(is_warm, is_enabled=lambda context, agent: left[0])
    agent = agent_of(api, tools=[tool], settings=ONCE)
    agent.hooks = Hooks(left)
    found = run(agent, USER, streamed)
    kinds = [item.type for item in found.new_items]
    assert kinds[-1] == "message_output_item"
    calls = [item for item in found.new_items if item.type == "tool_call_item"]
    results = [item.output for item in found.new_items if item.type == "tool_call_output_item"]
    assert len(calls) == len(results) == 1
    assert set(results) <= {f"{city} is warm." for city in CITIES}
    assert found.final_output
    assert len(found.raw_responses) == 2


@APIS
@STREAMED
def test_structured_output(run, api, streamed):
    found = run(agent_of(api, output_type=Answer), USER, streamed)
    assert isinstance(found.final_output, Answer)


def test_stored_responses_go_on(run):
    agent = agent_of(OpenAIResponsesModel)
    first = run(agent, USER, False)
    then = run(agent, "And in Paris?", False, previous_response_id=first.last_response_id)
    sent = run(agent, [*first.to_input_list(), {"role": "user", "content": "And in Paris?"}], False)
    counts = [one.raw_responses[0].usage.input_tokens for one in (then, sent)]
    assert counts[0] == counts[1] > first.raw_responses[0].usage.input_tokens
