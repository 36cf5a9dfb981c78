"""Writes what a chat template would leave out: tools, calls, their results, and reasoning.

What a template writes itself is left to it. Nothing of a conversation vanishes in silence.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onestem.openai.forms.form import Braces, Fields, Form, Gaps, Reasoning
from onestem.openai.forms.reader import ReadAnswer, Reading

JsonObject = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]

_TOLD = """\
You may call functions to help with what the user asks. Each of them is described by a JSON object:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments in exactly this form:
{example}

You get what it returns in the next message. Where no function is needed, answer in plain text."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a chat template writes, as it was found out.

    Attributes:
        system: it takes a system message.
        tools: it takes tools.
        calls: how it takes arguments of calls: as `objects` or as `texts`; None: it writes none.
        json: arguments are in JSON, by it or by us.
        one_call: it takes one call per message.
        apart: it writes no text beside calls, which therefore gets a message before them.
        gaps: blanks that it writes.
        inline: it writes a text in which we have written calls as it writes text and calls.
        results: it takes messages of tools.
        reasoning: the name by which it reads reasoning; None: it does not.
    """

    system: bool = True
    tools: bool = False
    calls: str | None = None
    json: bool = False
    one_call: bool = False
    apart: bool = False
    gaps: Gaps = field(default_factory=Gaps)
    inline: bool = False
    results: bool = False
    reasoning: str | None = None


def needs_habits(messages: Messages, tools: object) -> bool:
    """Whether something is there that a template may leave out."""
    return bool(tools) or any(
        message["role"] == "tool" or "tool_calls" in message or "reasoning_content" in message
        for message in messages
    )


def told(
    messages: Messages, tools: Sequence[Mapping[str, Any]], form: Form, habits: Habits
) -> list[JsonObject]:
    """The messages with the tools described in the system message, or, where there can be none,
    before the user's first words."""
    function = {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
    example = [{"id": form.own_id("", "NAME", 0), "function": function}]
    listed = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    text = _TOLD.format(tools=listed, example=_calls(form, example))
    first, *others = map(dict, messages)
    if first["role"] in ("system", "developer") or (not habits.system and first["role"] == "user"):
        pair = (first["content"], text) if habits.system else (text, first["content"])
        return [{**first, "content": "\n\n".join(filter(None, pair))}, *others]
    role = "system" if habits.system else "user"
    return [{"role": role, "content": text}, first, *others]


def written(messages: Messages, form: Form, habits: Habits) -> list[JsonObject]:
    """The messages as a template of these habits writes them whole."""
    made: list[JsonObject] = []
    joined = _joined(_with_own_ids(messages, form), form, habits)
    for message in _split(joined) if habits.one_call else joined:
        if message["role"] == "assistant":
            turn = _assistant(message, form, habits)
            if habits.apart and turn.get("tool_calls") and turn["content"]:
                made.append({"role": "assistant", "content": turn["content"]})
                turn["content"] = ""
            made.append(turn)
        elif message["role"] == "tool" and not habits.results:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if made and made[-1].get("_results"):
                made[-1]["content"] += "\n" + text
            else:
                made.append({"role": "user", "content": text, "_results": True})
        elif message["role"] == "user" and made and made[-1].get("_results"):
            # Many templates want turns to alternate.
            made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    for message in made:
        message.pop("_results", None)
    return made


def _assistant(message: JsonObject, form: Form, habits: Habits) -> JsonObject:
    thought = message.pop("reasoning_content", None)
    calls, has_text = message.get("tool_calls"), bool(message["content"])
    if thought and habits.reasoning is None:
        marks = form.reasoning or Reasoning.tagged()
        message["content"] = f"{marks.opening}{thought}{marks.closing}{message['content']}"
    elif thought and habits.reasoning is not None:
        if form.channels is not None and calls and message["content"]:
            thought, message["content"] = f"{thought}\n\n{message['content']}", ""
        message[habits.reasoning] = thought
    if not calls:
        return message
    if habits.calls is None:
        del message["tool_calls"]
        message["content"] += "\n" * has_text + _calls(form, calls)
    elif habits.calls == "texts":
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call)}}
            for call in calls
        ]
    return message


def _with_own_ids(messages: Messages, form: Form) -> Messages:
    """The messages with ids of calls as the model writes them: a client may have others, of another
    server's answers."""
    if not form.id_length and not form.id_before:
        return messages
    own: dict[str, str] = {}
    made, place = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            given = call.get("id", "")
            own[given] = form.own_id(given, call["function"]["name"], place)
            calls.append({**call, "id": own[given]})
            place += 1
        answered = message.get("tool_call_id", "")
        if calls:
            message = {**message, "tool_calls": calls}
        elif answered in own:
            message = {**message, "tool_call_id": own[answered]}
        made.append(message)
    return made


