"""Chat templates as those of families of models: how each writes calls, their results and
reasoning, and nothing else. (TRL has many of the real ones.)"""

from __future__ import annotations

__all__ = ["TEMPLATES"]

_TURNS = (
    "{% for m in messages %}{% if m.role != 'assistant' and m.role != 'tool' %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>"
)
_ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"

# Without tools, calls and reasoning: SmolLM2's.
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _ASK
# Gemma 2's: turns alternate, and there is no system message.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _ASK
)
# Phi-4 mini's takes tools as a field of the system message, and writes no calls.
PHI = "{# <|tool|>{{ tools }}<|/tool|> #}" + PLAIN
# SmolLM3's writes no calls either; it knows the form by its prompt.
SMOLLM3 = (
    "{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{...}</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    + _ASK
    + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n{% endif %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS] ["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 signs') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.role == \'assistant\' %}'
    " {{ m.content }}</s>{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
# The old one's roles alternate, but for calls and their results.
MISTRAL_V3 = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if not (m.role == 'tool' or m.tool_calls is defined) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}" + MISTRAL
)
MISTRAL_V11 = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    + _ARGUMENTS
    + "{% endfor %}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]"
    "{{ m.content }}[/TOOL_RESULTS]{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_V13 = MISTRAL_V11.replace("[CALL_ID]{{ c.id }}", "") + "{# [THINK] [/THINK] #}"
DEEPSEEK_V31 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% if m.tool_calls is defined %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments"
    " + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt and thinking %}<think>{% endif %}"
    "{# </think> #}"
)
# An old one's: calls where there is no text, else the text alone.
EITHER = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role != 'assistant' %}<｜{{ m.role }}｜>{{ m.content }}{% elif m.content %}"
    "<｜Assistant｜>{{ m.content }}<｜end｜>{% else %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}"
    "\n```json\n" + _ARGUMENTS + "\n```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}"
    "<｜tool▁calls▁end｜><｜end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# Functionary's has a mark of Llama's, and calls of its own form.
OTHER = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|python_tag|><|end|>{% endif %}"
    + _TURNS
    + "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>"
    "{% else %}<|assistant|>{{ m.content }}{% for c in m.tool_calls %}"
    "<function={{ c.function.name }}>" + _ARGUMENTS + "</function>{% endfor %}<|end|>"
    "{% endif %}{% endfor %}" + _ASK
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + _ARGUMENTS
    + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GRANITE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    + _TURNS
    + "{% elif m.role == 'tool' %}<|tool_response|>{{ m.content }}<|end|>"
    "{% else %}<|assistant|>{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "{% endif %}<|end|>{% endif %}{% endfor %}" + _ASK
)
TEMPLATES = {
    "plain": PLAIN,
    "strict": STRICT,
    "phi": PHI,
    "smollm3": SMOLLM3,
    "mistral": MISTRAL,
    "mistral-v3": MISTRAL_V3,
    "mistral-v11": MISTRAL_V11,
    "mistral-v13": MISTRAL_V13,
    "deepseek-v3.1": DEEPSEEK_V31,
    "either": EITHER,
    "other": OTHER,
    "kimi": KIMI,
    "granite": GRANITE,
}
