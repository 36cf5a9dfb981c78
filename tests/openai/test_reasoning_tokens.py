"""How many tokens of an answer are its reasoning, in any tokens."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from onestem.openai.forms import Reading
from onestem.openai.forms.families import NAMED
from onestem.openai.forms.form import Reasoning
from onestem.openai.write import ResponseFormat, answer_body, reasoning_tokens
from onestem.request import CompletionOutput, RequestOutput

THINKING = replace(NAMED["hermes"], reasoning=Reasoning.tagged())
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
# Answers, with reasoning and its marks between brackets, and whether the prompt opens it.
ANSWERS = [
    (THINKING, "[<think>\nHm. é\U0001f600\n\nSo.\n</think>]\n\nHi.", False),
    (THINKING, "[\n<think>\n\n</think>]\n\nHi.", False),
    (THINKING, "[Hm.\n</think>]", True),
    (THINKING, "[</think>]Hi <think>.", True),
    (THINKING, "[Hm. It goes o", True),
    (THINKING, "[<think>Hm </thi", False),
    (THINKING, f"[Hm.\n]{CALL}", True),
    (THINKING, f"[<think>Hm <tool_call> is</think>]So.{CALL} é", False),
    (THINKING, "Hi <think> and </think>", False),
    (THINKING, "<thi", False),
    (NAMED["hermes"], "<think>Hm.</think>Hi.", False),
    (
        NAMED["harmony"],
        "[<|channel|>analysis<|message|>Hm.<|end|>][<|start|>assistant<|channel|>analysis"
        "<|message|>So. é<|end|>]<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        False,
    ),
    (
        NAMED["harmony"],
        "[<|channel|>analysis<|message|>Hm.]<|start|>assistant to=functions.f<|channel|>commentary "
        'json<|message|>{"a": 1}<|call|>[<|start|>assistant<|channel|>analysis<|message|>So.',
        False,
    ),
    (NAMED["gemma4"], "Hi[<|channel>thought\né.\n<channel|>]So[<|channel>thoughtHm", False),
]


def spans_of(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The answer, and where its reasoning is, in bytes."""
    spans, plain = [], b""
    for part in text.split("["):
        inside, _, outside = part.partition("]") if plain or text[0] == "[" else ("", "", part)
        if inside:
            spans.append((len(plain), len(plain) + len(inside.encode())))
        plain += inside.encode() + outside.encode()
    return plain.decode(), spans


@pytest.mark.parametrize(("form", "text", "opened"), ANSWERS)
def test_tokens_of_reasoning_are_counted_in_any_tokens(form, text, opened):
    text, spans = spans_of(text)
    reading, data = Reading(form=form, opened=opened), text.encode()
    rng = random.Random(text)
    for most in (1, 3, 9, 1000) * 5:
        tokens, at = [], 0
        while at < len(data):
            size = rng.randint(1, most)
            tokens.append(data[at : at + size])
            at += size
        tokens.insert(rng.randint(0, len(tokens)), b"")
        ends = list(itertools.accumulate(map(len, tokens)))
        # A token within a character belongs where that begins.
        starts = [end - len(token) for token, end in zip(tokens, ends, strict=True)]
        starts = [len(data[:at].decode(errors="ignore").encode()) for at in starts]
        wanted = sum(
            any(start < b and (end > a or start >= a) for a, b in spans)
            for start, end in zip(starts, [*starts[1:], len(data)], strict=True)
        )
        if spans and spans[-1][1] == len(data) and not text.endswith(("</think>", "<channel|>")):
            # What is left out of the text after reasoning that has not ended is of it too.
            wanted += starts[-1] == len(data)
        written = ResponseFormat(
            kind="chat", model="m", logprobs=None, return_token_ids=False, reading=reading,
            token_bytes=tokens.__getitem__,
        )  # fmt: skip
        ids = list(range(len(tokens)))
        assert reasoning_tokens(written, [], [(ids, text)]) == wanted
        outputs = [CompletionOutput(index=i, text=text, token_ids=ids) for i in range(3)]
        output = RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=[], outputs=outputs, finished=True
        )
        details = answer_body("r", output, written)["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 3 * wanted}
