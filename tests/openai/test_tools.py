"""Calls of tools: held to their schemas, and read from a model's text."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import jsonschema_rs
import pytest
import transformers

from onestem import LLM, SamplingParams
from onestem.engine.grammar.held import held_schema
from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.errors import RequestError
from onestem.openai.forms import AnswerReader, ReadAnswer, Reading, form_of
from onestem.openai.forms.families import NAMED
from onestem.openai.forms.form import Form
from onestem.openai.read import read_body
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.soak import soaked

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
USER = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", kv_memory="64MiB") as made:
        yield made


def read(text: str, form: Form) -> ReadAnswer:
    return ReadAnswer.of(text, Reading(form=form))


def ask(llm: LLM, **body: Any):
    return ask_all(llm, [body])[0]


def ask_all(llm: LLM, bodies: list[dict[str, Any]]):
    tokenizer, prompts, params = llm.tokenizer, [], []
    for body in bodies:
        given = {"messages": USER, "max_tokens": 150, "temperature": 1.0, "seed": 1, **body}
        asked = read_body("chat", given).held(
            tokenizer.tool_form, tokenizer.control_token, held_schema
        )
        prompt = asked.prompts[0]
        prompts.append(tokenizer.apply_chat_template(prompt.messages, **asdict(prompt.template)))
        params.append(asked.params)
    return [output.outputs[0] for output in llm.generate(prompts, params)]


# --- reading -----------------------------------------------------------------------------------

TEXTS = [
    (NAMED["hermes"], "no call", "no call", []),
    (NAMED["hermes"], "half a <tool_ca", "half a <tool_ca", []),
    (
        NAMED["hermes"],
        "one < two <tool_call> that is none",
        "one < two <tool_call> that is none",
        [],
    ),
    (
        NAMED["hermes"],
        'Now. \n<tool_call>\n{"name": "f", "arguments": {"x":"}</tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        "Now.",
        [("f", '{"x":"}</tool_call>\\""}'), ("g", "{}")],
    ),
    (NAMED["hermes"], '<tool_call>\n{"name": "f", "arguments": {"x":[1,', "", [("f", '{"x":[1,')]),
    (
        NAMED["llama3"],
        '{"name": "f", "parameters": {"a": "}{"}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": "}{"}'), ("g", "{}")],
    ),
    (NAMED["llama3"], '{"nam": 1} and text', '{"nam": 1} and text', []),
    (
        NAMED["mistral"],
        'hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        "hi",
        [("f", '{"a": [1]}'), ("g", "{}")],
    ),
    (
        NAMED["mistral-args"],
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "\\"}"}',
        "",
        [("f", '{"a": 1}'), ("g", '{"b": "\\"}"}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_read(form, text, content, calls) -> None:
    found = read(text, form)
    assert (found.text, found.calls) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_give_what_the_whole_gives(form, text, content, calls, seed) -> None:
    rng = random.Random(seed)
    parser, events = AnswerReader(Reading(form=form)), []
    while text:
        size = rng.randint(1, 6 if seed else 1)
        events += parser.feed(text[:size])
        text = text[size:]
    events += parser.finish()
    assert "".join(event.text for event in events) == content
    found: dict[int, tuple[str, str]] = {}
    for event in events:
        if event.name:
            assert event.index == len(found)
            found[event.index] = (event.name, "")
        elif event.arguments:
            name, arguments = found[event.index]
            found[event.index] = (name, arguments + event.arguments)
    assert list(found.values()) == calls


def test_forms_are_told_by_their_templates() -> None:
    assert form_of("{{ tools }} <tool_call>") is NAMED["hermes"]
    assert form_of('{{ tools }} {"name": name, "parameters": x}') is NAMED["llama3"]
    assert form_of("{{ tools }} [TOOL_CALLS] [") is NAMED["mistral"]
    assert form_of("{{ tools }} [TOOL_CALLS] [ARGS]") is NAMED["mistral-args"]
    assert form_of("{{ messages }} <tool_call>") is None
    assert form_of("{{ tools }} <tool_call><function=") is NAMED["qwen-xml"]
    assert form_of("{{ tools }}") is None


# --- held to their schemas ---------------------------------------------------------------------


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "const", "anyOf"]
    kind = rng.choice([*kinds, "object", "array"] if depth < 2 else kinds)
    if kind == "enum":
        return {"enum": rng.sample(["red", "green blue", 'a"b', 3, True, None], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, None])}
    if kind == "anyOf":
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 5)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 99)}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2}
    if kind == "object":
        return an_object(rng, depth + 1)
    return {"type": "boolean"}


def an_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["a", "b_c", "d e", "f-g"], rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required}


@pytest.mark.parametrize("count", [25, soaked(200)])
def test_arguments_fit_random_schemas(llm, count: int) -> None:
    """Under `required` every call that was not cut fits, and names a tool."""
    rng = random.Random(0)
    schemas = {f"f{i}": an_object(rng) for i in range(count)}
    bodies = [
        {
            "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        for name, schema in schemas.items()
    ]
    complete = 0
    outputs = ask_all(llm, bodies)
    for (name, schema), output in zip(schemas.items(), outputs, strict=True):
        found = read(output.text, llm.tokenizer.tool_form)
        assert found.text == ""
        ((called, arguments),) = found.calls
        assert called == name
        if output.finish_reason == "stop":
            complete += 1
            jsonschema_rs.Draft202012Validator(schema).validate(json.loads(arguments))
    assert complete >= 0.95 * count


def test_whom_a_choice_lets_call(llm) -> None:
    def called(**body: Any) -> list[str]:
        output = ask(llm, tools=[WEATHER, ADD], **body)
        return [name for name, _ in read(output.text, llm.tokenizer.tool_form).calls]

    assert called(tool_choice={"type": "function", "function": {"name": "add"}}) == ["add"]
    few = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    assert set(called(tool_choice={"type": "allowed_tools", "allowed_tools": few})) == {"add"}
    assert called(tool_choice="required", parallel_tool_calls=False) != []
    assert len(called(tool_choice="required", max_tokens=300)) >= 1
    assert called(tool_choice="none") == []


@pytest.mark.parametrize(
    "form", [NAMED["hermes"], NAMED["llama3"], NAMED["mistral"], NAMED["mistral-args"]]
)
@pytest.mark.parametrize("parallel", [False, True])
def test_each_form_reads_what_it_makes(llm, form, parallel) -> None:
    """The grammar of a form, over the embedded model's tokens, against its parser."""
    compiler = llm.engine.requests.grammars
    asked = read_body(
        "chat",
        {"messages": USER, "tools": [WEATHER, ADD], "tool_choice": "required", "temperature": 1.0,
         "parallel_tool_calls": parallel, "seed": 3, "max_tokens": 200},
    )  # fmt: skip
    held = asked.held(form, lambda name: None, held_schema)
    output = llm.generate("x", held.params)[0].outputs[0]
    found = read(output.text, form)
    assert found.text == ""
    assert found.calls
    assert {name for name, _ in found.calls} <= {"get_weather", "add"}
    for name, arguments in found.calls[: -1 if output.finish_reason == "length" else None]:
        value = json.loads(arguments)
        assert name == "add" or value["city"] in ("Paris", "Rome")
    assert parallel or len(found.calls) == 1
    assert compiler is not None


