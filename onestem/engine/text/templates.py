"""Chat templates are programs that a model brings: one may never end, or take all memory. So a
server renders them in a process that the kernel ends at its limits (`onestem.children`).

Elsewhere they are rendered here, in a quarter of the time: whoever runs a job can end it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onestem.checked import plain
from onestem.children import Child, Limits, TooCostlyError
from onestem.engine.text.limits import MOST_CHARACTERS
from onestem.engine.text.template_process import answering
from onestem.errors import RequestError

LIMITS = Limits(cpu_seconds=10, wall_seconds=60, memory_bytes=2 << 30)

CHILD = Child("onestem.engine.text.template_process", LIMITS)  # of all tokenizers
_answer: Callable[[bytes], bytes] | None = None


def isolate() -> None:
    """Render in a process from here on; it is started now, so that the first chat need not wait."""
    global _answer
    CHILD.start()
    _answer = CHILD.ask


def _here() -> Callable[[bytes], bytes]:
    """Renders in this process, and is remembered."""
    global _answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _answer = answering(render_jinja_template)
    return _answer


def render(template: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """What a template writes, as transformers' `render_jinja_template` has it.

    Args:
        variables: further ones of the template, and that function's options. What is no JSON is as
            its type's name.

    Raises:
        RequestError: it refuses, fails, or takes too long or too much.
    """
    # Templates take what is there for given.
    given = [{k: v for k, v in one.items() if v is not None} for one in messages]
    try:
        question = json.dumps([template, given, variables, MOST_CHARACTERS], default=_named)
        answer = (_answer or _here())(question.encode())
    except (TypeError, ValueError, RecursionError) as error:  # keys of other types, cycles
        raise RequestError(f"chat_template_kwargs cannot be written as JSON: {error}") from None
    except TooCostlyError as error:
        raise RequestError(
            f"the chat template {error} for these messages: send fewer, or correct the template in "
            "the model's directory"
        ) from None
    text = answer[1:].decode("utf-8", "surrogatepass")
    if answer[:1] == b"E":
        raise RequestError(f"the chat template refuses the messages: {text}")
    if answer[:1] == b"L":
        raise RequestError(
            f"the rendered chat has {text} characters, limit is {MOST_CHARACTERS}: shorten it"
        )
    return text


def _named(value: object) -> object:
    known = plain(value)
    return f"<{type(value).__name__}>" if known is value else known
