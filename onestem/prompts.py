"""Reads what callers in Python give as prompts: texts, token ids, chats and PML."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray

from onestem.checked import show
from onestem.engine.grammar.held import held_schema
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from onestem.openai.forms import Tools
from onestem.openai.read import calls_fields, read_chat, reasoning_fields
from onestem.pml import CompiledPrompt, Library
from onestem.pml import Prompt as PmlPrompt
from onestem.rawtext import RawText
from onestem.request import Documents, SamplingParams
from onestem.scores import (
    ScorePath,
    ScoreTree,
    completion_tree,
    pair_ids,
    rolling_windows,
    whole_ids,
)


class TextPrompt(TypedDict):
    """vLLM's object for a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """vLLM's object for token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int]
AnyPrompt = Prompt | TextPrompt | TokensPrompt
PmlSource = PmlPrompt | str | os.PathLike[str]


class PromptIds(NamedTuple):
    """Token ids of a prompt: as a sequence to hand on, and as an array to compute with; and of a
    chat, those that are documents' (`repair`), and how many are `around` messages."""

    listed: list[int]
    array: NDArray[np.int64]
    documents: Documents | None = None
    around: Mapping[str, int] = MappingProxyType({})


class ScoreItems(NamedTuple):
    """What is scored.

    Attributes:
        ids: int64 `[n]` each: token ids.
        starts: of each, the index of the first token that is scored.
        whose: the prompt of each.
    """

    ids: list[NDArray[np.int64]]
    starts: list[int]
    whose: list[int]


