"""Token ids to text, one at a time: UTF-8 across tokens, and stop strings.

A token gives bytes (`Tokenizer.token_bytes`); an incremental UTF-8 decoder turns them into text and
keeps an unfinished character back. What it gives out is final, so the pieces of a sequence are
together `Tokenizer.decode` of its ids, and each token costs the same however long the text is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from onestem.engine.text.tokenizer import Tokenizer
from onestem.request import SamplingParams
from onestem.utf8 import decoded, last_bytes


class IncrementalDetokenizer:
    """The text of one sequence as it grows.

    A stop string is found wherever it lies in the text, across tokens too. The one that is
    complete first wins, whatever the tokens' borders; of those complete at the same character, the
    longest. Text that a stop string may have begun in is held back until that is decided. A name of
    a control token in a stop string is also found where the text leaves this token out.

    Args:
        tokenizer: gives tokens their bytes.
        params: `stop`, `include_stop_str_in_output` and `skip_special_tokens` are used.
        prompt_token_ids: if given, the text goes on from the prompt's: a SentencePiece tokenizer's
            leading space stays, a character that the prompt begins is completed. Without, the text
            is that of the sampled ids alone, as `Tokenizer.decode` gives it.

    Attributes:
        stop_reason: the stop string that ended the text; None as long as there is none. Then
            `append` must not be called again, and `finish` gives nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        params = params or SamplingParams()
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._unfinished = b""  # the beginning of a character
        self._at_start = True
        self._marked: set[int] = set()  # tokens that the text leaves out, and a stop string names
        self._stops = _StopStrings(params, self._with_marks)
        self._checks = True
        self.stop_reason: str | None = None
        self._read_prompt(prompt_token_ids)

    def append(self, token_id: int, *, check_stop: bool = True) -> str:
        """Take one token. Returns the text that is final now.

        Args:
            token_id: sampled id.
            check_stop: False before `min_tokens`: a stop string that ends in this token's text
                does not count (one that ends in a later token's does).
        """
        assert self.stop_reason is None, "text after a stop string"
        self._checks = check_stop
        text, self._unfinished = decoded(self._unfinished, self._bytes(token_id))
        if token_id in self._marked:
            text += _mark(token_id)
        return self._release(text) if self._stops.any else text

    def finish(self) -> str:
        """The rest of the text: an unfinished character as U+FFFD, and what was held back.

        A stop string may still be completed by it, so read `stop_reason` afterwards.
        """
        if self.stop_reason is not None:
            return ""
        text, self._unfinished = decoded(self._unfinished, b"", final=True)
        released = self._release(text)
        return released if self.stop_reason is not None else released + self._stops.rest()

    def _with_marks(self, stop: str) -> str:
        """A stop string with marks for the control tokens that it names."""
        return self._tokenizer.with_control(stop, self._mark) if self._skipped else stop

    def _mark(self, token_id: int) -> str:
        self._marked.add(token_id)
        return _mark(token_id)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        later = self._tokenizer.token_bytes(token_id)
        if not self._at_start or not later:
            return later
        self._at_start = False
        return self._tokenizer.first_token_bytes(token_id)

    def _release(self, text: str) -> str:
        released, self.stop_reason = self._stops.take(text, counts=self._checks)
        return released

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Bring the decoder to where the prompt's last characters leave it."""
        data = last_bytes(
            b"" if token in self._skipped else self._tokenizer.token_bytes(token)
            for token in reversed(prompt_token_ids)
        )
        self._at_start = not data
        _, self._unfinished = decoded(b"", data)


# Half characters: no text has one.
_MARKS = re.compile("[\ud800-\udfff]")


def _mark(token_id: int) -> str:
    """Two of them, which stand for a token that is left out of the text."""
    return chr(0xD800 + (token_id >> 10)) + chr(0xDC00 + (token_id & 0x3FF))


class _StopStrings:
    """Looks for stop strings in a growing text, and holds back where one may have begun.

    Args:
        with_marks: a stop string as it is spelled where the text has marks, which are not given
            out.
    """

    def __init__(self, params: SamplingParams, with_marks: Callable[[str], str]) -> None:
        assert isinstance(params.stop, tuple)
        # What is looked for, and the stop string that it is. Forms with marks are looked for in the
        # text with marks, others in the text that readers get.
        self._stops = {form: stop for stop in params.stop for form in (with_marks(stop), stop)}
        self._marked = any(form != stop for form, stop in self._stops.items())
        self._included = params.include_stop_str_in_output
        self._longest = max(map(len, self._stops), default=0)
        self.any = bool(self._stops)
        self._held = ""

    def take(self, text: str, *, counts: bool) -> tuple[str, str | None]:
        """Text to give out now, and the stop string that ended it, if one did.

        With `counts` False no stop string may end within `text`, which is a mark or has none.
        """
        if not self._stops:
            return text, None
        self._held += text
        if counts and text:
            found = self._first(text)
            if found is not None:
                before, stop = found
                return before + stop * self._included, stop
        kept = len(self._held) - self._beginning()
        released, self._held = self._held[:kept], self._held[kept:]
        if self._marked:  # no form begins at those further back
            far = max(0, len(self._held) - self._longest)
            self._held = self._shown(self._held[:far]) + self._held[far:]
        return self._shown(released), None

    def rest(self) -> str:
        rest, self._held = self._held, ""
        return self._shown(rest)

    def _shown(self, text: str) -> str:
        """The text without marks."""
        return _MARKS.sub("", text) if self._marked else text

    def _first(self, added: str) -> tuple[str, str] | None:
        """The stop string that ends first in what was added, and the text before it."""
        shown, new = self._shown(self._held), self._shown(added)
        best: tuple[tuple[int, int], str, str] | None = None
        for form, stop in self._stops.items():
            text, last = (shown, new) if form == stop else (self._held, added)
            start = text.find(form, max(0, len(text) - len(last) - len(form) + 1))
            if start < 0:
                continue
            rank = len(text) - start - len(form), len(stop)
            if best is None or rank > best[0]:
                best = rank, text[:start], stop
        return None if best is None else (self._shown(best[1]), best[2])

    def _beginning(self) -> int:
        """How many last characters of what is held may be a stop string's beginning."""
        most = len(self._held) if self._marked else min(self._longest - 1, len(self._held))
        for size in range(most, 0, -1):
            end = self._held[-size:]
            shown = self._shown(end)
            for form, stop in self._stops.items():
                seen = shown if form == stop else end
                if seen and len(form) > len(seen) and form.startswith(seen):
                    return size
        return 0