def test_the_next_prompt_has_calls_as_they_were_sampled(llm) -> None:
    """In the blanks of `json.dumps`, as templates have them; numbers and texts as they were
    spelled."""
    fields = {
        "x": {"enum": [7, True, "a b"]},
        "y": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
        "n": {"type": "number"},
        "s": {"type": "string", "maxLength": 4},
    }
    inner = {"type": "object", "properties": fields, "required": [*fields]}
    outer = {**inner, "properties": {**fields, "z": inner}, "required": [*fields, "z"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": outer}}
    counts, odd = [], 0
    body = {"tools": [tool], "tool_choice": "required", "max_tokens": 400}
    bodies = [{**body, "seed": seed} for seed in range(16)]
    for output in ask_all(llm, bodies):
        if output.finish_reason != "stop":
            continue
        calls = [
            {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in read(output.text, llm.tokenizer.tool_form).calls
        ]
        sent = read_body("chat", {"messages": [*USER, {"role": "assistant", "tool_calls": calls}]})
        rendered = llm.tokenizer.render_chat(sent.prompts[0].messages, False)
        assert rendered.endswith(f"<|assistant|>{output.text}<|end|>")
        counts.append(len(calls))
        each = [call["function"]["arguments"] for call in calls]
        odd += any(json.dumps(json.loads(one), ensure_ascii=False) != one for one in each)
    assert (max(counts) > 1, odd > 1) == (True, True)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [None, False])
def test_a_schema_that_cannot_be_enforced(llm, choice, strict) -> None:
    """Any object will do, unless the function is strict."""
    function = {"name": "f", "parameters": {"not": {"required": ["x"]}}, "strict": strict}
    body = {"tools": [ADD, {"type": "function", "function": function}], "tool_choice": choice}
    assert ask(llm, **body, max_tokens=5).finish_reason in ("stop", "length")
    function["strict"] = True
    why = r"^tools\[1\]\.function\.parameters has 'not', which is not enforced: leave it out, or"
    with pytest.raises(RequestError, match=why):
        ask(llm, **body)


def test_any_object_is_written_for_such_a_schema(llm) -> None:
    function = {"name": "f", "parameters": {"not": {"required": ["x"]}}}
    asked = read_body("chat", {"messages": USER, "tool_choice": "required",
                               "tools": [{"type": "function", "function": function}]})  # fmt: skip
    held = asked.held(NAMED["mistral-args"], lambda name: None, held_schema)
    state = llm.engine.requests.grammars.compile(held.params.response_format)
    text = '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}, "c": "d"}'
    for token in llm.tokenizer.encode(text, add_special_tokens=False):
        state.accept(token)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "nonsense"}}}, "cannot be used: type is 'nonsense'"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "cannot be used: .* leads to no schema"),
        # xgrammar's own
        ({"properties": {"a": {"type": "array", "minItems": 1}}}, "cannot be used: minItems is"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_name(llm, choice, schema, message) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError, match=rf"^tools\[1\]\.function\.parameters {message}"):
        ask(llm, tools=[WEATHER, tool], tool_choice=choice)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [WEATHER, WEATHER]}, "two functions of one name"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "expected none, auto, required"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "not among the tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"name is 'a b'"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type is 'web_search'"),
        ({"tools": [WEATHER], "choices": ["a"]}, "choices and tools"),
        ({"tools": [WEATHER], "response_format": {"type": "regex", "regex": "a"}}, "beside tools"),
        ({"reasoning_effort": "low"}, "chat template does not know it"),
        (
            {"tools": [{**ADD, "function": {"name": "f", "parameters": {"type": "integer"}}}]},
            r"tools\[0\].function.parameters is .*, expected the JSON schema of an object",
        ),
        ({"tools": [ADD], "chat_template_kwargs": {"tools": []}}, "give one of them"),
        ({"messages": [{"role": "tool", "content": "3"}]}, r"messages\[0\]: role tool has no"),
    ],
)  # fmt: skip
def test_refused(llm, body, message) -> None:
    with pytest.raises(RequestError, match=message):
        ask(llm, **body)


