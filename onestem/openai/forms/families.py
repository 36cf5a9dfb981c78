"""The families whose chat templates say how they write calls and reasoning.

    Qwen, Hermes, SmolLM3, Granite 4   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
    Qwen3-Coder, Qwen 3.5              <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>...
    GLM 4.5                            <tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>...
    Llama 3                            {"name": "f", "parameters": {...}}
    Mistral, v3 to v7                  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
    Mistral, v11                       [TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{...}
    Mistral, v13                       [TOOL_CALLS]f[ARGS]{...}
    DeepSeek V3, R1; V3.1              <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```...
    Kimi K2                            <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>...
    Granite 3                          <|tool_call|>[{"name": "f", "arguments": {...}}, ...]
    Phi-4 mini                         functools[{"name": "f", "arguments": {...}}, ...]
    gpt-oss                            <|channel|>commentary to=functions.f <|constrain|>json<|message|>...
    Gemma 4                            <|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>

What no template says is asked for in the first of these forms (`GENERIC`).
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from dataclasses import replace

from onestem.openai.forms.form import Braces, Channels, Fields, Form, Reasoning

_NAME = r'\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_WORD = r"(?P<name>[\w.-]+)"


def _list(name: str, begin: str, **more: object) -> Form:
    """A JSON list of calls after a mark."""
    mark = begin.rstrip(" [")
    return Form(
        name=name,
        begin=mark,
        head=re.compile(re.escape(mark) + r"\s*\[\s*" + _NAME),
        tail="}",
        opening='{"name": "',
        middle='", "arguments": ',
        closing="}",
        separator=", ",
        section=(begin, "]"),
        again=",",
        item=re.compile(r"\s*" + _NAME),
        close="]",
        **more,  # type: ignore[arg-type]
    )


HERMES = Form(
    name="hermes",
    begin="<tool_call>",
    head=re.compile(r"<tool_call>\s*" + _NAME),
    tail="}</tool_call>",
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    closing="}\n</tool_call>",
    separator="\n",
    marks=("<tool_call>", "</tool_call>"),
)
GENERIC = replace(HERMES, name="generic")
QWEN_XML = Form(
    name="qwen-xml",
    begin="<tool_call>",
    head=re.compile(rf"<tool_call>\s*<function={_WORD}>"),
    tail="</function></tool_call>",
    opening="<tool_call>\n<function=",
    middle=">\n",
    closing="</function>\n</tool_call>",
    separator="\n",
    arguments=Fields(
        before_key="<parameter=",
        before_value=">\n",
        after_value="\n</parameter>\n",
        trims=True,
    ),
    marks=("<tool_call>", "</tool_call>"),
)
_GLM_MARKS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
GLM = Form(
    name="glm",
    begin="<tool_call>",
    head=re.compile(rf"<tool_call>\s*{_WORD}\s*(?=<arg_key>|</tool_call>)"),
    tail="</tool_call>",
    opening="<tool_call>",
    middle="\n",
    closing="</tool_call>",
    separator="\n",
    arguments=Fields(
        before_key="<arg_key>",
        before_value="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
    ),
    marks=_GLM_MARKS,
)
GLM_SHORT = replace(
    GLM,
    name="glm-short",
    middle="",
    separator="",
    arguments=Fields(
        before_key="<arg_key>",
        before_value="</arg_key><arg_value>",
        after_value="</arg_value>",
    ),
)
LLAMA = Form(
    name="llama3",
    begin='{"name": ',
    head=re.compile(_NAME),
    tail="}",
    opening='{"name": "',
    middle='", "parameters": ',
    closing="}",
    separator="; ",
    again=";",
    item=re.compile(r"\s*" + _NAME),
    silent="<|python_tag|>",
)
MISTRAL = _list("mistral", "[TOOL_CALLS] [", marks=("[TOOL_CALLS]",), id_length=9)
MISTRAL_ARGS = Form(
    name="mistral-args",
    begin="[TOOL_CALLS]",
    head=re.compile(
        rf"\[TOOL_CALLS\]\s*{_WORD}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?=\{{)"
    ),
    tail="",
    opening="[TOOL_CALLS]",
    middle="[ARGS]",
    closing="",
    separator="",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    id_length=9,
)
MISTRAL_IDS = replace(
    MISTRAL_ARGS,
    name="mistral-ids",
    id_before="[CALL_ID]",
    id_pattern="[a-zA-Z0-9]{9}",
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?\s*(?P<name>[\w.-]+)\s*"
    r"(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{)"
)
DEEPSEEK_V3 = Form(
    name="deepseek-v3",
    begin="<｜tool▁call▁begin｜>",
    head=_DEEPSEEK,
    tail="```<｜tool▁call▁end｜>",
    opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    closing="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section=_CALLS,
    marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", *_CALLS),
    dropped=_CALLS,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek-v3.1",
    tail="<｜tool▁call▁end｜>",
    opening="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    closing="<｜tool▁call▁end｜>",
    separator="",
)
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = Form(
    name="kimi-k2",
    begin="<|tool_call_begin|>",
    head=re.compile(
        rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?{_WORD}:\d+)\s*"
        r"<\|tool_call_argument_begin\|>"
    ),
    tail="<|tool_call_end|>",
    opening="<|tool_call_begin|>functions.",
    id_before=":",
    id_pattern="[0-9]{1,3}",
    middle="<|tool_call_argument_begin|>",
    closing="<|tool_call_end|>",
    separator="",
    section=_SECTION,
    marks=(
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", *_SECTION,
    ),
    dropped=_SECTION,
)  # fmt: skip
GRANITE = _list("granite3", "<|tool_call|>[", marks=("<|tool_call|>",))
PHI = _list("phi4-mini", "functools[")
PHI_MARKED = Form(
    name="phi4-marked",
    begin="<|tool_call|>",
    head=re.compile(r"<\|tool_call\|>\s*" + _NAME),
    tail="}<|/tool_call|>",
    opening='<|tool_call|>{"name": "',
    middle='", "arguments": ',
    closing="}<|/tool_call|>",
    separator="",
    marks=("<|tool_call|>", "<|/tool_call|>"),
)
_TO = r" to=functions\.(?P<{}>[\w.-]+)"
HARMONY = Form(
    name="harmony",
    begin="",
    head=re.compile(""),
    tail="",
    opening="<|start|>assistant to=functions.",
    middle="<|channel|>commentary json<|message|>",
    closing="<|call|>",
    separator="",
    marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    channels=Channels(
        begins=("<|start|>", "<|channel|>"),
        recipient=" to=functions.",
        header=re.compile(
            rf"(?:<\|start\|>assistant)?(?:{_TO.format('name_first')})?"
            rf"<\|channel\|>(?P<channel>\w+)(?:{_TO.format('name')})?"
            r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
        ),
        reasoning="analysis",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        start="<|start|>assistant",
        text_header="<|channel|>final<|message|>",
        reasoning_header="<|channel|>analysis<|message|>",
        call_headers=(
            ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
            (" to=functions.", "<|channel|>commentary json<|message|>"),
        ),
    ),
)
GEMMA = Form(
    name="gemma4",
    begin="<|tool_call>",
    head=re.compile(rf"<\|tool_call>\s*call:{_WORD}\s*(?=\{{)"),
    tail="<tool_call|>",
    opening="<|tool_call>call:",
    middle="",
    closing="<tool_call|>",
    separator="",
    arguments=Braces(quote='<|"|>'),
    marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    dropped=("<|tool_response>",),
    reasoning=Reasoning(
        open="<|channel>thought",
        close="<channel|>",
        opening="<|channel>thought\n",
        closing="\n<channel|>",
        anywhere=True,
    ),
)
FORMS = (
    HERMES, QWEN_XML, GLM, GLM_SHORT, LLAMA, MISTRAL, MISTRAL_ARGS, MISTRAL_IDS, DEEPSEEK_V3,
    DEEPSEEK_V31, KIMI, GRANITE, PHI, PHI_MARKED, HARMONY, GEMMA,
)  # fmt: skip


def form_of(template: str) -> Form | None:
    """The form of calls in a chat template; None: it has no calls, or calls of another form."""
    if all(mark in template for mark in ("<|start|>", "<|channel|>", "<|message|>")):
        return HARMONY
    if "<｜tool▁call▁begin｜>" in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "tools" not in template:
        return None
    for form, needed in _MARKED:
        if all(mark in template for mark in needed):
            return form
    if re.search(r'\{"name":[^{]{0,60}"parameters":|<\|python_tag\|>', template):
        return LLAMA
    return None


# The first whose marks a template has.
_MARKED: tuple[tuple[Form, tuple[str, ...]], ...] = (
    (KIMI, ("<|tool_call_begin|>",)),
    (KIMI, ("<|im_system|>", "tool_declare")),
    (GEMMA, ("<|tool_call>", "call:")),
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (QWEN_XML, ("<tool_call>", "<function=")),
    (GLM, ("<tool_call>", "</arg_key>\n")),
    (GLM, ("<tool_call>", "</arg_key>\\n")),
    (GLM_SHORT, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>",)),
    (PHI_MARKED, ("<|tool_call|>", "<|/tool_call|>")),
    (GRANITE, ("<|tool_call|>",)),
    (PHI, ("<|tool|>", "<|/tool|>")),
)
_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def reasoning_of(template: str) -> Reasoning | None:
    """The form of reasoning in a chat template that names both of its marks; None: it has none."""
    for begin, end in _TAGS:
        if begin in template and end in template:
            return Reasoning.tagged(begin, end)
    return None


def described(template: str) -> tuple[Form, bool]:
    """The form that a model with this template is held to, and whether its template has it."""
    form = form_of(template)
    known = form or GENERIC
    if known.reasoning is None and known.channels is None:
        known = replace(known, reasoning=reasoning_of(template))
    return known, form is not None
