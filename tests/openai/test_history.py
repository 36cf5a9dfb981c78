"""Histories through chat templates: nothing vanishes, and what is written is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from onestem import LLM, SamplingParams
from onestem.engine.grammar.held import held_schema
from onestem.engine.text.chat import ChatTemplate
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from onestem.openai.forms import AnswerReader, ReadAnswer, Reading
from onestem.openai.read import read_body
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.openai.templates import PLAIN, TEMPLATES

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK = [{"role": "user", "content": "Hi"}]
EXPECTED = {
    "plain": "generic", "strict": "generic", "phi": "phi4-mini", "smollm3": "hermes",
    "mistral": "mistral", "mistral-v3": "mistral",
    "mistral-v11": "mistral-ids", "mistral-v13": "mistral-args",
    "deepseek-v3.1": "deepseek-v3.1", "kimi": "kimi-k2", "granite": "granite3",
    "either": "deepseek-v3", "other": "generic",
}  # fmt: skip
# TRL's copies of real templates, and the form of each.
REAL = {
    "deepseekv3": "deepseek-v3", "deepseek_r1_distill": "deepseek-v3", "gemma": "generic",
    "gemma3": "generic", "gemma4_v5": "gemma4", "glm4moe": "glm", "gptoss": "harmony",
    "llama3": "generic", "llama3_1": "llama3", "llama3_2": "llama3", "nemotron_3_nano": "qwen-xml",
    "phi3_5": "generic", "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_6": "qwen-xml",
    "qwen3_8": "qwen-xml", "qwen3_instruct_2507": "hermes", "cohere2": "generic",
    "muse_glimmer": "generic",
}  # fmt: skip
# These drop reasoning on purpose, wherever it is.
FORGETFUL = ("deepseek_r1_distill",)


class Model:
    """What a chat template has of its tokenizer."""

    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, tools: object = None) -> str:
        return self.chat_template


def real(name: str) -> str:
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def templates() -> list[Any]:
    own = [pytest.param(name, form, id=name) for name, form in EXPECTED.items()]
    return own + [pytest.param(name, form, id=f"real-{name}") for name, form in REAL.items()]


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(Model(TEMPLATES[name] if name in TEMPLATES else real(name)))


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"callid00{number}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"callid00{number}", "content": content}


CALLS = [call(1, {"city": "Rome", "days": 2}), call(2, {"city": "7"})]


@pytest.mark.parametrize(("name", "form"), templates())
@pytest.mark.parametrize("given", [{"tools": [TOOL]}, {}])
def test_nothing_of_a_history_vanishes(name, form, given):
    template = template_of(name)
    assert template.form is not None
    assert template.form.name == form
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hmm.", "tool_calls": CALLS}
    history = [*ASK, turn, result(1, "sunny"), result(2, "rainy")]
    told = template.render(history, given, add_generation_prompt=True)
    wanted = ["Hi", "Rome", "sunny", "rainy", *(["Hmm."] if name not in FORGETFUL else [])]
    places = [told.index(one) for one in wanted]
    assert told.count("get_weather") >= 2 + len(given)
    if name not in FORGETFUL:
        assert places[4] < places[1] < places[2] < places[3]
    if given:
        assert "The weather of a city." in told


@pytest.mark.parametrize(("name", "form"), templates())
def test_ids_of_another_server_are_written_as_the_family_has_them(name, form):
    template = template_of(name)

    def rendered(ids: tuple[str, str]) -> str:
        calls = [{**one, "id": own} for one, own in zip(CALLS, ids, strict=True)]
        results = [result(1, "sunny"), result(2, "rainy")]
        results = [{**one, "tool_call_id": own} for one, own in zip(results, ids, strict=True)]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        messages = [*ASK, turn, *results]
        return template.render(messages, {"tools": [TOOL]}, add_generation_prompt=True)

    foreign = ("call_" + "a" * 24, "toolu_" + "b" * 24)
    if template.form.id_length:
        own = tuple(template.form.call_id(one) for one in foreign)
        assert rendered(own).replace(own[0], "callid001").replace(own[1], "callid002") == rendered(
            ("callid001", "callid002")
        )
    elif template.form.id_before:
        own = ("functions.get_weather:0", "functions.get_weather:1")
        assert "functions.get_weather:7" in rendered(("functions.get_weather:7", foreign[1]))
    else:
        own = foreign
    assert rendered(foreign) == rendered(own)


@pytest.mark.parametrize(("name", "form"), templates())
def test_text_beside_calls_is_kept_or_refused(name, form):
    template = template_of(name)
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS[:1]}
    history = [*ASK, turn, result(1, "sunny"), {"role": "assistant", "content": "It is."}, *ASK]
    if name == "mistral-v3":
        loop = template.render(history[:3], {"tools": [TOOL]}, add_generation_prompt=True)
        assert loop.index("Let me see.") < loop.index("Rome") < loop.index("sunny")
        with pytest.raises(RequestError, match="text beside calls of tools, for which"):
            template.render(history, {"tools": [TOOL]}, add_generation_prompt=True)
        with pytest.raises(RequestError, match="roles must alternate"):
            template.render([*history, *ASK], {"tools": [TOOL]}, add_generation_prompt=True)
        return
    told = template.render(history, {"tools": [TOOL]}, add_generation_prompt=True)
    # gpt-oss's reasoning before an answer is dropped on purpose, and such text with it.
    assert "Let me see." in told or form == "harmony"
    assert told.index("sunny") < told.index("It is.")


@pytest.mark.parametrize(("name", "form"), templates())
@pytest.mark.parametrize("calls", [CALLS[:1], CALLS])
def test_what_a_template_writes_is_read_back(name, form, calls):
    if name == "muse_glimmer":
        pytest.skip("its answers begin with a header that is in no form")
    template = template_of(name)
    given = {"tools": [TOOL]}

    def rendered(turn: dict[str, Any] | None) -> str:
        messages = [*ASK, turn] if turn else ASK
        return template.render(messages, given, add_generation_prompt=turn is None)

    thinks = template.form.has_reasoning and name not in FORGETFUL
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = rendered(turn | ({"reasoning_content": "Hmm.\n\nSo."} if thinks else {}))
    end = rendered({"role": "assistant", "content": "qzend"}).partition("qzend")[2]
    prompt, marks = rendered(None), template.form.reasoning
    opened = marks is not None and prompt.rstrip().endswith(marks.open)
    if opened and not whole.startswith(prompt):  # without reasoning it is not opened
        prompt, opened = prompt.rstrip().removesuffix(marks.open), False
    assert whole.startswith(prompt)
    reading = Reading(form=template.form, texts={"get_weather": ["city"]}, opened=opened)
    read = ReadAnswer.of(whole[len(prompt) :].removesuffix(end), reading)
    arguments = ['{"city": "Rome", "days": 2}', '{"city": "7"}'][: len(calls)]
    assert [text for _, text in read.calls[:2]] == arguments
    assert {called for called, _ in read.calls} == {"get_weather"}
    if len(calls) == 1:
        assert (read.text, read.reasoning) == ("", "Hmm.\n\nSo." if thinks else "")


@pytest.mark.parametrize(("name", "form"), templates())
@pytest.mark.parametrize("before", ["", "Let me see."])
@pytest.mark.parametrize("after", ["\nDone.\n", " And?"])
def test_the_next_prompt_has_what_is_said_after_calls_as_it_was_sampled(name, form, before, after):
    """Where the template writes texts as they are; else it stands before the calls."""
    template = template_of(name)
    if name in (*FORGETFUL, "gemma4_v5", "muse_glimmer"):
        pytest.skip("it leaves parts out, or writes them elsewhere, or its answers are of no form")
    # DeepSeek's drops the reasoning of what ends in a text.
    thinks = template.form.has_reasoning and name != "deepseekv3"

    def rendered(*turns: dict[str, Any], begins: bool = False) -> str:
        messages = [*ASK, *turns]
        return template.render(messages, {"tools": [TOOL]}, add_generation_prompt=begins)

    def turn(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
        made = {"role": "assistant", "content": content}
        return {**made, "tool_calls": [*calls]} if calls else made

    end = rendered(turn("qzend")).partition("qzend")[2]
    one, other = CALLS
    if form == "kimi-k2":  # whose ids count calls
        one, other = ({**made, "id": f"functions.get_weather:{n}"} for n, made in enumerate(CALLS))
    first = turn(before, one) | ({"reasoning_content": "Hm."} if thinks else {})
    told = rendered(first).removesuffix(end)
    again = rendered(turn("qzbefore", other)).removesuffix(end).partition("qzbefore")[2]
    results = [result(1, "sunny"), result(2, "rainy")]
    parts = [first, turn(after, other), turn("So.")]
    then = rendered(*parts, *results, begins=True)
    assert [then.count(one) for one in ("Rome", "So.", "sunny", "rainy")] == [1, 1, 1, 1]
    assert then.index("Rome") < then.index("sunny") < then.index("rainy")
    sampled = f"{told}{after}{again}So."
    if template.gaps.before_call is not None:
        assert then.startswith(sampled)
        prompt, marks = rendered(begins=True), template.form.reasoning
        opened = marks is not None and prompt.rstrip().endswith(marks.open)
        reading = Reading(form=template.form, opened=opened, gaps=template.gaps)
        read = ReadAnswer.of(sampled.removeprefix(prompt), reading)
        if sampled.startswith(prompt):
            assert (read.text, len(read.calls)) == (f"{before}{after}So.", 2)
    else:
        assert then.index("So.") < then.index("Rome")


@pytest.mark.parametrize(("name", "form"), templates())
@pytest.mark.parametrize("blanks", ["", "\n", "\n\n", " \n "])
def test_the_next_prompt_has_the_blanks_before_a_call_as_they_were_sampled(name, form, blanks):
    """Where the template keeps a text's own."""
    template = template_of(name)
    if template.gaps.before_call is None:
        pytest.skip("it trims texts, or writes them elsewhere")

    def rendered(content: str, calls: list[dict[str, Any]]) -> str:
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        turn = {key: value for key, value in turn.items() if value}
        return template.render([*ASK, turn], {"tools": [TOOL]}, add_generation_prompt=False)

    end = rendered("qzend", []).partition("qzend")[2]
    told = rendered(f"Let me see.{blanks}", CALLS[:1])
    sampled = "Let me see." + told.partition("Let me see.")[2].removesuffix(end)
    reading = Reading(form=template.form, texts={"get_weather": ["city"]}, gaps=template.gaps)
    read = ReadAnswer.of(sampled, reading)
    assert [called for called, _ in read.calls] == ["get_weather"]
    assert read.text == f"Let me see.{blanks}"
    assert rendered(read.text, CALLS[:1]) == told