def test_an_answer_beside_tools_has_its_format(llm) -> None:
    """Calls and nothing else, or an answer that fits."""
    schema = {"type": "object", "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies = [{"tools": [WEATHER], "response_format": wanted, "seed": seed} for seed in range(8)]
    for output in ask_all(llm, bodies):
        found = read(output.text, llm.tokenizer.tool_form)
        if output.finish_reason == "stop" and not found.calls:
            assert json.loads(output.text) in ({"b": "x"}, {"b": "y"})
        assert found.calls == [] or found.text == ""


def test_a_call_that_a_stop_string_cuts_is_open() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"u":"'
    assert read(text, NAMED["hermes"]).is_cut
    assert not read(text + '"}}\n</tool_call>', NAMED["hermes"]).is_cut


def test_plain_json_is_no_call_of_llama(llm) -> None:
    asked = read_body("chat", {"messages": USER, "tools": [ADD], "temperature": 0})
    held = asked.held(NAMED["llama3"], lambda name: None, held_schema)
    state = llm.engine.requests.grammars.compile(held.params.response_format)
    for token in llm.tokenizer.encode('It is {"name": "Bob", "age": 3}', add_special_tokens=False):
        state.accept(token)


MARKS = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A tiny model to which the marks of all forms are control tokens."""
    path = make_tiny("llama", tmp_path_factory.mktemp("marked") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE, more_names=MARKS)
    with LLM(path, dtype="float32", kv_memory="8MiB", seed=0) as made:
        yield made


CITY = {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
IN_CITY = {"type": "function", "function": {"name": "f", "parameters": CITY}}
MARKED = [
    (NAMED["hermes"], [MARKS[2], '\n{"name": "f", "arguments": {"city": "Rome"}}\n', MARKS[3]]),
    (NAMED["llama3"], [MARKS[4], '{"name": "f", "parameters": {"city": "Rome"}}']),
    (NAMED["mistral"], [MARKS[0], ' [{"name": "f", "arguments": {"city": "Rome"}}]']),
    (NAMED["mistral-args"], [MARKS[0], "f", MARKS[1], '{"city": "Rome"}']),
]


@pytest.mark.parametrize(("form", "call"), MARKED)
@pytest.mark.parametrize("free", ["", "Well,\tthen"])
def test_marks_that_are_control_tokens(marked, form, call, free) -> None:
    """They are allowed where a call has them, alone of all control tokens, and read; none of them
    is in a text."""
    tokenizer = marked.tokenizer
    body = {"messages": USER, "tools": [IN_CITY], "tool_choice": "auto" if free else "required"}
    held = read_body("chat", body).held(form, tokenizer.control_token, held_schema)
    state = marked.engine.requests.grammars.compile(held.params.response_format)
    own = set(map(tokenizer.control_token, (*form.marks, form.silent)))
    never = tokenizer.special_ids - own - {tokenizer.eos_token_id}
    ids = []
    for part in (free, *call):
        mark = tokenizer.control_token(part)
        for token in tokenizer.encode(part, add_special_tokens=False) if mark is None else [mark]:
            words = state.fill_mask().tolist()
            allowed = {t for t in range(tokenizer.vocab_size) if words[t // 32] >> (t % 32) & 1}
            assert token in allowed
            assert not allowed & never
            if mark is None and part != free and not (free and form.silent):
                assert not allowed & own
            state.accept(token)
            ids.append(token)
    detokenizer = IncrementalDetokenizer(tokenizer, held.params)
    pieces = [*map(detokenizer.append, ids), detokenizer.finish()]
    whole = read("".join(pieces), form)
    assert (whole.text, whole.calls) == (free, [("f", '{"city": "Rome"}')])
    parser = AnswerReader(Reading(form=form))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert "".join(event.text for event in events) == free
    assert "".join(event.arguments for event in events) == '{"city": "Rome"}'


@pytest.mark.parametrize("form", [form for form, _ in MARKED])
def test_a_model_calls_with_control_tokens(marked, form) -> None:
    body = {"messages": USER, "tools": [IN_CITY], "tool_choice": "required", "temperature": 1.0,
            "parallel_tool_calls": False, "max_tokens": 150}  # fmt: skip
    held = read_body("chat", body).held(form, marked.tokenizer.control_token, held_schema)
    params = [held.params.replace(seed=seed) for seed in range(4)]
    for output in marked.generate(["x"] * 4, params):
        assert output.outputs[0].finish_reason == "stop"
        found = read(output.outputs[0].text, form)
        ((name, arguments),) = found.calls
        assert (found.text, name) == ("", "f")
        assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_a_model_without_tools_says_so() -> None:
    asked = read_body("chat", {"messages": USER, "tools": [WEATHER]})
    with pytest.raises(RequestError, match="the model's chat template has no tools"):
        asked.held(None, lambda name: None, held_schema)
    free = read_body("chat", {"messages": USER, "tools": [WEATHER], "tool_choice": "none"})
    assert free.held(None, lambda name: None, held_schema).params.response_format is None


def test_a_call_that_was_cut_may_be_sent_back(llm) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "y'}}]
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "cut"},
    ]
    assert ask(llm, messages=messages).finish_reason in ("stop", "length")


# --- in Python ---------------------------------------------------------------------------------

CALLED = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
AGENT = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "name": "Ada", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "x", "type": "function", "function": CALLED}]},
    {"role": "tool", "tool_call_id": "x", "content": "sunny"},
]  # fmt: skip
SHORT = SamplingParams(max_tokens=1, temperature=0)


def test_chat_reads_messages_as_http_does(llm) -> None:
    body = {"messages": AGENT, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 1}
    read = read_body("chat", body).prompts[0]
    (answer,) = llm.chat(AGENT, SHORT, tools=[WEATHER], tool_choice="none")
    expected = llm.tokenizer.apply_chat_template(read.messages, **asdict(read.template))
    assert answer.prompt_token_ids == expected
    frozen = tuple(MappingProxyType({**message}) for message in AGENT)
    (same,) = llm.chat(frozen, SHORT, tools=(MappingProxyType(WEATHER),), tool_choice="none")
    assert same.prompt_token_ids == expected


def test_chat_with_tools_is_as_transformers_has_it(llm) -> None:
    """Arguments as objects, contents as texts, `developer` as the template's `system`."""
    oracle = transformers.AutoTokenizer.from_pretrained(llm.path)
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ada", "content": "a\nb"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        AGENT[3],
    ]  # fmt: skip
    rendered = oracle.apply_chat_template(
        plain, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    (answer,) = llm.chat(AGENT, SHORT, tools=[WEATHER])
    assert llm.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False) == rendered
    assert "get_weather" in rendered