def _joined(messages: Messages, form: Form, habits: Habits) -> list[JsonObject]:
    """The messages with those of one answer in one: what is said after calls has a message of its
    own. It is written after them where the template has a place for it, else before them."""
    made: list[JsonObject] = []
    for message in map(dict, messages):
        before = made[-1] if made else {}
        calls = before.get("tool_calls")
        if not calls or before["role"] != "assistant" or message["role"] != "assistant":
            made.append(message)
            continue
        if habits.inline:
            before["content"] = _inlined(before, form, habits.gaps)
            calls = []
        before["content"] += message["content"]
        thoughts = [one.get("reasoning_content") for one in (before, message)]
        if any(thoughts):
            before["reasoning_content"] = "\n".join(filter(None, thoughts))
        before["tool_calls"] = [*calls, *message.get("tool_calls", ())]
        if not before["tool_calls"]:
            del before["tool_calls"]
    return made


def _inlined(message: Mapping[str, Any], form: Form, gaps: Gaps) -> str:
    """A message's text with its calls in it."""
    text = message["content"]
    return text + (gaps.before_call or "") * bool(text) + _calls(form, message["tool_calls"])


def _split(messages: Messages) -> Iterator[JsonObject]:
    """The messages with one call in each, and its results after it."""
    waiting = deque(map(dict, messages))
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = []
        while waiting and waiting[0]["role"] == "tool":
            results.append(waiting.popleft())
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from (one for one in results if one.get("tool_call_id") == call.get("id"))
            message = {"role": "assistant", "content": ""}
        known = {call.get("id") for call in calls}
        yield from (one for one in results if one.get("tool_call_id") not in known)


