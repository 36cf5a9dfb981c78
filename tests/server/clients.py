"""Agents' libraries against a running server, in an environment of their own (clients.txt).

    python tests/server/clients.py http://127.0.0.1:8000/v1

Prints one JSON line: what each library has got. `test_clients.py` runs and reads it.
"""

from __future__ import annotations

import json
import os
import sys

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


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    found = {
        "langchain": langchain(),
        "pydantic_ai": pydantic_ai(),
        "instructor": instructed(),
        "litellm": lite(),
    }
    print(json.dumps(found))