class PromptReader:
    """Reads prompts for one model.

    Args:
        tokenizer: None for a model without one: prompts are token ids.
        path: the model's directory.
        max_model_len: texts that are certainly longer are not tokenised; None: not known yet.
        max_positions: that a sequence of the model may have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        path: Path,
        *,
        max_model_len: int | None,
        max_positions: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._path = path
        self._max_model_len = max_model_len
        self._max_positions = max_positions
        self._schemas: Library | None = None

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer, which `what` needs.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and {self._path} has none: give token ids"
            )
        return self.tokenizer

    def bounded_tokenizer(self, what: str) -> BoundedTokenizer:
        """The same, refusing texts that are certainly too long."""
        return BoundedTokenizer(self.need_tokenizer(what), self._max_model_len)

    @property
    def schemas(self) -> Library:
        """PML schemas that prompts may name."""
        if self._schemas is None:
            tokenizer = self.need_tokenizer("PML")
            self._schemas = Library(tokenizer, max_positions=self._max_positions)
        return self._schemas

    def one(self, prompt: object, parse_special: bool = True) -> tuple[str | None, list[int]]:
        """Text, if it was given, and token ids of one prompt.

        Args:
            parse_special: see `LLM.generate`.
        """
        (ids,), (text,) = self.read([prompt], parse_special)
        return text, ids.listed

    def read(
        self, prompts: object, parse_special: bool
    ) -> tuple[list[PromptIds], list[str | None]]:
        """Token ids of one prompt or several, and the text of each that was given as text."""
        plain = several_prompts(prompts)
        for i, prompt in enumerate(plain):
            if isinstance(prompt, Mapping):
                with named_one("prompt", i, len(plain)):
                    plain[i] = _of_object(prompt)
        texts = [prompt if isinstance(prompt, str) else None for prompt in plain]
        return self.ids(plain, parse_special), texts

    def ids(self, prompts: Sequence[Any], parse_special: bool) -> list[PromptIds]:
        """Token ids of texts and of ids.

        Raises:
            RequestError: of several prompts, it says which (counted from 0).
        """
        _check_parse_special(parse_special)
        raw = [_raw(prompt, parse_special) for prompt in prompts]
        texts = [one for one in raw if isinstance(one, RawText)]
        tokenizer = self.bounded_tokenizer("text") if texts else None
        try:
            encoded = tokenizer.encode_batch(texts) if tokenizer is not None else []
        except RequestError:
            assert tokenizer is not None
            for i, one in enumerate(raw):
                with named_one("prompt", i, len(raw)):
                    tokenizer.encode_batch([one] if isinstance(one, RawText) else [])
            raise
        found = iter(encoded)
        ids = []
        for i, one in enumerate(raw):
            with named_one("prompt", i, len(raw)):
                ids.append(_ids_of(next(found) if isinstance(one, RawText) else one))
        return ids

    def chats(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        options: Mapping[str, Any],
    ) -> tuple[list[PromptIds], Tools | None]:
        """Token ids of one conversation or several, and the tools that may be called.

        Args:
            options: the other arguments of `LLM.chat`.
        """
        if not _is_list(messages):
            raise RequestError(f"messages is {show(messages)}, expected a list of messages")
        if len(messages) == 0:
            return [], None
        many = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.bounded_tokenizer("chat")
        ids, tools = [], None
        each = _documents_for_each(options["documents"], len(many))
        for i, (conversation, documents) in enumerate(zip(many, each, strict=True)):
            with named_one("conversation", i, len(many)):
                if not isinstance(conversation, Sequence):
                    raise RequestError(
                        f"messages is {show(conversation)}, expected a list of messages"
                    )
                fields = {**options, "messages": conversation, "documents": documents}
                prompt, tools = read_chat(fields)
                assert prompt.messages is not None
                chat = tokenizer.chat(prompt.messages, **vars(prompt.template))
                around = tokenizer.around(prompt, chat.ids)
                ids.append(_ids_of(chat.ids)._replace(documents=chat.documents, around=around))
        return ids, tools

    def with_calls(
        self, each: list[SamplingParams], tools: Tools | None, prompts: Sequence[PromptIds]
    ) -> list[SamplingParams]:
        """Parameters that constrain calls to their tools' schemas, and leave the marks of reasoning
        in the text; a shared object stays shared."""
        tokenizer = self.need_tokenizer("chat")
        form, token_of = tokenizer.tool_form, tokenizer.control_token
        made: dict[tuple[int, bool], SamplingParams] = {}
        changed = []
        for one, prompt in zip(each, prompts, strict=True):
            opened = tools is not None and tokenizer.is_reasoning(prompt.listed)
            key = id(one), opened
            if key not in made:
                if tools is None or tools.mode == "none":
                    given = one.model_dump(include={"skip_special_tokens"}, exclude_unset=True)
                    fields = reasoning_fields(given, form, token_of)
                else:
                    fields = calls_fields(
                        tools, one, form, token_of, held_schema, partial(bool, opened)
                    )
                made[key] = one.replace(**fields) if fields else one
            changed.append(made[key])
        return changed

    def completions(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Prompt]],
        parse_special: bool,
    ) -> ScoreItems:
        """Completions of prompts, each behind its prompt."""
        _check_list("prompts", prompts)
        _check_parse_special(parse_special)
        _check_completions(completions, len(prompts))
        items = ScoreItems([], [], [])
        for i, (prompt, some) in enumerate(zip(prompts, completions, strict=True)):
            with named_one("prompt", i, len(prompts)):
                _check_list("completions", some)
                context, *given = (_raw_or_ids(one, parse_special) for one in (prompt, *some))
                before, after = pair_ids(context, given, self.tokenizer)
                for one in after:
                    items.ids.append(np.concatenate((before, one)).astype(np.int64))
                    items.starts.append(len(before))
                    items.whose.append(i)
        return items

    def whole_texts(self, texts: Sequence[Prompt], parse_special: bool, most: int) -> ScoreItems:
        """Texts that are scored whole, in windows of at most `most` computed tokens."""
        _check_list("prompts", texts)
        _check_parse_special(parse_special)
        items = ScoreItems([], [], [])
        for i, text in enumerate(texts):
            with named_one("text", i, len(texts)):
                ids = whole_ids(_raw_or_ids(text, parse_special), self.tokenizer)
            for first, start, end in rolling_windows(len(ids), most):
                items.ids.append(ids[first:end])
                items.starts.append(start - first)
                items.whose.append(i)
        return items

    def pml_completions(
        self,
        prompts: PmlSource | Sequence[PmlSource],
        completions: Sequence[Sequence[str]],
        isolation: str,
    ) -> list[tuple[CompiledPrompt, ScoreTree, list[ScorePath]]]:
        """Prompts in PML, each with the tree of its completions and what is scored of it."""
        many = several_sources(prompts)
        _check_completions(completions, len(many))
        encode = self.need_tokenizer("PML").encode
        found = []
        for i, (prompt, texts) in enumerate(zip(many, completions, strict=True)):
            with named_one("prompt", i, len(many)):
                ids = [encode(text, add_special_tokens=False) for text in texts]
                if not ids or not all(ids):
                    raise RequestError(f"completions is {show(texts)}, expected texts with tokens")
                tree, paths = completion_tree(ids)
                found.append((self.schemas.compile(prompt, isolation), tree, paths))
        return found


def several_prompts(prompts: object) -> list[Any]:
    """The prompts, of one or a list of them."""
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        return [prompts]
    if isinstance(prompts, Iterable) and getattr(prompts, "ndim", 1) > 0:
        return list(prompts)
    raise RequestError(f"prompts is {show(prompts)}, expected a prompt or a list of prompts")


def _of_object(prompt: Mapping[str, Any]) -> Any:
    """The text or ids in vLLM's object for a prompt."""
    kinds = prompt.keys() & {"prompt", "prompt_token_ids"}
    if len(kinds) != 1 or len(prompt) != 1:
        raise RequestError(
            f"prompt is {show(dict(prompt))}, expected an object with prompt (text) or "
            "prompt_token_ids, and nothing else"
        )
    return prompt[kinds.pop()]