SPELLED = (
    '{"city": "caf\\u00e9 \\/ \\ud83d\\ude00\\u0041", "d\\u0061ys": 1.50, '
    '"l": [1e3, -0, 2E-2, true, null, 12, 0.1], "o": {"b": 1.0, "a": "\\u2028"}}'
)
PLAINLY = (
    '{"city": "café / \U0001f600A", "days": 1.5, '
    '"l": [1000.0, 0, 0.02, true, null, 12, 0.1], "o": {"b": 1.0, "a": "\u2028"}}'
)


@pytest.mark.parametrize(("name", "form"), templates())
def test_the_next_prompt_has_arguments_as_they_were_spelled(name, form):
    """Numbers everywhere, escapes where arguments are JSON."""
    template = template_of(name)

    def rendered(arguments: str | dict[str, Any]) -> str:
        turn = {"role": "assistant", "content": None, "tool_calls": [call(1, arguments)]}
        (prompt,) = read_body("chat", {"messages": [*ASK, turn]}).prompts
        return template.render(prompt.messages, {"tools": [TOOL]}, add_generation_prompt=False)

    plainly, spelled = rendered(PLAINLY), rendered(SPELLED)
    is_json = PLAINLY in plainly
    assert is_json == (template.form.arguments is None)
    numbers = ["1.50", "1e3", "-0", "2E-2"]
    assert all(number in spelled for number in numbers)
    if is_json:
        assert spelled == plainly.replace(PLAINLY, SPELLED)
    else:
        assert [plainly.count(one) for one in ("café / \U0001f600A", "\u2028")] == [1, 1]
        for number, plain in zip(numbers, ["1.5", "1000.0", "0", "0.02"], strict=True):
            assert spelled.count(number) == 1
            spelled = spelled.replace(number, plain)
        assert spelled == plainly
    # A client's blanks are not those that the model wrote.
    assert rendered(PLAINLY.replace('": ', '":').replace(", ", ",")) == plainly
    assert rendered(json.loads(PLAINLY)) == plainly