def _calls(form: Form, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as the model writes them."""
    before, after = form.section
    return before + form.separator.join(_call(form, call) for call in calls) + after


def _call(form: Form, call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    own = ""
    if form.id_before:
        own = form.id_before + call["id"].rpartition(form.id_before)[2]
    text = arguments if isinstance(arguments, str) else _arguments(form, arguments)
    return f"{form.opening}{name}{own}{form.middle}{text}{form.closing}"


def _arguments(form: Form, arguments: Mapping[str, Any]) -> str:
    syntax = form.arguments
    if syntax is None:
        return _json(arguments)
    if isinstance(syntax, Braces):
        return _braced(syntax, arguments)
    return "".join(_field(syntax, key, value) for key, value in arguments.items())


def _field(syntax: Fields, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    return f"{syntax.before_key}{key}{syntax.before_value}{text}{syntax.after_value}"


def _braced(syntax: Braces, value: Any) -> str:
    if isinstance(value, str):
        return f"{syntax.quote}{value}{syntax.quote}"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{_braced(syntax, one)}" for key, one in sorted(value.items()))
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_braced(syntax, one) for one in value)}]"
    return _json(value)


def _as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: Any) -> str:
    """As templates write it (`tojson`)."""
    return json.dumps(value, ensure_ascii=False)


# --- finding out a template's habits ---

_USER: JsonObject = {"role": "user", "content": "qzuser"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "qztool",
        "description": "qz",
        "parameters": {"type": "object", "properties": {"qzkey": {"type": "string"}}},
    },
}


def _one_call(number: int) -> JsonObject:
    function = {"name": f"qzname{number}", "arguments": {"qzkey": f"qzvalue{number}"}}
    return {"id": f"qzcallid{number}", "type": "function", "function": function}


def _result(number: int) -> JsonObject:
    return {"role": "tool", "tool_call_id": f"qzcallid{number}", "content": f"qzresult{number}"}


_LOOP: list[JsonObject] = [
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_one_call(1), _one_call(2)]},
    _result(1),
    _result(2),
]
_CALLED = [f"qz{what}{number}" for what in ("name", "value") for number in (1, 2)]
_RETURNED = ["qzresult1", "qzresult2"]
_TRIED = (
    Habits(calls="objects", results=True),
    Habits(calls="texts", results=True),
    Habits(calls="objects", results=True, one_call=True),
    Habits(calls="texts", results=True, one_call=True),
)


def found_out(
    render: Callable[[list[JsonObject], JsonObject], str], form: Form, is_known: bool
) -> Habits:
    """The habits of a template.

    Args:
        render: what it writes for messages and variables; "" where it refuses.
        form: the model's; `is_known`: the template's own one.
    """

    def writes(wanted: Sequence[str], messages: list[JsonObject], **fields: Any) -> bool:
        text = render(messages, fields)
        return all(one in text for one in wanted)

    tools = is_known and writes(["qztool"], [_USER], tools=[_TOOL])
    given = {"tools": [_TOOL]} if tools else {}
    habits = Habits()
    for tried in _TRIED if is_known else ():
        if writes([*_CALLED, *_RETURNED], written(_LOOP, form, tried), **given):
            habits = tried
            break
    else:
        tried = Habits(results=is_known)
        if writes([*_CALLED, *_RETURNED], written(_LOOP, form, tried), **given):
            habits = tried
    in_json = writes(['{"qzkey": "qzvalue1"}'], written(_LOOP, form, habits), **given)
    habits = replace(habits, json=in_json)
    if habits.calls and form.channels is None:
        beside = [_USER, {**_LOOP[1], "content": "qzbeside"}, *_LOOP[2:]]
        is_there = writes(["qzbeside", *_CALLED], written(beside, form, habits), **given)
        habits = replace(habits, apart=not is_there)
    system = [{"role": "system", "content": "qzsystem"}, _USER]
    habits = replace(habits, system=writes(["qzsystem", "qzuser"], system), tools=tools)
    for name in ("reasoning_content", "reasoning", "thinking"):
        thinks = replace(habits, reasoning=name)
        turn = {**_LOOP[1], "reasoning_content": "qzthought", "tool_calls": [_one_call(1)]}
        if writes(["qzthought"], written([_USER, turn, _result(1)], form, thinks), **given):
            habits = thinks
            break

    def answered(blanks: str) -> str:
        content = f"{blanks}qzbeside{blanks}" * (form.channels is None)
        turn = {**_LOOP[1], "content": content}
        if form.has_reasoning:
            turn["reasoning_content"] = f"{blanks}qzthought{blanks}"
        return render(written([_USER, turn, *_LOOP[2:]], form, habits), given)

    habits = replace(habits, gaps=_gaps(form, habits, answered(""), answered(_BLANKS)))
    if habits.gaps.before_call is None:
        return habits
    calls: JsonObject = {"role": "assistant", "content": "qzbeside", "tool_calls": [_one_call(1)]}
    own, answer = _with_own_ids([calls, _result(1)], form)
    inline: JsonObject = {"role": "assistant", "content": _inlined(own, form, habits.gaps)}
    each = (written([_USER, one, answer], form, habits) for one in (own, inline))
    texts = {render(messages, given) for messages in each}
    return replace(habits, inline=len(texts) == 1 and "" not in texts)


def is_read_back(
    render: Callable[[list[JsonObject], JsonObject], str], form: Form, habits: Habits
) -> bool:
    """Whether calls that a template of these habits writes are read in this form."""
    text = render(written(_LOOP, form, habits), {"tools": [_TOOL]} if habits.tools else {})
    read = ReadAnswer.of(text.partition("qzuser")[2], Reading(form=form))
    return all((f"qzname{n}", f'{{"qzkey": "qzvalue{n}"}}') in read.calls for n in (1, 2))


_BLANKS = "\n\n\n"


def _gaps(form: Form, habits: Habits, answer: str, blank: str) -> Gaps:
    """Blanks around an answer's parts: of `answer`, whose parts have none of their own. In `blank`
    each begins and ends with `_BLANKS`."""

    def before(word: str, mark: str) -> str | None:
        gap, own = (_around(text, word)[0] for text in (answer, blank))
        is_there = f"{mark}{gap}{word}" in answer and not gap.strip("\n")
        return gap if is_there and own == gap + _BLANKS else None

    def behind(word: str, mark: str = "") -> str | None:
        gap, own = (_around(text, word)[1] for text in (answer, blank))
        return gap if f"{word}{gap}{mark}" in answer and own == _BLANKS + gap else None

    if form.channels is not None:
        end = form.channels.ends[0]
        header = form.channels.reasoning_header
        return Gaps(
            opening_thought=before("qzthought", header), closing_thought=behind("qzthought", end)
        )
    gaps = Gaps(before_call=None if habits.apart else behind("qzbeside"))
    if form.reasoning is None:
        return gaps
    return replace(
        gaps,
        opening_thought=before("qzthought", form.reasoning.open),
        closing_thought=behind("qzthought", form.reasoning.close),
        after_thought=before("qzbeside", form.reasoning.close),
    )


def _around(text: str, word: str) -> tuple[str, str]:
    """Blanks before a word and after it."""
    head, _, tail = text.partition(word)
    return head[len(head.rstrip()) :], tail[: len(tail) - len(tail.lstrip())]