def several_sources(prompts: PmlSource | Sequence[PmlSource]) -> list[PmlSource]:
    """The prompts in PML, of one or a list of them."""
    if isinstance(prompts, (str, os.PathLike, PmlPrompt)):
        return [prompts]
    return list(prompts)


@contextmanager
def named_one(what: str, index: int, count: int) -> Iterator[None]:
    """Have an error name the item, if there are several."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {index}: {error}") from error


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of `count` prompts, from a caller's one, one each, or None."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params is {show(params)}, expected SamplingParams, or a list of them"
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts: give one, or one each"
        )
    return list(params)


def _documents_for_each(documents: Any, count: int) -> list[Any]:
    """The documents of each of `count` conversations, of a list for each or one for all."""
    if documents is None:
        return [None] * count
    _check_list("documents", documents)
    if not documents or not all(map(_is_list, documents)):
        return [documents] * count
    if len(documents) != count:
        raise RequestError(
            f"{len(documents)} lists of documents for {count} conversations: give one each, or one "
            "for all"
        )
    return list(documents)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_parse_special(given: object) -> None:
    """Raise `RequestError` for what is neither true nor false."""
    if not isinstance(given, bool):
        raise RequestError(f"parse_special is {show(given)}, expected true or false")


def _check_list(name: str, value: object) -> None:
    if not _is_list(value):
        raise RequestError(f"{name} is {show(value)}, expected a list")


def _is_ids(prompts: object) -> bool:
    """Whether these are one prompt's ids, and not several prompts."""
    if isinstance(prompts, (np.ndarray, torch.Tensor)):
        return prompts.ndim == 1
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        return True  # refused as such
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        return False
    first = prompts[0]
    return not isinstance(first, (str, Sequence, Mapping, np.ndarray, torch.Tensor))


def _check_completions(completions: Sequence[object], count: int) -> None:
    """Raise `RequestError` for anything but a list with an item for each of `count` prompts."""
    _check_list("completions", completions)
    if len(completions) != count:
        raise RequestError(
            f"{len(completions)} lists of completions for {count} prompts: give one each"
        )


def _raw(prompt: Any, parse_special: bool) -> Any:
    """A text as one that is tokenised as it stands; other values unchanged."""
    return RawText.of(prompt, parse_special) if isinstance(prompt, str) else prompt


def _raw_or_ids(prompt: Prompt, parse_special: bool) -> RawText | NDArray[np.int64]:
    raw = _raw(prompt, parse_special)
    return raw if isinstance(raw, RawText) else _ids_of(raw).array


def _ids_of(prompt: object) -> PromptIds:
    """Token ids of a prompt that is no text."""
    if isinstance(prompt, (np.ndarray, torch.Tensor)):
        return _ids_of_array(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(
            f"prompt is {type(prompt).__name__} ({str(prompt)[:40]}), expected text or token ids"
        )
    try:
        ids = np.frombuffer(array("q", prompt), np.int64)
    except (TypeError, OverflowError):
        bad = next(token for token in prompt if not _is_id(token))
    else:
        # A boolean is an integer for Python, and a mistake here.
        few = np.flatnonzero((ids == 0) | (ids == 1)).tolist()
        bad = next((prompt[i] for i in few if not _is_id(prompt[i])), None)
        if bad is None:
            if len(prompt) == 0 or type(prompt[0]) is int:
                return PromptIds(list(prompt), ids)
            if all(map(_is_id, prompt)):  # numpy's
                return PromptIds(ids.tolist(), ids)
            bad = next(token for token in prompt if not _is_id(token))
    raise RequestError(
        f"prompt holds {str(bad)[:40]!r} ({type(bad).__name__}), expected token ids (integers)"
    )


def _is_id(token: object) -> bool:
    whole = isinstance(token, Integral) and not isinstance(token, bool)
    return whole and -(2**63) <= int(cast(int, token)) < 2**63


def _ids_of_array(prompt: NDArray[Any] | torch.Tensor) -> PromptIds:
    if isinstance(prompt, torch.Tensor):
        whole = not (prompt.is_floating_point() or prompt.is_complex())
        whole = whole and prompt.dtype != torch.bool
    else:
        whole = bool(np.issubdtype(prompt.dtype, np.integer))
    if prompt.ndim != 1 or not whole:
        raise RequestError(
            f"prompt is an array of {prompt.dtype} with shape {list(prompt.shape)}, expected "
            "integers with one dimension"
        )
    array = prompt.cpu().numpy() if isinstance(prompt, torch.Tensor) else prompt
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        return _ids_of(array.tolist())  # some may be too large
    return PromptIds(array.tolist(), array.astype(np.int64))
