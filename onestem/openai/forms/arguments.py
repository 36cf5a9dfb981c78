"""Reads a call's arguments as they come, in each syntax, and gives them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Protocol

from onestem.openai.forms.form import Braces, Fields

LONGEST_KEY = 1000  # characters


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def take(self, text: str, final: bool) -> tuple[str, str, bool]:
        """Take what is new, after what the last call left.

        Args:
            final: nothing comes after it.

        Returns:
            JSON that is certain now, the text that is left, and whether the arguments have ended.
        """
        ...


def arguments_reader(syntax: Fields | Braces | None, texts: Collection[str]) -> ArgumentsReader:
    """A reader of a syntax; `texts` are the parameters that are texts and nothing else."""
    if syntax is None:
        return _Json()
    return _Fields(syntax, texts) if isinstance(syntax, Fields) else _Braces(syntax)


def held_back(text: str, mark: str) -> int:
    """Number of characters at a text's end that may begin a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class _Json:
    """JSON, which is handed on as it is."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun = self._in_string = self._escaped = False

    def take(self, text: str, final: bool) -> tuple[str, str, bool]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        end = self._end(text)
        return (text, "", False) if end is None else (text[:end], text[end:], True)

    def _end(self, text: str) -> int | None:
        """Where the value ends in the text; None: not in it."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + (self._depth == 0)
        return None


def _inside(text: str) -> str:
    """A text as it stands between a JSON text's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _loose(text: str) -> str:
    """A pattern for a text with any blanks in place of its own."""
    return r"\s*".join(map(re.escape, text.split()))


class _Fields:
    """Fields one after the other. Texts come as they are read, other values whole."""

    def __init__(self, syntax: Fields, texts: Collection[str]) -> None:
        self._syntax, self._texts = syntax, texts
        self._before = syntax.before_key.strip()
        self._key = re.compile(
            re.escape(self._before) + r"(.*?)" + _loose(syntax.before_value), re.DOTALL
        )
        self._after = syntax.after_value.strip()
        self._after_text = ("\n" if syntax.trims else "") + self._after
        self._out = ""
        self._begun = False
        self._is_text: bool | None = None  # of the value that is being read; None: of none
        self._is_fresh = False  # nothing of it was read

    def take(self, text: str, final: bool) -> tuple[str, str, bool]:
        goes_on, ended = True, False
        while goes_on:
            if self._is_text is None:
                text, goes_on, ended = self._field(text, final)
            elif self._is_text:
                text, goes_on = self._some_text(text, final)
            else:
                text, goes_on = self._value(text)
        if ended:
            self._out += "}" if self._begun else "{}"
        out, self._out = self._out, ""
        return out, text, ended

    def _field(self, text: str, final: bool) -> tuple[str, bool, bool]:
        """Read a field's key; the text after it, whether to read on, and whether there is no
        further field."""
        begun = text.lstrip()
        if not begun or (self._before.startswith(begun) and not final):
            return text, False, False
        found = self._key.match(begun)
        if found is None:
            may_be = begun.startswith(self._before) and not final and len(begun) < LONGEST_KEY
            return text, False, not may_be
        key = found[1].strip()
        self._out += f"{', ' if self._begun else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._begun, self._is_fresh = True, True
        self._is_text = key in self._texts
        self._out += '"' * self._is_text
        return begun[found.end() :], True, False

    def _some_text(self, text: str, final: bool) -> tuple[str, bool]:
        if self._is_fresh and text:
            text = text.removeprefix("\n") if self._syntax.trims else text
            self._is_fresh = False
        at = text.find(self._after)
        if at >= 0:
            value = text[:at].removesuffix("\n") if self._syntax.trims else text[:at]
            self._out += _inside(value) + '"'
            self._is_text = None
            return text[at + len(self._after) :], True
        kept = 0 if final else max(held_back(text, self._after_text), held_back(text, self._after))
        end = len(text) - kept
        self._out += _inside(text[:end])
        return text[end:], False

    def _value(self, text: str) -> tuple[str, bool]:
        at = text.find(self._after)
        if at < 0:
            return text, False
        value = text[:at]
        if self._syntax.trims:
            value = value.removeprefix("\n").removesuffix("\n")
        self._out += _as_json(value)
        self._is_text = None
        return text[at + len(self._after) :], True


def _as_json(value: str) -> str:
    """A value as JSON: itself, if it is some, else a text."""
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def _refuse(name: str) -> object:
    raise ValueError(name)


class _Braces:
    """Values between braces."""

    def __init__(self, syntax: Braces) -> None:
        self._quote = syntax.quote
        quote = re.escape(syntax.quote)
        self._bare = re.compile(rf"(?:(?!{quote})[^,:{{}}\[\]\s])+")
        self._open: list[str] = []
        self._in_text = self._at_key = False

    def take(self, text: str, final: bool) -> tuple[str, str, bool]:
        out = ""
        while text:
            if self._in_text:
                at = text.find(self._quote)
                kept = 0 if final or at >= 0 else held_back(text, self._quote)
                end = at if at >= 0 else len(text) - kept
                out += _inside(text[:end])
                text = text[end:]
                if at < 0:
                    break
                out, text, self._in_text = out + '"', text[len(self._quote) :], False
            elif text.startswith(self._quote):
                out, text, self._in_text = out + '"', text[len(self._quote) :], True
            elif self._quote.startswith(text) and not final:
                break
            elif text[0] in ",:{}[]" or text[0].isspace():
                out += self._sign(text[0])
                text = text[1:]
                if not self._open:
                    return out, text, True
            else:
                found = self._bare.match(text)
                assert found is not None
                is_whole = found.end() < len(text) or final
                if not is_whole or (self._quote.startswith(text[found.end() :]) and not final):
                    break
                word = found.group()
                out += json.dumps(word, ensure_ascii=False) if self._at_key else _as_json(word)
                text = text[found.end() :]
        return out, text, False

    def _sign(self, sign: str) -> str:
        """Note a sign; what stands for it."""
        if sign in "{[":
            self._open.append(sign)
            self._at_key = sign == "{"
        elif sign in "}]":
            self._open.pop()
            self._at_key = False
        elif sign == ",":
            self._at_key = self._open[-1:] == ["{"]
            return ", "
        elif sign == ":":
            self._at_key = False
            return ": "
        return "" if sign.isspace() else sign