def test_spellings_forge_no_control_token(tmp_path):
    """Names in keys, in values, and where an escape hides them."""
    path = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE, template=TEMPLATES["granite"],
                              more_names=["\\u00e9"])  # fmt: skip
    tokenizer = Tokenizer.from_directory(path)
    counts = []
    for arguments in (
        "{}", '{"<|eot_id|>": 1.50}', '{"a": "<|eot_id|> \\u0041"}', '{"a": "<|eot_id|\\u003e"}',
        '{"a": "\\u00e9"}', '{"\\u00e9": 1e3}',
    ):  # fmt: skip
        turn = {"role": "assistant", "content": None, "tool_calls": [call(1, arguments)]}
        (prompt,) = read_body("chat", {"messages": [*ASK, turn]}).prompts
        ids = tokenizer.apply_chat_template(prompt.messages)
        counts.append(sum(token in tokenizer.special_ids for token in ids))
    assert len(set(counts)) == 1


@pytest.mark.parametrize(("name", "form"), templates())
@pytest.mark.parametrize("blanks", ["", "\n", "\n\n\n"])
@pytest.mark.parametrize("content", ["", "So."])
def test_the_next_prompt_has_the_blanks_around_reasoning_as_they_were_sampled(
    name, form, blanks, content
):
    """Where the template keeps them; else it writes the same for any."""
    template = template_of(name)
    marks = template.form.reasoning
    if not template.form.has_reasoning or name in FORGETFUL or (content and marks is None):
        pytest.skip("there is none, or it has no place of its own")

    def rendered(turn: dict[str, Any] | None) -> str:
        messages = [*ASK, turn] if turn else ASK
        return template.render(messages, {"tools": [TOOL]}, add_generation_prompt=turn is None)

    def turn(thought: str, text: str) -> dict[str, Any]:
        made = {"role": "assistant", "reasoning_content": thought, "content": text}
        return {**made, "tool_calls": CALLS[:1]}

    told = rendered(turn(f"{blanks}Hm.\n\nWell.{blanks}", content and f"{blanks}{content}"))
    end = rendered({"role": "assistant", "content": "qzend"}).partition("qzend")[2]
    prompt, gaps = rendered(None), template.gaps
    opened = marks is not None and prompt.rstrip().endswith(marks.open)
    if opened:
        assert prompt.endswith(gaps.opening_thought or "\n")
        gaps = replace(gaps, opening_thought=gaps.opening_thought and "")
    assert told.startswith(prompt)
    texts = {"get_weather": ["city"]}
    reading = Reading(form=template.form, texts=texts, opened=opened, gaps=gaps)
    read = ReadAnswer.of(told[len(prompt) :].removesuffix(end), reading)
    if gaps.closing_thought is not None:
        assert read.reasoning == f"{blanks}Hm.\n\nWell.{blanks}"
    assert rendered(turn(read.reasoning, read.text)) == told


