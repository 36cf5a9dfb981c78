"""Text to token ids and back, over a Hugging Face tokenizer directory.

Two rules hold everywhere:

* What a user typed is text. `<|im_end|>` or `</s>` inside a message, an argument or a document
  gives the tokens of those characters, never the control token of that name. Control tokens come
  from the tokenizer's post-processing, from the chat template, and from callers: in ids, and by
  their names in a raw text (`RawText`), but for its quoted parts.
* The beginning-of-sequence token appears once, where the tokenizer's own post-processing puts one;
  also where a chat template or a raw text writes it itself, and where they leave it out.

The way back is `vocabulary`'s, control tokens' names are `control`'s, the template is `chat`'s.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from onestem.engine.text.backend import Backend
from onestem.engine.text.chat import ChatTemplate
from onestem.engine.text.control import ControlNames
from onestem.engine.text.directory import check_files
from onestem.engine.text.documents import (
    LEAD_IN,
    NO_LEAD_IN,
    Document,
    before_question,
    marked,
    split,
)
from onestem.engine.text.gguf_tokenizer import read_tokenizer
from onestem.engine.text.limits import MOST_CHARACTERS, most_per_token
from onestem.engine.text.marker import Marker
from onestem.engine.text.vocabulary import Vocabulary
from onestem.errors import ConfigError, OnestemError, RequestError, UnsupportedError, first_line
from onestem.models.fields import read_json
from onestem.models.gguf.file import open_gguf
from onestem.native import is_panic
from onestem.openai.forms import Form, Reading
from onestem.pml.tokens import after_break
from onestem.rawtext import RawText
from onestem.request import Documents

_READ_OF_MODEL = ("model_type", "model_name", "tokenizer_class", "_name_or_path")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
_RENDERED = "the rendered chat"  # in errors
MARK_TOKENS = 16  # at a prompt's end, in which a mark of reasoning is looked for
WRITTEN_KEPT = 64  # template variables of which it is remembered what a template writes


class Written(NamedTuple):
    """What a chat template writes around messages.

    Attributes:
        prefilled: number of tokens at a prompt's end that it does not write before the same answer
            in a later prompt, such as an empty `<think></think>`.
        turn: control token that begins a message; None: no such token does.
    """

    prefilled: int
    turn: int | None

    def first_message(self, ids: Sequence[int]) -> int:
        """Number of tokens of a prompt's first message, with what is before it; 0: not known."""
        begins = [i for i, token_id in enumerate(ids) if token_id == self.turn]
        return begins[1] if len(begins) > 1 else 0


class ChatIds(NamedTuple):
    """Ids of a conversation. `documents`: where its pieces were tokenised apart, for `repair`."""

    ids: list[int]
    documents: Documents | None


