"""Token ids back to text, and to the bytes that tokens stand for.

Decoding is defined over bytes. A token stands for bytes (`token_bytes`), the first token of a text
may lose a leading space (SentencePiece), and the bytes are read as UTF-8 with U+FFFD for what is
not. That is what the `tokenizers` library computes, with one exception. Where byte-fallback tokens
do not form UTF-8, it replaces every byte of the whole run of byte tokens; here the valid
characters among them stay. So text never changes when more tokens follow, and a stream of pieces
(`onestem.engine.text.detokenize`) is the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from onestem.engine.text.backend import Backend
from onestem.engine.text.decoders import BYTE_LEVEL, BYTE_TOKEN, settled
from onestem.errors import UnsupportedError


class Vocabulary:
    """The tokens of a tokenizer.

    Args:
        backend: reads and decodes control tokens as what they are.
        special_ids: ids of control tokens, those that `skip_special_tokens` leaves out.

    Raises:
        UnsupportedError: it decodes in a way that cannot be streamed (a token's text would depend
            on the tokens after it).
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        self._control, self.special_ids = backend, special_ids
        self._decoders = settled(backend.library)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the vocabulary does not have give nothing."""
        ids = [token for token in token_ids if 0 <= token < self.vocab_size]
        text = self._control.decode(ids, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and "ByteFallback" in self._decoders:
            return self.decode_bytes(ids, skip_special_tokens).decode("utf-8", "replace")
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a token alone, a control token's by its name: `decode` of this one id."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def decode_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes that the ids of a text stand for."""
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
