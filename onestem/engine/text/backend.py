"""The tokenizers library, whose errors are those of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onestem.engine.text.limits import MOST_CHARACTERS
from onestem.errors import RequestError, first_line
from onestem.native import is_panic, native

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Backend:
    """A tokenizer of the library, without truncation and padding: a directory may carry these from
    training, and a prompt is never cut.

    Attributes:
        library: what is wrapped, for what cannot fail by a text or by ids.
    """

    def __init__(self, library: Tokenizer) -> None:
        self.library = library
        library.no_truncation()
        library.no_padding()

    def copy(self) -> Backend:
        """A copy that takes names of control tokens for characters."""
        from tokenizers import Tokenizer

        copied = Backend(Tokenizer.from_str(self.library.to_str()))
        copied.library.encode_special_tokens = True
        return copied

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text.

        Raises:
            RequestError: it has half of a surrogate pair, is too long, or the library fails on it.
        """
        _check_length(text)
        with native(_refused(text), RequestError):
            try:
                ids: list[int] = self.library.encode(
                    text, add_special_tokens=add_special_tokens
                ).ids
            except Exception as error:
                raise _own_error(text, error) from error
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores and without Python's lock."""
        for text in texts:
            _check_length(text)
        try:
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return [self.encode(text) for text in texts]  # whose it is
        return [encoding.ids for encoding in encoded]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids of the vocabulary."""
        try:  # first, as all tokens of a vocabulary are decoded for a grammar
            text: str = self.library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException:
            with native(f"{len(token_ids)} tokens cannot be turned into text", RequestError):
                raise
        return text


def _refused(text: str) -> str:
    return f"a text of {len(text)} characters cannot be tokenised"


def _check_length(text: str) -> None:
    """The one limit of all texts, whoever sends them and whatever the model takes."""
    if len(text) > MOST_CHARACTERS:
        raise RequestError(
            f"a text has {len(text)} characters, limit is {MOST_CHARACTERS}: shorten it"
        )


def _own_error(text: str, error: Exception) -> RequestError:
    """The library raises a bare TypeError for text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        found = f"{text[half.start]!r} at character {half.start}"
        return RequestError(
            f"a text has {found}, which is half a character: give both surrogates, or none"
        )
    return RequestError(f"{_refused(text)}: {first_line(error)}")
