"""Texts and bodies that are made to take long, for every door that takes one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from onestem_lab.serve.hostile_hand import dumped
from onestem_lab.serve.hostile_pool import CHATS, COMPLETIONS, SCHEMAS

__all__ = ["BOMBS", "DOORS", "RUNS", "bomb", "long_text", "run_of"]

Json = dict[str, Any]

# What Qwen's and Llama 3's patterns look ahead in, and what they take in one piece.
RUNS = [" ", "\t", "\u3000", "\n", "a", "é", "!", "1", "\r\n", " \n", "a\u0301"]
RUN_LENGTH = 11_000_000  # of a regular expression's steps, ten millions are the usual limit
BYTES_OF_BODY, BYTES_OF_LINE = 900_000, 16_000_000  # below the server's limits


def run_of(piece: str, rng: random.Random) -> str:
    """Millions of it, as many as a line may have, and something behind."""
    most = BYTES_OF_LINE // (len(dumped({"": piece})) - len(dumped({"": ""})))
    return piece * min(RUN_LENGTH // len(piece), most) + rng.choice(["", "x", "\n", "."])


# ----------------------------------------------------------------------------- long texts


def long_text(rng: random.Random, most_bytes: int = BYTES_OF_BODY) -> str:
    """A text of one piece, about as long as a body may be or as long as a prompt may be."""
    piece = rng.choice(RUNS)
    size = rng.choice([most_bytes, most_bytes // 8, 60_000, 20_000])
    return "x" + piece * (size // (len(dumped({"": piece})) - len(dumped({"": ""}))))


def _completion(content: str) -> Json:
    return {"prompt": content, "max_tokens": 2}


def _completions(content: str) -> Json:
    return {"prompt": [content[::2], "x", content[::2]], "max_tokens": 2}


def _chat(content: str) -> Json:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def _chat_of_parts(content: str) -> Json:
    parts = [{"type": "text", "text": content[i : i + 500]} for i in range(0, len(content), 500)]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}


def _score(content: str) -> Json:
    return {"prompt": content, "completions": ["yes", content[:10_000]]}


def _stops(content: str) -> Json:
    return {"prompt": "x", "stop": [content[:20_000]] * 3, "max_tokens": 20}


def _choices(content: str) -> Json:
    return {"prompt": "x", "choices": [f"{i}{content[:1000]}" for i in range(100)]}


def _bad_words(content: str) -> Json:
    return {"prompt": "x", "bad_words": [f"{i}{content[:900]}" for i in range(100)]}


def _echo(content: str) -> Json:
    return {"prompt": content, "echo": True, "logprobs": 100, "max_tokens": 0}


def _pml(content: str) -> Json:
    return {"pml": f'<prompt schema="app"><market/>{content}</prompt>', "max_tokens": 2}


def _schema(content: str) -> Json:
    return {"pml": SCHEMAS["own"].replace("The market opens", content).replace('"own"', '"long"')}


def _regex(content: str) -> Json:
    return {"prompt": "x", "response_format": {"type": "regex", "regex": content[:20_000]}}


def _tokens(content: str) -> Json:
    return {"tokens": [9] * (len(content) // 3)}


# Path -> what makes its body of a text; with PUT where the path has a name.
DOORS: list[tuple[str, Callable[[str], Json]]] = [
    *((COMPLETIONS, make) for make in (_completion, _completions, _stops, _choices, _bad_words)),
    *((COMPLETIONS, make) for make in (_echo, _pml, _regex)),
    *((CHATS, make) for make in (_chat, _chat_of_parts)),
    ("/v1/score", _score),
    ("/tokenize", lambda content: {"prompt": content}),
    ("/detokenize", _tokens),
    ("/v1/prefixes/long", lambda content: {"text": content}),
    ("/v1/schemas/long", _schema),
]


# ----------------------------------------------------------------------------- bombs


def _many(piece: bytes, between: bytes = b",") -> bytes:
    return between.join([piece] * (BYTES_OF_BODY // (len(piece) + len(between)) - 20))


def _keys(most: int) -> bytes:
    return b",".join(b'"%d":1' % i for i in range(most))


BOMBS: Mapping[str, Callable[[], bytes]] = {
    "empty lists": lambda: b'{"prompt": "x", "metadata": {"a": [' + _many(b"[]") + b"]}}",
    "empty objects": lambda: b'{"prompt": "x", "metadata": {"a": [' + _many(b"{}") + b"]}}",
    "keys": lambda: b'{"prompt": "x", "logit_bias": {' + _keys(70_000) + b"}}",
    "unknown keys": lambda: b'{"prompt": "x", ' + _keys(70_000) + b"}",
    "escapes": lambda: b'{"prompt": "' + _many(b"\\u00e9", b"") + b'"}',
    "surrogates": lambda: b'{"prompt": "' + _many(b"\\ud83d\\ude42", b"") + b'"}',
    "long number": lambda: b'{"prompt": "x", "seed": ' + b"9" * BYTES_OF_BODY + b"}",
    "long fraction": lambda: b'{"prompt": "x", "top_p": 0.' + b"9" * BYTES_OF_BODY + b"}",
    "numbers": lambda: b'{"prompt": [' + _many(b"1e99") + b"]}",
    "ids": lambda: b'{"prompt": [' + _many(b"9") + b"]}",
    "lists of ids": lambda: b'{"prompt": [' + _many(b"[9]") + b"]}",
    "texts": lambda: b'{"prompt": [' + _many(b'""') + b"]}",
    "messages": lambda: b'{"messages": [' + _many(b'{"role":"user","content":""}') + b"]}",
    "blanks": lambda: b'{"prompt": "x"' + b" " * BYTES_OF_BODY + b"}",
    "levels": lambda: b'{"prompt": "x", "metadata": ' + b"[" * BYTES_OF_BODY,
    "doubled keys": lambda: b'{"prompt": "x", ' + _many(b'"n":1') + b"}",
}


def bomb(rng: random.Random) -> tuple[str, str, bytes]:
    """Its kind, path and body."""
    kind = rng.choice(list(BOMBS))
    return kind, CHATS if kind == "messages" else COMPLETIONS, BOMBS[kind]()