class Tokenizer(Vocabulary):
    """A tokenizer and its chat template. Safe to use from several threads.

    Args:
        hugging_face: a fast `transformers` tokenizer; it is taken over, not copied.

    Attributes:
        bos_token_id, eos_token_id: None where the tokenizer names none.
        end_ids: tokens that it names as ends, of a text or of a turn in a chat. A model's files may
            name others.

    Raises:
        UnsupportedError: the tokenizer is not a fast one, or as `Vocabulary`.
    """

    def __init__(self, hugging_face: Any) -> None:
        if not getattr(hugging_face, "is_fast", False):
            raise UnsupportedError(
                f"tokenizer {type(hugging_face).__name__} has no fast version, expected one with a "
                "tokenizer.json: convert it with transformers' convert_slow_tokenizer"
            )
        # One backend takes control tokens in a text for what they are, the other for characters.
        backend = Backend(hugging_face.backend_tokenizer)
        added = backend.library.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        super().__init__(backend, frozenset(special))
        self._text = backend.copy()
        self._special, self._names = special, ControlNames(special, hugging_face.unk_token_id)
        self._chat = ChatTemplate(hugging_face)
        self.bos_token_id: int | None = hugging_face.bos_token_id
        self.eos_token_id: int | None = hugging_face.eos_token_id
        named = (self.eos_token_id, getattr(hugging_face, "eot_token_id", None))
        ends = (*named, *getattr(hugging_face, "turn_end_ids", ()))
        self.end_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
        unknown, padding = hugging_face.unk_token_id, hugging_face.pad_token_id
        #: takes an argument's place while a module is encoded alone (PML)
        self.placeholder_token_id: int | None = padding if unknown is None else unknown
        self._prefix, self._suffix = self._post_processing()
        self._lock = threading.Lock()
        self._lead_ins = lru_cache(WRITTEN_KEPT)(partial(_lead_in, self))

    @classmethod
    def from_directory(cls, path: str | Path, template: str | None = None) -> Tokenizer | None:
        """The tokenizer of a model directory or of a GGUF file; None where it has none.

        Args:
            template: a chat template in place of its own.

        Raises:
            ConfigError: its files cannot be read.
            UnsupportedError: see the class.
        """
        directory = Path(path)
        try:
            loaded = read_hugging_face(directory)
            if loaded is not None and template is not None:
                loaded.chat_template = template
            return None if loaded is None else cls(loaded)
        except OnestemError:
            raise
        except BaseException as error:  # whatever its files make the libraries raise
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reason = first_line(error)
            raise ConfigError(f"tokenizer of {directory} cannot be loaded: {reason}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the post-processor puts around it unless told otherwise.

        Names of control tokens in the text are characters.
        """
        body = self._names.unforged(self._text, text, self._text.encode(text))
        return [*self._prefix, *body, *self._suffix] if add_special_tokens else body

    def encode_batch(
        self, texts: Sequence[RawText], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of raw texts, with what the post-processor puts around them unless told otherwise;
        what it puts before is not doubled. On all cores and without Python's lock.

        Raises:
            RequestError: a text holds half of a surrogate pair, or cannot be tokenised.
        """
        encoded = self._control.encode_batch([raw.text for raw in texts])
        bodies = [
            self._quoting(raw) if raw.quoted and self._names.is_forged(raw, ids) else ids
            for raw, ids in zip(texts, encoded, strict=True)
        ]
        if not add_special_tokens:
            return bodies
        return [[*self._begun(body), *self._suffix] for body in bodies]

    def _quoting(self, raw: RawText) -> list[int]:
        """Ids of a text that quotes names of control tokens."""
        with self._lock:
            marker = self.marker
        return marker.encode(marker.mark_raw(raw))

    def check_length(
        self,
        name: str,
        num_characters: int,
        max_tokens: int | None = None,
        *,
        control: bool = False,
        blanks: bool = True,
    ) -> None:
        """Raise `RequestError` for a text that certainly has more than `max_tokens` tokens, or that
        is longer than any text may be.

        Args:
            name: what the error calls it.
            control: whether names of control tokens in it are these tokens.
            blanks: whether blanks are counted. A control token may take any number beside it.
        """
        if num_characters <= (MOST_CHARACTERS if max_tokens is None else max_tokens):
            return
        per_token = self._most_per_token(control, blanks) if max_tokens is not None else None
        limit, why = MOST_CHARACTERS, ""
        if max_tokens is not None and per_token is not None:
            limit = min(limit, max_tokens * per_token)
            why = f", which are more than {max_tokens} tokens in any case"
        if num_characters > limit:
            raise RequestError(
                f"{name} has {num_characters} characters, limit is {limit}{why}: shorten it"
            )

    def check_raw(self, raw: RawText, max_tokens: int | None = None) -> None:
        """`check_length` of a prompt's raw text."""
        text, names = raw.text, self._names.pattern
        is_long = max_tokens is not None and len(text) > max_tokens
        control = is_long and names is not None and names.search(text) is not None
        if control and self._most_per_token(True, True) is None:
            visible = len("".join(text.split()))
            self.check_length(
                "prompt without blanks", visible, max_tokens, control=True, blanks=False
            )
        self.check_length("prompt", len(text), max_tokens, control=control)

    @cached_property
    def _most_per_token(self) -> Callable[[bool, bool], int | None]:
        return lru_cache(4)(
            lambda control, blanks: most_per_token(
                (self._control if control else self._text).library, control=control, blanks=blanks
            )
        )

    def encode_control(self, text: str) -> list[int]:
        """Ids of a text that its writer vouches for: names of control tokens are control tokens.

        For prompts rendered elsewhere from a template. The beginning-of-sequence token is not
        doubled if the text has it.
        """
        return self._begun(self._control.encode(text))

    def _begun(self, ids: list[int]) -> list[int]:
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return [*self._prefix, *ids]

    def _post_processing(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor puts before and after a text."""
        whole = self._text.encode("a", add_special_tokens=True)
        body = self._text.encode("a")
        for start in range(len(whole) - len(body) + 1):
            if whole[start : start + len(body)] == body:
                return whole[:start], whole[start + len(body) :]
        raise UnsupportedError(
            "the tokenizer's post-processor changes the text's own tokens, expected one that only "
            "adds control tokens around them"
        )

    @property
    def first_id(self) -> int | None:
        """What stands for a beginning: BOS, else EOS; None: the tokenizer names neither."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._chat)

    @property
    def tool_form(self) -> Form | None:
        """How the model writes calls of tools and reasoning; None: it has no chat template."""
        return self._chat.form

    def is_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning: its template has opened it."""
        form = self._chat.form
        if form is None or form.reasoning is None:
            return False
        return _end_of(prompt, self).rstrip().endswith(form.reasoning.open)

    def reading(
        self,
        prompt: Sequence[int],
        texts: Mapping[str, Sequence[str]] | None,
        *,
        is_free: bool = True,
    ) -> Reading | None:
        """How the answers to a chat are read; None: they are text as they are.

        Args:
            prompt: its token ids.
            texts: as of `Reading`; None: answers have no calls.
            is_free: whether an answer goes on where the prompt ends. (A format that it must have
                begins there, reasoning or not.)
        """
        form = self._chat.form
        if form is None or (texts is None and not form.has_reasoning):
            return None
        opened = is_free and self.is_reasoning(prompt)
        calls = texts is not None
        gaps = self._chat.gaps
        if opened and gaps.opening_thought:  # some of it may be in the prompt
            end = _end_of(prompt, self)
            own = gaps.opening_thought.removeprefix(end[len(end.rstrip()) :])
            gaps = replace(gaps, opening_thought=own)
        return Reading(form=form, calls=calls, texts=texts or {}, opened=opened, gaps=gaps)

    def control_token(self, name: str) -> int | None:
        """The id of a control token; None where `name` is not one."""
        return self._names.ids.get(name)

    def with_control(self, text: str, form: Callable[[int], str]) -> str:
        """A text with `form` of the id in place of each name of a control token."""
        return self._names.replaced(text, form)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **how: Any
    ) -> list[int]:
        """The ids alone of `chat`, whose other arguments it takes."""
        return self.chat(messages, add_generation_prompt, **how).ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        without_calls: bool = False,
        fields: Mapping[str, Any] | None = None,
        documents: Sequence[Document] = (),
        repair: float = 1.0,
        lead_in: Document | None = None,
        max_tokens: int | None = None,
    ) -> ChatIds:
        """A conversation, as the model's template writes it.

        Args:
            messages: as `onestem.openai.read` makes them; contents are texts.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end inside the last message, which the answer goes on from.
            without_calls: answers have no calls; a template without tools tells of none then.
            fields: further variables of the template (vLLM's `chat_template_kwargs`).
            documents: each with a `text` that is not blank, and perhaps a `title`. They are where
                the template has its `documents`, else before the last of the user's messages.
            repair: below 1, documents and what is between them are tokenised apart.
            lead_in: one after which all but the first are stored (`Documents.lead_in`).
            max_tokens: refuse what has more for certain, before it is tokenised.

        A control token that the template writes is one; its name inside a message is characters.
        Where a message mentions one, such names are replaced by marks that no user can guess before
        rendering. Names that are there afterwards are the template's own, and become stand-ins:
        added tokens of a copy of the tokenizer that knows no control tokens. The marks become names
        again, and the copy encodes the whole text, cut at the template's control tokens alone.

        Raises:
            RequestError: no template, or it refuses; or what it writes is too long.
        """
        plain = self._chat.plain(messages)
        fields = self._chat.fields(fields)
        render = partial(
            self._chat.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            without_calls=without_calls,
        )
        is_apart = bool(documents) and repair < 1
        if documents:
            told = marked(documents, titles=True) if is_apart else documents
            if self._chat.writes_documents(render, plain, fields, documents):
                fields["documents"] = told
            else:
                plain = before_question(plain, told)
        if self._names.are_mentioned([plain, fields]):
            with self._lock:
                marker = self.marker
            rendered = render(marker.mark(plain), marker.mark(fields))
            rendered, literal = marker.unmark(rendered)
            encode: Callable[[str], list[int]] = partial(marker.encode, literal=literal)
        else:
            rendered, encode = render(plain, fields), self._control.encode
        pieces = split(rendered, len(documents)) if is_apart else [rendered]
        self.check_length(_RENDERED, sum(map(len, pieces)), max_tokens, control=True)
        ids, ends = self._begun(encode(pieces[0])), []
        for piece in pieces[1:]:
            ends.append(len(ids))
            ids = ids + after_break(encode, piece)
        if not is_apart:
            return ChatIds(ids, None)
        spans = tuple(zip(ends[::2], ends[1::2], strict=True))
        if lead_in == NO_LEAD_IN:
            return ChatIds(ids, Documents(spans, repair))
        others = {name: one for name, one in fields.items() if name not in ("documents", "tools")}
        key = json.dumps(lead_in or LEAD_IN), json.dumps(others, sort_keys=True, default=str)
        return ChatIds(ids, Documents(spans, repair, self._lead_ins(*key)))

    def written(self, fields: Mapping[str, Any] | None = None) -> Written:
        """What the template writes around messages; `fields`: as above."""
        named = {name: value for name, value in (fields or {}).items() if name != "tools"}
        return self._written(json.dumps(named, sort_keys=True, default=str))

    @cached_property
    def _written(self) -> Callable[[str], Written]:
        return lru_cache(WRITTEN_KEPT)(self._find_written)

    def _find_written(self, fields: str) -> Written:
        asked = [{"role": "user", "content": "a"}]
        later = [*asked, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        try:
            begun, plain, said = (
                self.apply_chat_template(messages, begins, fields=json.loads(fields))
                for messages, begins in ((asked, True), (asked, False), (later, False))
            )
        except RequestError:  # the template wants other messages
            return Written(0, None)
        same = next((i for i, (a, b) in enumerate(zip(begun, said, strict=False)) if a != b), None)
        # Where it differs before the answer, a later prompt has nothing of this one's.
        prefilled = 0 if same is None or same < len(plain) else len(begun) - same
        goes_on = said[: len(plain)] == plain and len(said) > len(plain)
        turn = said[len(plain)] if goes_on else None
        return Written(prefilled, turn if turn in self._names.ids.values() else None)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation's text, to show; its tokens are `apply_chat_template`'s."""
        plain = self._chat.plain(messages)
        return self._chat.render(plain, {}, add_generation_prompt=add_generation_prompt)

    @cached_property
    def marker(self) -> Marker:
        """Tells a template's control tokens from those that messages mention; made once."""
        return Marker(self._text, self._names, self._special)


def _lead_in(tokenizer: Tokenizer, document: str, fields: str) -> tuple[int, ...]:
    """Ids of a document, and of what the template writes between it and the next one."""
    asked, twice = [{"role": "user", "content": "a"}], [json.loads(document)] * 2
    how: dict[str, Any] = {"fields": json.loads(fields), "repair": 0.0, "lead_in": NO_LEAD_IN}
    try:
        ids, found = tokenizer.chat(asked, documents=twice, **how)
    except RequestError as error:
        if document != json.dumps(LEAD_IN):
            raise RequestError(f"lead_in, written twice as documents: {error}") from error
        return ()  # the template asks for more than this one has
    assert found is not None
    (first, _), (after, _) = found.spans
    return tuple(ids[first:after])


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(list(prompt[-MARK_TOKENS:]), skip_special_tokens=False)


def read_hugging_face(directory: Path) -> Any | None:
    """The tokenizer of `transformers` in a directory or a GGUF file; None where it has none."""
    if directory.is_file():
        return read_tokenizer(open_gguf(directory))
    check_files(directory)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(
        str(directory),
        config=_plain_config(directory),
        local_files_only=True,
        trust_remote_code=False,
    )
    of_processor = directory / "chat_template.json"  # where older processors have it alone
    if not loaded.chat_template and of_processor.is_file():
        loaded.chat_template = read_json(of_processor).get("chat_template")
    return loaded


def _plain_config(directory: Path) -> Any | None:
    """What `AutoTokenizer` reads of the model's configuration, without the class that this has in
    `transformers`, whose import takes a second and more; None where that class decides."""
    of_model, of_tokenizer = directory / "config.json", directory / "tokenizer_config.json"
    if not (of_model.is_file() and of_tokenizer.is_file()):
        return None
    named = read_json(of_tokenizer)
    if not named.get("tokenizer_class") or "auto_map" in named:
        return None
    from transformers import PreTrainedConfig

    fields = read_json(of_model)
    kept = {name: fields[name] for name in _READ_OF_MODEL if name in fields}
    return PreTrainedConfig.from_dict(kept, name_or_path=str(directory))