def test_chat_holds_calls_and_gives_the_message(llm) -> None:
    """As over HTTP; the message is read again as one."""
    params = SamplingParams(max_tokens=150, seed=1, n=2)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        one, two = llm.chat([USER, USER], params, tools=[WEATHER, ADD], tool_choice=choice)
        over_http = ask(llm, tools=[WEATHER, ADD], tool_choice=choice)
        assert one.outputs[0].text == two.outputs[0].text == over_http.text
        for index, output in enumerate(one.outputs):
            message = llm.assistant_message(one, index)
            assert message["content"] is None
            calls = [call["function"] for call in message["tool_calls"]]
            found = read(output.text, llm.tokenizer.tool_form).calls
            assert [(call["name"], call["arguments"]) for call in calls] == found
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"}
                for call in message["tool_calls"]
            ]
            (then,) = llm.chat([*USER, message, *results], SHORT, tools=[WEATHER, ADD])
            assert then.finished
    (free,) = llm.chat(USER, SHORT)
    assert llm.assistant_message(free) == {"role": "assistant", "content": free.outputs[0].text}


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        (["hi"], {}, "messages is 'hi', expected a list of at least one message"),
        ([{"content": "x"}], {}, r"messages\[0\].role is missing"),
        ([{"role": "user"}], {}, r"messages\[0\]: content is missing"),
        ([{"role": "<|eot_id|>", "content": "x"}], {}, r"messages\[0\].role is '<\|eot_id\|>'"),
        ([{"role": "user", "content": ["y"]}], {}, r"messages\[0\].content\[0\] is 'y'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "type is 'image_url'"),
        ([{"role": "user", "content": "a\ud800"}], {}, "half a character"),
        ([{"role": "tool", "content": "3"}], {}, r"messages\[0\]: role tool has no tool_call_id"),
        (USER, {"tool_choice": "required"}, "tool_choice needs tools"),
        (USER, {"tools": [WEATHER], "tool_choice": "any"}, "expected none, auto, required"),
        (USER, {"tools": "x"}, "tools is 'x', expected a list of objects"),
        (USER, {"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\], expected an object"),
        (USER, {"chat_template_kwargs": {"a": {1: 2, "b": 3}}}, "cannot be written as JSON: '<'"),
    ],
)
def test_chat_refuses_as_http_does(llm, messages, options, reason) -> None:
    steps = llm.engine.stats.steps
    with pytest.raises(RequestError, match=reason) as caught:
        llm.chat(messages, SHORT, **options)
    assert "\n" not in str(caught.value)
    assert llm.engine.stats.steps == steps


def test_chat_refuses_tools_beside_choices(llm) -> None:
    with pytest.raises(RequestError, match="choices and tools"):
        llm.chat(USER, SamplingParams(choices=["a"]), tools=[WEATHER])
