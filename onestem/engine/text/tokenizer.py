"""Text to token ids and back, over a Hugging Face tokenizer directory.

Two rules hold everywhere:

* What a user typed is text. `<|im_end|>` or `</s>` inside a message, an argument or a document
  gives the tokens of those characters, never the control token of that name. Control tokens come
  from the tokenizer's post-processing, from the chat template, and from callers: in ids, and by
  their names in a raw text (`RawText`), but for its quoted parts.
* The beginning-of-sequence token appears once, where the tokenizer's own post-processing puts one;
  also where a chat template or a raw text writes it itself, and where they leave it out.

Decoding is defined over bytes. A token stands for bytes (`token_bytes`), the first token of a text
may lose a leading space (SentencePiece), and the bytes are read as UTF-8 with U+FFFD for what is
not. That is what the `tokenizers` library computes, with one exception. Where byte-fallback tokens
do not form UTF-8, it replaces every byte of the whole run of byte tokens; here the valid
characters among them stay. So text never changes when more tokens follow, and a stream of pieces
(`onestem.engine.text.detokenize`) is the whole text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from onestem.engine.text.backend import Backend
from onestem.engine.text.decoders import BYTE_LEVEL, BYTE_TOKEN, settled
from onestem.engine.text.directory import check_files
from onestem.engine.text.limits import MOST_CHARACTERS, most_per_token
from onestem.engine.text.marker import Marker, any_of
from onestem.engine.text.templates import render
from onestem.errors import ConfigError, OnestemError, RequestError, UnsupportedError, first_line
from onestem.models.fields import read_json
from onestem.native import is_panic
from onestem.openai.tools import ToolForm, form_of
from onestem.rawtext import RawText

__all__ = ["Tokenizer"]

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
PREFILLED_KEPT = 64  # template variables whose generation prompts are remembered


# What `transformers` takes beside a template's own variables.
_NOT_TEMPLATE_FIELDS = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
        "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
    )
)  # fmt: skip


class Ending(NamedTuple):
    """How a rendered conversation ends."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Tokenizer:
    """A tokenizer and its chat template. Safe to use from several threads.

    Args:
        hugging_face: a fast `transformers` tokenizer; it is taken over, not copied.

    Attributes:
        bos_token_id, eos_token_id: None where the tokenizer names none.
        end_ids: tokens that it names as ends, of a text or of a turn in a chat. A model's files may
            name others.
        special_ids: ids of control tokens, those that `skip_special_tokens` leaves out.

    Raises:
        UnsupportedError: the tokenizer is not a fast one, or decodes in a way that cannot be
            streamed (a token's text would depend on the tokens after it).
    """

    def __init__(self, hugging_face: Any) -> None:
        if not getattr(hugging_face, "is_fast", False):
            raise UnsupportedError(
                f"tokenizer {type(hugging_face).__name__} has no fast version, expected one with a "
                "tokenizer.json: convert it with transformers' convert_slow_tokenizer"
            )
        self._hugging_face = hugging_face
        # One backend takes control tokens in a text for what they are, the other for characters.
        self._control = Backend(hugging_face.backend_tokenizer)
        self._decoders = settled(self._control.library)
        self._text = self._control.copy()
        added = self._control.library.get_added_tokens_decoder()
        self._special = {token_id: token for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special)
        self.bos_token_id: int | None = hugging_face.bos_token_id
        self.eos_token_id: int | None = hugging_face.eos_token_id
        named = (self.eos_token_id, getattr(hugging_face, "eot_token_id", None))
        self.end_ids = tuple(token for token in named if token is not None)
        unknown, padding = hugging_face.unk_token_id, hugging_face.pad_token_id
        #: takes an argument's place while a module is encoded alone (PML)
        self.placeholder_token_id: int | None = padding if unknown is None else unknown
        # Characters may become the unknown token; that forges nothing.
        self._unforgeable = self.special_ids - {hugging_face.unk_token_id}
        self._prefix, self._suffix = self._post_processing()
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a model directory; None where it has none.

        Raises:
            ConfigError: its files cannot be read.
            UnsupportedError: see the class.
        """
        directory = Path(path)
        check_files(directory)
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            of_processor = directory / "chat_template.json"  # where older processors have it alone
            if not loaded.chat_template and of_processor.is_file():
                loaded.chat_template = read_json(of_processor).get("chat_template")
            return cls(loaded)
        except OnestemError:
            raise
        except BaseException as error:  # whatever its files make the libraries raise
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reason = first_line(error)
            raise ConfigError(f"tokenizer of {directory} cannot be loaded: {reason}") from error

    # --- text to ids ---------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the post-processor puts around it unless told otherwise.

        Names of control tokens in the text are characters.
        """
        body = self._text_ids(text)
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
            self._quoting(raw) if raw.quoted and self._is_forged(raw, ids) else ids
            for raw, ids in zip(texts, encoded, strict=True)
        ]
        if not add_special_tokens:
            return bodies
        return [[*self._begun(body), *self._suffix] for body in bodies]

    def _is_forged(self, raw: RawText, ids: list[int]) -> bool:
        """Whether something quoted has become a control token."""
        if self._unforgeable.isdisjoint(ids) or self._special_names is None:
            return False
        quotes = [raw.quotes(*found.span()) for found in self._special_names.finditer(raw.text)]
        # A normaliser may make a name of other characters.
        return any(quotes) or len(quotes) < sum(token in self._unforgeable for token in ids)

    def _quoting(self, raw: RawText) -> list[int]:
        """Ids of a text that quotes names of control tokens."""
        with self._lock:
            marker = self._marker
        text = marker.mark_raw(raw)
        ids = self._unforged(marker.backend, text, marker.backend.encode(text))
        return [marker.ids.get(token_id, token_id) for token_id in ids]

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
        text, names = raw.text, self._special_names
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

    def _text_ids(self, text: str) -> list[int]:
        return self._unforged(self._text, text, self._text.encode(text))

    def _unforged(self, backend: Backend, text: str, ids: list[int]) -> list[int]:
        """`ids` of `text`, or others if characters became control tokens.

        Vocabularies of whole words or pieces may hold a control token's name as a word. There the
        text is cut inside each such name and the parts are encoded alone.
        """
        if self._unforgeable.isdisjoint(ids):
            return ids
        assert self._special_names is not None
        cuts = [found.start() + 1 for found in self._special_names.finditer(text)]
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        joined = [id for part in parts for id in backend.encode(part)]
        return [token for token in joined if token not in self._unforgeable]

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

    # --- chat ----------------------------------------------------------------------------------

    @property
    def first_id(self) -> int | None:
        """What stands for a beginning: BOS, else EOS; None: the tokenizer names neither."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hugging_face.chat_template)

    @cached_property
    def _template_source(self) -> str:
        """Source of all of the model's chat templates."""
        templates = self._hugging_face.chat_template or ""
        return templates if isinstance(templates, str) else "\n".join(templates.values())

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes calls of tools; None: its template does not say it."""
        return form_of(self._template_source)

    def control_token(self, name: str) -> int | None:
        """The id of a control token; None where `name` is not one."""
        return self._named.get(name)

    def with_control(self, text: str, form: Callable[[int], str]) -> str:
        """A text with `form` of the id in place of each name of a control token."""
        if self._special_names is None:
            return text
        return self._special_names.sub(lambda found: form(self._named[found.group()]), text)

    @cached_property
    def _named(self) -> dict[str, int]:
        """Ids of control tokens by their names."""
        return {token.content: token_id for token_id, token in self._special.items()}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        fields: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of a conversation, as the model's template writes it.

        Args:
            messages: as `onestem.openai.read` makes them; contents are texts.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end inside the last message, which the answer goes on from.
            fields: further variables of the template (vLLM's `chat_template_kwargs`).
            max_tokens: refuse what has more for certain, before it is tokenised.

        A control token that the template writes is one; its name inside a message is
        characters. The rule:

        * No message mentions a control token (nearly always): the rendered text is encoded as a
          whole, as `transformers` does.
        * One does: before rendering, each such name in the messages is replaced by a mark that no
          user can guess. After rendering, the names that are left are the template's own. They are
          replaced by other unguessable strings, which a copy of the tokenizer knows as added
          tokens. The marks are turned back into the names. This copy encodes the whole text in
          one go, with control tokens read as characters. Thus the text is cut at the template's
          control tokens and nowhere else, and everything between is tokenised as ever. The
          template sees the messages with marks in place of the names, otherwise as they are.

        Raises:
            RequestError: no template, or it refuses; or what it writes is too long.
        """
        plain = self._plain(messages)
        ending = Ending(add_generation_prompt, continue_final_message)
        fields = _template_fields(fields)
        for name in ("tools", "reasoning_effort"):
            if name in fields and name not in self._template_source:
                raise RequestError(f"{name}: the model's chat template does not know it")
        if self._special_names is None or not _mentions([plain, fields], self._special_names):
            rendered = self._render(plain, ending, fields)
            self.check_length(_RENDERED, len(rendered), max_tokens, control=True)
            return self.encode_control(rendered)
        with self._lock:
            marker = self._marker
        rendered = self._render(marker.mark(plain), ending, marker.mark(fields))
        text, literal = marker.unmark(rendered)
        self.check_length(_RENDERED, len(text), max_tokens, control=True)
        ids = marker.backend.encode(text)
        ids = self._unforged(marker.backend, text, ids) if literal else ids
        return self._begun([marker.ids.get(token_id, token_id) for token_id in ids])

    def prefilled_tokens(self, fields: Mapping[str, Any] | None = None) -> int:
        """Number of tokens at a prompt's end that the template does not write before the same
        answer in a later prompt, such as an empty `<think></think>`. `fields`: as above."""
        named = {name: value for name, value in (fields or {}).items() if name != "tools"}
        return self._prefilled(json.dumps(named, sort_keys=True, default=str))

    @cached_property
    def _prefilled(self) -> Callable[[str], int]:
        return lru_cache(PREFILLED_KEPT)(self._count_prefilled)

    def _count_prefilled(self, fields: str) -> int:
        asked = [{"role": "user", "content": "a"}]
        later = [*asked, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        try:
            begun, plain, said = (
                self.apply_chat_template(messages, begins, fields=json.loads(fields))
                for messages, begins in ((asked, True), (asked, False), (later, False))
            )
        except RequestError:  # the template wants other messages
            return 0
        same = next((i for i, (a, b) in enumerate(zip(begun, said, strict=False)) if a != b), None)
        # Where it differs before the answer, a later prompt has nothing of this one's.
        return 0 if same is None or same < len(plain) else len(begun) - same

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation's text, to show; its tokens are `apply_chat_template`'s."""
        plain = self._plain(messages)
        return self._render(plain, Ending(add_generation_prompt), {})

    def _plain(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as a template reads them: OpenAI's `developer` is a `system` that it may know
        by that name alone."""
        plain = [dict(message) for message in messages]
        if "developer" not in self._template_source:
            for message in plain:
                if message["role"] == "developer":
                    message["role"] = "system"
        return plain

    def _render(
        self, messages: list[dict[str, Any]], ending: Ending, fields: Mapping[str, Any]
    ) -> str:
        if not self.has_chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template, expected one for messages: send a "
                "prompt instead"
            )
        if not messages:
            raise RequestError("messages is empty, expected at least one message")
        if ending.add_generation_prompt and ending.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both set: an answer either "
                "begins or goes on, so set one of them"
            )
        try:
            template = self._hugging_face.get_chat_template(tools=fields.get("tools"))
        except ValueError as error:  # several, and none for this
            raise RequestError(f"the model has no chat template for this: {error}") from error
        names = self._hugging_face.special_tokens_map
        return render(template, messages, **{**names, **fields}, **ending._asdict())

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        """Matches a control token's name, the longest that begins at a place."""
        return any_of(token.content for token in self._special.values())

    @cached_property
    def _marker(self) -> Marker:
        return Marker(self._text, self._special)

    # --- ids to text ---------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the vocabulary does not have give nothing."""
        ids = [token for token in token_ids if 0 <= token < self.vocab_size]
        text = self._control.decode(ids, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and "ByteFallback" in self._decoders:
            return self._decode_bytes(ids, skip_special_tokens).decode("utf-8", "replace")
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a token alone, a control token's by its name: `decode` of this one id."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def _decode_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        parts: list[bytes] = []
        for token in token_ids:
            if skip_special_tokens and token in self.special_ids:
                continue
            later = self.token_bytes(token)
            if later:
                parts.append(later if parts else self.first_token_bytes(token))
        return b"".join(parts)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that does not come first; a control token's are its name.

        They need not be UTF-8 by themselves. Empty for ids that the vocabulary does not have.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that comes first in a text (SentencePiece drops a leading space)."""
        byte = self._fallback_byte(token_id)
        if self._is_byte_level or (byte is not None and byte >= 0x80):
            return self.token_bytes(token_id)
        if not 0 <= token_id < self.vocab_size:
            return b""
        text = self._control.decode([token_id])
        return text.encode()

    def _token_bytes(self, token_id: int) -> bytes:
        name = self.token_name(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(BYTE_LEVEL[character] for character in name)
            except KeyError:  # an added token with characters that stand for no byte
                return name.encode()
        byte = self._fallback_byte(token_id)
        if byte is not None:
            return bytes([byte])
        anchor_id, anchor = self._anchor
        text = self._control.decode([anchor_id, token_id])
        return text.removeprefix(anchor).encode()

    def token_name(self, token_id: int) -> str | None:
        """The vocabulary's own form of a token; None where it has no such id."""
        if not 0 <= token_id < self.vocab_size:
            return None
        name: str | None = self._control.library.id_to_token(token_id)
        return name

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. A model may have more logits."""
        return max(self._control.library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in self._decoders

    def _fallback_byte(self, token_id: int) -> int | None:
        if "ByteFallback" not in self._decoders:
            return None
        found = BYTE_TOKEN.fullmatch(self.token_name(token_id) or "")
        return int(found.group(1), 16) if found else None

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """An ordinary token and its text: what follows it does not come first."""
        for token_id in range(self.vocab_size):
            if token_id in self.special_ids or self._fallback_byte(token_id) is not None:
                continue
            text = self._control.decode([token_id])
            if text.isalnum():
                return token_id, text
        raise UnsupportedError("the tokenizer's vocabulary has no token of letters or digits")


# --- messages ----------------------------------------------------------------------------------


def _template_fields(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for a template that are not arguments of the library that renders it."""
    if not isinstance(fields, Mapping | None):
        raise RequestError(f"chat_template_kwargs is {type(fields).__name__}, expected a mapping")
    taken = sorted(_NOT_TEMPLATE_FIELDS.intersection(fields or ()))
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {taken[0]!r}, which is no variable of a template: leave it "
            "out"
        )
    return dict(fields or {})


def _mentions(value: Any, names: re.Pattern[str]) -> bool:
    """Whether a string anywhere in a message mentions one of `names`."""
    if isinstance(value, str):
        return names.search(value) is not None
    if isinstance(value, Mapping):
        return any(_mentions(part, names) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(_mentions(part, names) for part in value)
    return False