def test_blanks_alone_are_no_text_before_a_call():
    template = template_of("plain")
    assert template.gaps.before_call == "\n"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    reading = Reading(form=template.form, gaps=template.gaps)
    for blanks in ("", "\n", "\n\n \n"):
        read = ReadAnswer.of(blanks + call, reading)
        assert (read.text, len(read.calls)) == ("", 1)
    assert ReadAnswer.of(f"So.{call}", reading).text == "So."
    reader, told = AnswerReader(reading), ""
    for piece in ("I", " see", "\n", "\n", call):
        plain = reader.plain(piece)
        if plain is None:
            plain = "".join(event.text for event in reader.feed(piece))
        told += plain
    assert told == "I see\n"
    assert ReadAnswer.of(f"So.\n\n{call}\n\n{call}", reading).text == "So.\n"


def test_a_model_without_tools_is_asked_in_a_form_of_ours():
    template = template_of("plain")
    told = template.render(
        [{"role": "system", "content": "Be brief."}, *ASK],
        {"tools": [TOOL]},
        add_generation_prompt=True,
    )
    assert told.startswith("<|system|>Be brief.\n\n")
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in told
    assert told.endswith("<|end|><|user|>Hi<|end|><|assistant|>")
    loop = [*ASK, {"role": "assistant", "content": "", "tool_calls": CALLS},
            result(1, "sunny"), result(2, "rainy"), {"role": "user", "content": "So?"}]  # fmt: skip
    told = template.render(loop, {}, add_generation_prompt=True)
    assert told == (
        "<|user|>Hi<|end|><|assistant|><tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "7"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n"
        "</tool_response>\n\nSo?<|end|><|assistant|>"
    )
    for name in ("plain", "strict"):  # none: it is not told of tools
        silent = template_of(name).render(
            ASK, {"tools": [TOOL]}, add_generation_prompt=True, without_calls=True
        )
        assert silent == "<|user|>Hi<|end|><|assistant|>"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny model whose template has no tools; its ends are control tokens."""
    path = make_tiny("llama", tmp_path_factory.mktemp("plain") / "llama")
    template = PLAIN.replace("<|end|>", "<|eot_id|>")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE, template=template)
    with LLM(path, dtype="float32", kv_memory="8MiB", seed=0) as made:
        yield made


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
IN_CITY = {"type": "function", "function": {"name": "f", "parameters": CITY}}


def test_a_tool_loop_of_a_model_without_tools(plain):
    params = SamplingParams(max_tokens=200, seed=1)
    (answer,) = plain.chat(ASK, params, tools=[IN_CITY], tool_choice="required")
    message = plain.assistant_message(answer, tools=[IN_CITY])
    assert message["content"] is None
    assert {one["function"]["name"] for one in message["tool_calls"]} == {"f"}
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": "<|eot_id|>sunny"}
        for one in message["tool_calls"]
    ]
    (then,) = plain.chat([*ASK, message, *results], SamplingParams(max_tokens=1), tools=[IN_CITY])
    told = plain.tokenizer.decode(then.prompt_token_ids, skip_special_tokens=False)
    assert answer.outputs[0].text in told
    # What a result mentions is characters, and no end of a turn.
    end = plain.tokenizer.control_token("<|eot_id|>")
    assert list(then.prompt_token_ids).count(end) == 4


def test_what_clients_send_is_taken():
    call_as_sent = {"id": None, "type": "function", "index": None,
                    "function": {"name": "f", "arguments": {"city": "Rome"}}}  # fmt: skip
    body = {
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b", "cache_control": None, "annotations": None},
            ]},
            {"role": "assistant", "content": None, "reasoning": "Hm.", "refusal": None,
             "reasoning_details": None, "tool_calls": [call_as_sent, call_as_sent]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": None, "name": None},
        ],
        "tools": [{"type": "function", "function": {**IN_CITY["function"], "strict": None}}],
        "top_logprobs": 0, "logprobs": False, "parallel_tool_calls": None, "stop": None,
        "stream_options": None, "unknown": None,
    }  # fmt: skip
    asked = read_body("chat", body)
    user, assistant, one, two = asked.prompts[0].messages
    assert user["content"] == "a\nb"
    assert assistant["reasoning_content"] == "Hm."
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"city": "Rome"}] * 2
    ids = [c["id"] for c in assistant["tool_calls"]]
    assert [one["tool_call_id"], two["tool_call_id"]] == ids
    assert len(set(ids)) == 2
    assert (one["content"], two["content"]) == ("one", "")
    held = asked.held(template_of("plain").form, lambda name: None, held_schema)
    assert held.params.response_format["type"] == "structural_tag"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([*ASK, {"role": "tool", "content": "3"}], r"messages\[1\]: role tool has no tool_call_id"),
        ([{"role": "user", "content": "a", "reasoning": "b"}], "reasoning of role user"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content is missing"),
    ],
)
def test_messages_that_say_nothing_are_refused(messages, reason):
    with pytest.raises(RequestError, match=reason):
        read_body("chat", {"messages": messages})
