"""Forms of families: what each writes is read back, in any pieces, and its grammar admits it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.grammar.held import held_schema
from onestem.engine.text.tokenizer import Tokenizer
from onestem.openai.forms import (
    FORMS,
    AnswerReader,
    Form,
    Gaps,
    ReadAnswer,
    Reading,
    Tools,
    held_to,
)
from onestem.openai.forms.families import NAMED
from onestem.openai.forms.form import Reasoning
from onestem.openai.forms.reader import AnswerEvent
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.soak import soaked

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "e": {"enum": ["x", "y"]},
        "l": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["s"],
}
TOOLS = {
    0: {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    1: {"type": "function", "function": {"name": "g"}},
}
THINKING = replace(NAMED["hermes"], reasoning=Reasoning.tagged())
F = ("f", '{"s": "12"}')
G = ("g", "{}")

# What a form's model writes, and the calls in it.
WRITTEN: list[tuple[Form, str, list[tuple[str, str]]]] = [
    (
        NAMED["hermes"],
        '<tool_call>\n{"name": "f", "arguments": {"s": "12"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        [F, G],
    ),
    (
        NAMED["qwen-xml"],
        '<tool_call>\n<function=f>\n<parameter=s>\n12\n"x"\n</parameter>\n<parameter=n>\n12\n'
        "</parameter>\n<parameter=e>\nx\n</parameter>\n<parameter=l>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [("f", '{"s": "12\\n\\"x\\"", "n": 12, "e": "x", "l": [1, 2]}'), G],
    ),
    (
        NAMED["glm"],
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>l</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n</tool_call>",
        [("f", '{"s": "12", "l": [1, 2]}')],
    ),
    (
        NAMED["glm-short"],
        "<tool_call>f<arg_key>s</arg_key><arg_value>12</arg_value></tool_call>"
        "<tool_call>g</tool_call>",
        [F, G],
    ),
    (
        NAMED["llama3"],
        '{"name": "f", "parameters": {"s": "12"}}; {"name": "g", "parameters": {}}',
        [F, G],
    ),
    (
        NAMED["mistral"],
        '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "12"}}, {"name": "g", "arguments": {}}]',
        [F, G],
    ),
    (NAMED["mistral-args"], '[TOOL_CALLS]f[ARGS]{"s": "12"}[TOOL_CALLS]g[ARGS]{}', [F, G]),
    (NAMED["mistral-ids"], '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"s": "12"}', [F]),
    (
        NAMED["deepseek-v3"],
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "12"}\n'
        "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [F, G],
    ),
    (
        NAMED["deepseek-v3.1"],
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "12"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [F, G],
    ),
    (
        NAMED["kimi-k2"],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "12"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>'
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        [F, G],
    ),
    (NAMED["granite3"], '<|tool_call|>[{"name": "f", "arguments": {"s": "12"}}]', [F]),
    (NAMED["phi4-mini"], 'functools[{"name": "f", "arguments": {"s": "12"}}]', [F]),
    (
        NAMED["phi4-marked"],
        '<|tool_call|>{"name": "f", "arguments": {"s": "12"}}<|/tool_call|>',
        [F],
    ),
    (
        NAMED["harmony"],
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "12"}',
        [F],
    ),
    (NAMED["harmony"], ' to=functions.f<|channel|>commentary json<|message|>{"s": "12"}', [F]),
    (
        NAMED["gemma4"],
        '<|tool_call>call:f{e:<|"|>x<|"|>,l:[1,2],n:3,s:<|"|>1"2<|"|>}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        [("f", '{"e": "x", "l": [1, 2], "n": 3, "s": "1\\"2"}'), G],
    ),
]
THOUGHT = "<|channel|>analysis<|message|>Hm.\n\nSo.<|end|><|start|>assistant"
CALL = WRITTEN[0][1]
# An answer, whether its prompt ends inside reasoning, its text, reasoning, and names of calls.
ANSWERS = [
    (THINKING, "<think>\nHm.\n\nSo.\n</think>\n\nHi.", False, "Hi.", "Hm.\n\nSo.", []),
    (THINKING, "Hm.\n\nSo.\n</think>\n\nHi.\n", True, "Hi.\n", "Hm.\n\nSo.", []),
    (THINKING, f"Hm.\n{CALL}", True, "", "Hm.", ["f", "g"]),
    (THINKING, f"<think>\nHm. </think>Now {CALL}", False, "Now", "Hm. ", ["f", "g"]),
    (THINKING, "Hi <think> and </think>", False, "Hi <think> and </think>", "", []),
    (THINKING, "<think>\n\n</think>\n\nHi.", False, "Hi.", "", []),
    (THINKING, "\n<think>only this\n", True, "", "only this", []),
    (THINKING, "<thi", False, "<thi", "", []),
    (THINKING, "Hm <tool_call> is", True, "", "Hm <tool_call> is", []),
    (THINKING, f"A <tool_call> is</think>So {CALL}", True, "So", "A <tool_call> is", ["f", "g"]),
    (NAMED["harmony"], f"{THOUGHT}{WRITTEN[14][1]}<|call|>", False, "", "Hm.\n\nSo.", ["f"]),
    (NAMED["harmony"], f"{THOUGHT}{WRITTEN[15][1]}", False, "", "Hm.\n\nSo.", ["f"]),
    (
        NAMED["harmony"],
        f"{THOUGHT}<|channel|>final<|message|>Hi to=functions.f.<|return|>",
        False, "Hi to=functions.f.", "Hm.\n\nSo.", [],
    ),
    (NAMED["harmony"], '{"a": 1}', False, '{"a": 1}', "", []),
    (
        NAMED["gemma4"],
        f"<|channel>thought\nHm.\n<channel|>Hi{WRITTEN[-1][1]}<|tool_response>",
        False, "Hi", "Hm.", ["f", "g"],
    ),
]  # fmt: skip


def read_in_pieces(text: str, reading: Reading, rng: random.Random, most: int) -> ReadAnswer:
    reader, read = AnswerReader(reading), ReadAnswer()
    events = []
    while text:
        size = rng.randint(1, most)
        piece, text = text[:size], text[size:]
        told = reader.plain(piece) if rng.random() < 0.7 else None
        if told is None:
            events += reader.feed(piece)
        else:
            is_thought = reader.mode == "thought"
            events.append(AnswerEvent(reasoning=told) if is_thought else AnswerEvent(told))
    for event in (*events, *reader.finish()):
        read.add(event)
    read.is_cut = bool(read.calls) and not reader.has_called
    read.thoughts = reader.thoughts
    return read


def reading_of(form: Form, **how: object) -> Reading:
    return Reading(form=form, texts={"f": ["s", "e"]}, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "text", "calls"), WRITTEN)
def test_what_a_form_writes_is_read(form, text, calls):
    reading = reading_of(form)
    whole = ReadAnswer.of(text, reading)
    assert (whole.text, whole.calls, whole.is_cut) == ("", calls, False)
    for name, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict), name
    for seed in range(10):
        rng = random.Random(seed)
        assert read_in_pieces(text, reading, rng, 6 if seed else 1) == whole
    for end in range(len(text)):  # cut anywhere
        cut = ReadAnswer.of(text[:end], reading)
        assert cut.calls[:-1] == calls[: max(0, len(cut.calls) - 1)]
        assert read_in_pieces(text[:end], reading, random.Random(end), 5) == cut


def test_ids_that_a_model_writes_are_those_of_its_calls():
    assert ReadAnswer.of(WRITTEN[10][1], reading_of(NAMED["kimi-k2"])).ids == [
        "functions.f:0", "functions.g:1"
    ]  # fmt: skip
    assert ReadAnswer.of(WRITTEN[7][1], reading_of(NAMED["mistral-ids"])).ids == ["abcdefgh1"]


@pytest.mark.parametrize(("form", "text", "opened", "told", "thought", "names"), ANSWERS)
def test_reasoning_is_told_from_text(form, text, opened, told, thought, names):
    reading = reading_of(form, opened=opened)
    whole = ReadAnswer.of(text, reading)
    assert (whole.text, whole.reasoning) == (told, thought)
    assert [name for name, _ in whole.calls] == names
    for seed in range(10):
        assert read_in_pieces(text, reading, random.Random(seed), 6 if seed else 1) == whole


def test_calls_are_text_where_there_are_no_tools():
    reading = Reading(form=THINKING, calls=False)
    whole = ReadAnswer.of(f"<think>\nHm.\n</think>\n\n{CALL}", reading)
    assert (whole.text, whole.reasoning, whole.calls) == (CALL, "Hm.", [])


def test_most_texts_are_given_out_as_they_are():
    """They cost little per token; what may begin a mark, or blanks before one, is held back."""
    reader = AnswerReader(Reading(form=THINKING))
    assert reader.plain("Hm.") is None
    reader.feed("<think>Hm.")
    told = [reader.plain(text) for text in (" so", "a <b", "so ", "", "\n", "\ton ")]
    assert (told, reader.mode) == ([" so", None, "so", "", "", " \n\ton"], "thought")
    reader.feed("</think>\n\nHi")
    told = [reader.plain(text) for text in (" so", "<tool_call>")]
    assert (told, reader.mode) == ([" so", None], "text")
    for reading in (
        Reading(form=NAMED["hermes"], calls=False),
        Reading(form=THINKING, calls=False),
    ):
        reader = AnswerReader(reading)
        reader.feed("<think>Hm.</think>\n\nHi")
        assert (reader.plain(" <tool_call> "), reader.mode) == (" <tool_call> ", "text")


GAPS = [one.name for one in fields(Gaps)]
BITS = ["{", "}", '"', "\\", ",", ":", "[", "]", "\n", " ", "a", "12", "true", "é", "😀", "<", "|",
        "word", " two", "\n\n", "\t", "\u2028", "\0", "</", "1e3"]  # fmt: skip


def sequences(form: Form, rng: random.Random, count: int) -> Iterator[tuple[list[str], Reading]]:
    """Random sequences of a form's own texts, halves of them, and others, each with a way to read
    it."""
    own = [
        *form.marks, *form.dropped, *form.reasoning_marks, *form.section, form.opening, form.middle,
        form.closing, form.begin, form.separator, form.silent, "f", "g", '{"s": "x"}',
        '{"n": 1.50}', *(text for other, text, _ in WRITTEN if other == form),
    ]  # fmt: skip
    if form.channels is not None:
        own += [*form.channels.begins, *form.channels.ends, form.channels.recipient, THOUGHT]
    own = [text for text in own if text]
    for _ in range(count):
        parts = [rng.choice(own if rng.random() < 0.6 else BITS) for _ in range(rng.randint(1, 30))]
        parts = [
            part[: rng.randint(1, len(part))] if rng.random() < 0.2 else part for part in parts
        ]
        gaps = Gaps(**{name: rng.choice([None, "", "\n", "\n\n"]) for name in GAPS})
        how = {"opened": rng.random() < 0.5, "calls": rng.random() < 0.8}
        yield parts, reading_of(form, gaps=gaps, **how)


@pytest.mark.parametrize("count", [20, soaked(6_000)])
@pytest.mark.parametrize("form", [*FORMS, THINKING], ids=lambda form: form.name)
def test_any_text_is_read_the_same_in_any_pieces(form, count):
    rng = random.Random(form.name)
    for parts, reading in sequences(form, rng, count):
        text = "".join(parts)
        whole = ReadAnswer.of(text, reading)
        for most in (1, 4, 30):
            assert read_in_pieces(text, reading, rng, most) == whole, text


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """Of a tokenizer to which marks are text, and of one to which they are control tokens."""
    names = {mark for form in FORMS for mark in (*form.marks, *form.reasoning_marks)}
    made = {}
    for kind, more in (("text", ()), ("tokens", sorted(names))):
        path = tmp_path_factory.mktemp(kind)
        make_byte_level_tokenizer(path, vocab_size=700, more_names=more)
        tokenizer = Tokenizer.from_directory(path)
        made[kind] = tokenizer, GrammarCompiler(tokenizer)
    yield made
    for _, compiler in made.values():
        compiler.close()


def refused(tokenizer, compiler, tag, text):
    """What of a text a grammar does not admit; "end": its end."""
    state = compiler.compile(tag)
    ids = [token for token in tokenizer.encode_control(text) if token != tokenizer.bos_token_id]
    for at, token in enumerate([*ids, tokenizer.eos_token_id]):
        words = state.fill_mask().tolist()
        if not words[token // 32] >> (token % 32) & 1:
            return tokenizer.decode(ids[at:], skip_special_tokens=False) or "end"
        if at < len(ids):
            state.accept(token)
    return ""


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize(("form", "text", "calls"), WRITTEN)
def test_the_grammar_admits_what_the_form_writes(compilers, kind, form, text, calls):
    tokenizer, compiler = compilers[kind]

    def held(mode: str, form: Form = form, **how: bool):
        tools = Tools(mode=mode, allowed=TOOLS)  # type: ignore[arg-type]
        return held_to(form, tools, None, tokenizer.control_token, held_schema, **how)

    required = held("required")
    assert refused(tokenizer, compiler, required, text) == ""
    assert refused(tokenizer, compiler, required, "Well") == "Well"
    assert refused(tokenizer, compiler, required, text.replace("12", "1\x02", 1)) != "" or (
        form.arguments is not None
    )
    if form.channels is not None:
        assert refused(tokenizer, compiler, required, THOUGHT + text) == ""
        final = f"{THOUGHT}{form.channels.text_header}Hi."
        assert refused(tokenizer, compiler, held("auto"), final) == ""
        assert refused(tokenizer, compiler, required, final) != ""
        return
    thinking = replace(form, reasoning=form.reasoning or Reasoning.tagged())
    assert thinking.reasoning is not None
    behind = f"Hm?{thinking.reasoning.close}{text}"
    opened = held("required", thinking, opened=True)
    assert refused(tokenizer, compiler, opened, behind) == ""
    assert refused(tokenizer, compiler, opened, text) == ""
    auto = held("auto", thinking)
    for free in ("Hi.", f"Hi. {text}", text, f"{thinking.reasoning.open}{behind}"):
        assert refused(tokenizer, compiler, auto, free) == "", free


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (NAMED["qwen-xml"], "<parameter=e>\ny\n</parameter>", "<parameter=e>\nz\n</parameter>"),
        (
            NAMED["glm"],
            "<arg_key>n</arg_key>\n<arg_value>4<",
            "<arg_key>n</arg_key>\n<arg_value>b<",
        ),
        (NAMED["gemma4"], "l:[1,2],n:3", 'l:[1,<|"|>a<|"|>],n:3'),
        (NAMED["gemma4"], 's:<|"|>', "t:1,"),
    ],
)
def test_values_without_json_are_held_to_their_schemas_too(compilers, form, good, bad):
    tokenizer, compiler = compilers["text"]
    tools = Tools(mode="required", allowed=TOOLS)
    tag = held_to(form, tools, None, tokenizer.control_token, held_schema)
    text = next(text for one, text, _ in WRITTEN if one == form)
    if good not in text:
        text = {
            NAMED["qwen-xml"]: text.replace("<parameter=e>\nx\n</parameter>", good),
            NAMED["glm"]: text.replace("<arg_key>l</arg_key>\n<arg_value>[1, 2]<", good),
        }[form]
    assert refused(tokenizer, compiler, tag, text) == ""
    assert refused(tokenizer, compiler, tag, text.replace(good, bad)) != ""


def test_lengths_and_references_hold_in_every_syntax(compilers):
    tokenizer, compiler = compilers["text"]
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 3}, "r": {"$ref": "#/$defs/a~1b"}},
        "required": ["s", "r"],
        "$defs": {"a/b": {"enum": [1, 2]}},
    }
    allowed = {0: {"type": "function", "function": {"name": "f", "parameters": schema}}}
    tools = Tools(mode="required", allowed=allowed)
    for form, text in (
        (
            NAMED["hermes"],
            '<tool_call>\n{"name": "f", "arguments": {"s": "abc", "r": 1}}\n</tool_call>',
        ),
        (
            NAMED["qwen-xml"],
            "<tool_call>\n<function=f>\n<parameter=s>\nabc\n</parameter>\n<parameter=r>\n1\n"
            "</parameter>\n</function>\n</tool_call>",
        ),
    ):
        tag = held_to(form, tools, None, tokenizer.control_token, held_schema)
        assert refused(tokenizer, compiler, tag, text) == ""
        assert refused(tokenizer, compiler, tag, text.replace("abc", "abcd")) != ""
        assert refused(tokenizer, compiler, tag, text.replace("1", "3")) != ""
