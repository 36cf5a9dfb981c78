"""A model's chat template: from messages to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from onestem.engine.text.documents import Document, found_in, marked
from onestem.engine.text.templates import render
from onestem.errors import RequestError
from onestem.openai.forms import GENERIC, Form, Gaps, described
from onestem.openai.forms.history import (
    Habits,
    found_out,
    is_read_back,
    needs_habits,
    told,
    written,
)
from onestem.openai.forms.spelling import StandIns
from onestem.openai.rank import question

# What `transformers` takes beside a template's own variables.
_NOT_TEMPLATE_FIELDS = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
        "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
    )
)  # fmt: skip
_ROLES = ("query", "document")


class ChatTemplate:
    """The chat templates of a tokenizer.

    Args:
        hugging_face: of `transformers`.
    """

    def __init__(self, hugging_face: Any) -> None:
        self._hugging_face = hugging_face

    def __bool__(self) -> bool:
        return bool(self._hugging_face.chat_template)

    @cached_property
    def _source(self) -> str:
        """Source of all of the model's chat templates."""
        templates = self._hugging_face.chat_template or ""
        return templates if isinstance(templates, str) else "\n".join(templates.values())

    @cached_property
    def _knows_documents(self) -> bool:
        """Whether messages of a template of a reranker are a query and a document."""
        return all(re.search(rf"""['"]{role}['"]""", self._source) for role in _ROLES)

    def _which(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What picks a template, where the model has several: Command R has one for documents."""
        there, tools = self._hugging_face.chat_template, fields.get("tools")
        has_own = isinstance(there, dict) and "rag" in there
        is_own = has_own and fields.get("documents") and not tools
        return {"chat_template": "rag"} if is_own else {"tools": tools}

    @property
    def form(self) -> Form | None:
        """How the model writes calls of tools and reasoning; None: there is no template."""
        return self._found[0] if self else None

    @property
    def gaps(self) -> Gaps:
        """Blanks that it writes between the parts of an answer."""
        return self._found[1].gaps

    @cached_property
    def _found(self) -> tuple[Form, Habits]:
        """The model's form, and what the template writes of what it is given."""

        def attempt(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> str:
            try:
                return self._rendered(messages, fields, True, False)
            except RequestError:
                return ""

        form, is_known = described(self._source)
        habits = found_out(attempt, form, is_known)
        if habits.calls and not is_read_back(
            attempt, form, habits
        ):  # it has marks of the form only
            form = replace(GENERIC, reasoning=form.reasoning)
            habits = found_out(attempt, form, False)
        return form, habits

    def plain(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as a template reads them. OpenAI's `developer` is a `system` that it may know
        by that name alone, and a query with a document a pair of messages or a question."""
        if messages and messages[-1]["role"] == "document" and not self._knows_documents:
            return question(messages)
        plain = [dict(message) for message in messages]
        if "developer" not in self._source:
            for message in plain:
                if message["role"] == "developer":
                    message["role"] = "system"
        return plain

    def fields(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables for a template, checked.

        Raises:
            RequestError: the template does not know one, or it is no variable of a template.
        """
        if not isinstance(given, Mapping | None):
            raise RequestError(
                f"chat_template_kwargs is {type(given).__name__}, expected a mapping"
            )
        fields = dict(given or {})
        taken = sorted(_NOT_TEMPLATE_FIELDS.intersection(fields))
        if taken:
            raise RequestError(
                f"chat_template_kwargs has {taken[0]!r}, which is no variable of a template: leave "
                "it out"
            )
        if "reasoning_effort" in fields and "reasoning_effort" not in self._source:
            raise RequestError(
                "reasoning_effort (effort): the chat template does not know it; leave it out"
            )
        return fields

    def writes_documents(
        self,
        attempt: Callable[..., str],
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        documents: Sequence[Document],
    ) -> bool:
        """Whether the template has a place for the documents of a conversation.

        Args:
            attempt: renders messages with variables.

        Raises:
            RequestError: it has one, and leaves some out, or refuses them.
        """
        if "documents" not in self._source:
            return False
        given = marked(documents)
        untitled = next((i for i, one in enumerate(given) if "title" not in one), None)
        try:
            found = found_in(attempt(messages, {**fields, "documents": given}))
        except RequestError:
            if untitled is None:
                raise
            titled = [{"title": "a", **one} for one in given]
            attempt(messages, {**fields, "documents": titled})
            raise RequestError(
                f"documents[{untitled}] has no title, which the model's chat template writes: give "
                "it one"
            ) from None
        if found and {*found} != {*range(len(documents))}:
            raise RequestError("the model's chat template leaves some of documents out: give fewer")
        return bool(found)

    def render(
        self,
        messages: list[dict[str, Any]],
        fields: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        without_calls: bool = False,
    ) -> str:
        """The text of a conversation. What the template leaves out of tools, calls, their results
        and reasoning is written in its messages.

        Args:
            without_calls: answers have no calls, so that a template without tools tells of none.

        Raises:
            RequestError: no template, or it refuses.
        """
        if not self:
            raise RequestError(
                "the model's tokenizer has no chat template, expected one for messages: send a "
                "prompt instead"
            )
        if not messages:
            raise RequestError("messages is empty, expected at least one message")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both set: an answer either "
                "begins or goes on, so set one of them"
            )
        tools, (form, habits) = fields.get("tools"), self._found
        how = (add_generation_prompt, continue_final_message)
        if not form.has_reasoning and not needs_habits(messages, tools):
            return self._rendered(messages, fields, *how)
        if tools and not habits.tools:
            fields = {name: value for name, value in fields.items() if name != "tools"}
            if not without_calls:
                messages = told(messages, tools, form, habits)
        stand_ins = StandIns(habits.json)
        given = stand_ins.put(messages)
        try:
            text = self._rendered(written(given, form, habits), fields, *how)
        except RequestError:
            silent = [{**one, "content": ""} if one.get("tool_calls") else one for one in given]
            if not habits.apart or silent == given:
                raise
            self._rendered(written(silent, form, habits), fields, *how)
            raise RequestError(
                "messages: one has text beside calls of tools, for which the model's chat template "
                "has no place in a conversation that goes on: leave its content out"
            ) from None
        return stand_ins.spelled(text)

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        fields: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """What the template writes."""
        try:
            template = self._hugging_face.get_chat_template(**self._which(fields))
        except ValueError as error:  # several, and none for this
            raise RequestError(f"the model has no chat template for this: {error}") from error
        return render(
            template,
            messages,
            **{**self._hugging_face.special_tokens_map, **fields},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
