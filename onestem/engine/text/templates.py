"""Chat templates are programs that a model brings: one may never end, or take all memory. So they
are rendered in a process that the kernel ends at its limits (`onestem.children`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onestem.checked import plain
from onestem.children import Child, Limits, TooCostlyError
from onestem.engine.text.limits import MOST_CHARACTERS
from onestem.errors import RequestError

__all__ = ["LIMITS", "render", "start"]

LIMITS = Limits(cpu_seconds=10, wall_seconds=60, memory_bytes=2 << 30)

_child = Child("onestem.engine.text.template_process", LIMITS)  # of all tokenizers


def start() -> None:
    """Start the process, so that the first chat need not wait for it."""
    _child.start()


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
        answer = _child.ask(question.encode())
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
