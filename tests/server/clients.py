"""Agents' libraries, and clients of other APIs than chats, against a running server, in an
environment of their own (clients.txt).

    python tests/server/clients.py http://127.0.0.1:8000/v1

Prints one JSON line: what each library has got. `test_clients.py` runs and reads it.
"""

from __future__ import annotations

import json
import os
import sys

import anthropic
import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL = sys.argv[1]
USER = "Is it warm in Rome?"


class Answer(BaseModel):
    yes: bool
    degrees: int = Field(ge=0, le=9)


@tool
def is_warm(city: bool) -> str:
    """Whether a city is warm."""
    return f"{city}: warm"


def langchain() -> dict:
    model = ChatOpenAI(
        base_url=URL, api_key="none", model="embedded", temperature=1, max_tokens=80, seed=3
    )
    bound = model.bind_tools([is_warm], tool_choice="any", parallel_tool_calls=False)
    asked = [HumanMessage(USER)]
    called = bound.invoke(asked)
    results = [ToolMessage("yes", tool_call_id=call["id"]) for call in called.tool_calls]
    then = model.bind_tools([is_warm], tool_choice="none").invoke([*asked, called, *results])
    streamed = None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    structured = model.with_structured_output(Answer, method="json_schema").invoke(USER)
    return {
        "called": [(call["name"], call["args"]) for call in called.tool_calls],
        "streamed": [(call["name"], call["args"]) for call in streamed.tool_calls],
        "finish_reason": called.response_metadata["finish_reason"],
        "text": then.content,
        "structured": structured.model_dump(),
    }


def pydantic_ai() -> dict:
    model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=URL, api_key="none"))
    settings = ModelSettings(max_tokens=80, temperature=1, seed=1, parallel_tool_calls=False)
    agent = Agent(model, output_type=Answer, model_settings=settings, retries=3)
    return agent.run_sync(USER).output.model_dump()


def instructed() -> list:
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
        made = client.chat.completions.create(
            model="embedded", messages=[{"role": "user", "content": USER}], max_tokens=200,
            response_model=Answer, temperature=1, seed=1, max_retries=1,
            **({"parallel_tool_calls": False} if mode is instructor.Mode.TOOLS else {}),
        )  # fmt: skip
        found.append(made.model_dump())
    return found


def lite() -> dict:
    function = {"name": "f", "parameters": Answer.model_json_schema()}
    asked = {
        "api_base": URL, "api_key": "none", "max_tokens": 80, "temperature": 1,
        "messages": [{"role": "user", "content": USER}],
    }  # fmt: skip
    called = litellm.completion(
        model="openai/embedded", tools=[{"type": "function", "function": function}],
        tool_choice="required", parallel_tool_calls=False, **asked,
    )  # fmt: skip
    chunks = list(litellm.completion(model="openai/embedded", stream=True, **asked))
    vllm = litellm.completion(model="hosted_vllm/embedded", **asked)
    choice = called.choices[0]
    return {
        "called": [choice.message.tool_calls[0].function.name,
                   json.loads(choice.message.tool_calls[0].function.arguments)],
        "finish_reason": choice.finish_reason,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "vllm": vllm.choices[0].message.content,
    }  # fmt: skip


def messages() -> dict:
    client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
    asked = {
        "model": "embedded", "max_tokens": 80, "extra_body": {"seed": 3, "temperature": 1.0},
        "messages": [{"role": "user", "content": USER}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    }  # fmt: skip
    tools = {
        "tools": [{"name": "f", "input_schema": Answer.model_json_schema()}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    found = {}
    for name, more in (("text", {}), ("called", tools)):
        whole = client.messages.create(**asked, **more)
        with client.messages.stream(**asked, **more) as stream:
            streamed = stream.get_final_message()
        beta = client.beta.messages.create(**asked, **more)
        found[name] = [
            [{**block.model_dump(), "id": None} for block in one.content]
            + [one.stop_reason, one.usage.output_tokens]
            for one in (whole, streamed, beta)
        ]
        if name == "called":
            (block,) = streamed.content
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "right"}
            turns = [*asked["messages"], streamed.to_param(),
                     {"role": "user", "content": [result]}]  # fmt: skip
            then = client.messages.create(**{**asked, "messages": turns})
            found["then"] = then.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(
        model="embedded", messages=asked["messages"], system=asked["system"]
    )
    usage = client.messages.create(**asked).usage
    found["counted"] = [
        counted.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    ]  # fmt: skip
    errors = {}
    for name, changes in {
        "model": {"model": "other"},
        "image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    }.items():
        try:
            client.messages.create(**{**asked, **changes})
        except anthropic.APIStatusError as error:
            errors[name] = [type(error).__name__, error.body["error"]["type"], error.request_id]
    return {**found, "errors": errors}


def responses() -> dict:
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    asked = {
        "model": "embedded", "input": USER, "max_output_tokens": 80, "temperature": 1.0,
        "extra_body": {"seed": 3}, "instructions": "Be brief.",
    }  # fmt: skip
    tool = {"type": "function", "name": "f", "parameters": Answer.model_json_schema(),
            "strict": True}  # fmt: skip
    tools = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    found = {}
    for name, more in (("text", {}), ("called", tools)):
        whole = client.responses.create(**asked, **more)
        with client.responses.stream(**asked, **more) as stream:
            types = list(dict.fromkeys(event.type for event in stream))
            streamed = stream.get_final_response()
        found[name] = [
            [one.output_text, one.status,
             [[item.name, item.arguments] for item in one.output if item.type == "function_call"]]
            for one in (whole, streamed)
        ]  # fmt: skip
        found[f"{name}_events"] = types
    items = [{"role": "user", "content": USER}, *whole.output]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "right"}
               for item in whole.output]  # fmt: skip
    same = {"model": "embedded", "instructions": "Be brief.", "temperature": 0.0, **tools,
            "max_output_tokens": 9, "tool_choice": "none"}  # fmt: skip
    stored = client.responses.create(input=results, previous_response_id=whole.id, **same)
    sent = client.responses.create(input=[*items, *results], store=False, **same)
    found["then"] = [[one.output_text, one.usage.input_tokens, one.store] for one in (stored, sent)]
    found["cached"] = sent.usage.input_tokens_details.cached_tokens
    found["got"] = client.responses.retrieve(stored.id).output_text
    client.responses.delete(stored.id)
    parsed = client.responses.parse(model="embedded", input=USER, text_format=Answer,
                                    max_output_tokens=200, temperature=0.0)  # fmt: skip
    found["parsed"] = parsed.output_parsed.model_dump()
    errors = {}
    for name, changes in {
        "deleted": {"previous_response_id": stored.id},
        "tool": {"tools": [{"type": "web_search"}]},
    }.items():
        try:
            client.responses.create(**{**asked, **changes})
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.param]
    return {**found, "errors": errors}


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    found = {
        "langchain": langchain(),
        "pydantic_ai": pydantic_ai(),
        "instructor": instructed(),
        "litellm": lite(),
        "anthropic": messages(),
        "responses": responses(),
    }
    print(json.dumps(found))
