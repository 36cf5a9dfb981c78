"""One conversation of an agent as a chat and as other APIs have it."""

from __future__ import annotations

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = [("call_1", {"city": "Rome", "at": 1.5}), ("call_2", {"city": "Oslo"})]

CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You help."},
                                       {"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Where is it warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Two cities.",
            "tool_calls": [
                {"id": name, "type": "function",
                 "function": {"name": "warm", "arguments": arguments}}
                for name, arguments in (
                    ("call_1", '{"city": "Rome", "at": 1.5}'),
                    ("call_2", '{"city":"Oslo"}'),
                )
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "yes"},
        {"role": "tool", "tool_call_id": "call_2", "content": "no\nnot at all"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "The user is in a hurry."},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "Thanks."},
    ],
    "tools": [{"type": "function",
               "function": {"name": "warm", "description": "Is it warm?", "parameters": SCHEMA}}],
    "max_tokens": 12,
    "temperature": 0.0,
}  # fmt: skip

MESSAGES = {
    "system": [{"type": "text", "text": "You help."}, {"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Where is it warm?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two cities.", "signature": "x"},
                {"type": "text", "text": "Let me see.", "citations": None},
                *({"type": "tool_use", "id": name, "name": "warm", "input": arguments}
                  for name, arguments in CALLS),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "yes"},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": False,
                 "content": [{"type": "text", "text": "no"},
                             {"type": "text", "text": "not at all"}]},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "system", "content": "The user is in a hurry."},
        {"role": "assistant", "content": [{"type": "text", "text": "Rome."}]},
        {"role": "user", "content": [{"type": "text", "text": "Thanks."}]},
    ],
    "tools": [{"name": "warm", "description": "Is it warm?", "input_schema": SCHEMA}],
    "max_tokens": 12,
    "temperature": 0.0,
}  # fmt: skip

RESPONSES = {
    "input": [
        {"role": "system", "content": [{"type": "input_text", "text": "You help."},
                                       {"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Where is it warm?"},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Two cities."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": [],
                      "logprobs": []}]},
        *({"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": "warm",
           "status": "completed", "arguments": arguments}
          for name, arguments in (("call_1", '{"city": "Rome", "at": 1.5}'),
                                  ("call_2", '{"city":"Oslo"}'))),
        {"type": "function_call_output", "call_id": "call_1", "output": "yes"},
        {"type": "function_call_output", "call_id": "call_2",
         "output": [{"type": "input_text", "text": "no"},
                    {"type": "input_text", "text": "not at all"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
        {"role": "system", "content": "The user is in a hurry."},
        {"role": "assistant", "content": "Rome."},
        {"type": "message", "role": "user", "content": "Thanks."},
    ],
    "tools": [{"type": "function", "name": "warm", "description": "Is it warm?",
               "parameters": SCHEMA}],
    "max_output_tokens": 12,
    "temperature": 0.0,
}  # fmt: skip
