"""Requests that must be refused, each with the statuses that say so."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from onestem.server.objects.tenants import OPERATOR
from onestem_lab.serve.hostile_hand import Hand
from onestem_lab.serve.hostile_pool import CHATS, COMPLETIONS
from onestem_lab.serve.hostile_wire import head_of, post

__all__ = ["MARKUPS", "MESSAGES", "REFUSED", "TEXT", "UNKNOWN", "WRONG"]

Json = dict[str, Any]

TEXT = {"prompt": "the old mill"}
CHAT = [{"role": "user", "content": "the old mill"}]
NEVER = {"type": "object", "not": {}}

WRONG: list[Json] = [
    *({"max_tokens": value} for value in ("8", 0, -1, 1.5, True, [])),
    *({"temperature": value} for value in ("hot", -1, 101, {}, 1e308)),
    *({"n": value} for value in (0, -1, 4097, True, "2", 10**30)),
    *({"stop": value} for value in (5, [1], [""], "", ["a"] * 65, {"a": "b"})),
    *({"seed": value} for value in (2**64, -(2**63) - 1, 0.5, "x")),
    *({"choices": value} for value in ([], ["a", "a"], [1], "a", ["a"] * 1025, [""])),
    *({"logprobs": value} for value in (101, -1, True, "all")),
    *({"prompt_logprobs": value} for value in (101, -1, 0.5)),
    *({"top_p": value} for value in (0, 1.1, "all")),
    *({"top_k": value} for value in (-2, 1.5, "all")),
    *({"min_p": value} for value in (2, -0.1, [])),
    *({"repetition_penalty": value} for value in (0, 101, "no")),
    *({"presence_penalty": value} for value in (2.1, -2.1, [])),
    *({"logit_bias": value} for value in ([1], {"x": 1}, {"1": 1000}, {"99999": 1}, {"-1": 1})),
    *({"stop_token_ids": value} for value in ([2560], ["a"], 5, [-1], [2**40], [True])),
    *({"min_tokens": value} for value in (17, -1, "x")),
    *({"stream": value} for value in ("yes", 1, [])),
    *({"timeout": value} for value in (0, "1", 10**9, -1, True)),
    *({"cache_salt": value} for value in ("", 7, "x" * 257, ["a"])),
    *({"prefix": value} for value in ("", 7, ["app"])),
    *({"metadata": value} for value in ([], "x", 1)),
    *({"prompt": value} for value in ({}, [], [1, "a"], [[]], [-1], [2560], [10**12], 5, [[1], 1])),
    *({"prompt": value} for value in ([[[1]]], [None], [1.5], None, True, [["a"]])),
    *({"response_format": value} for value in ({"type": "xml"}, {"type": "json_schema"}, "json")),
    *({"model": value} for value in (5, ["embedded"], {})),
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NEVER}}},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "yes"}},
    {"stream": True, "stream_options": {"other": True}},
    {"stream": True, "prompt_logprobs": 1},
    {"isolation": "anchored"},
    {"prompt": ["a"] * 257},
    {"prompt": ["a"] * 200, "n": 21},
    {"prompt": "corn " * 30000},
    {"prompt": [9] * 1025},
]
UNKNOWN: list[Json] = [
    {"foo": 1},
    {"tools": [{"type": "function"}]},
    {"best_of": 3},
    {"suffix": "x"},
    {"messages": CHAT},
    {"Prompt": "x"},
    {"max_token": 5},
    {"": 0},
    {"a" * 5000: 0},
]
MESSAGES: list[Any] = [
    [],
    {},
    "hello",
    [{}],
    [{"role": "user"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "x", "tone": "y"}],
    [{"role": "user", "content": "x"}] * 4097,
    [{"role": "user", "content": "corn " * 30000}],
    [None],
]
MARKUPS = [
    "<prompt",
    "<prompt schema='app'><no/></prompt>",
    "<prompt schema='app'><mill",
    "<prompt schema='app'><bridge/><tower/>x</prompt>",
    "<prompt schema='app'><mill size='3'/>x</prompt>",
    "<prompt schema='app'>" + "<mill/>" * 5000 + "</prompt>",
    "<!DOCTYPE a [<!ENTITY b '&c;'>]><prompt schema='app'>&b;</prompt>",
    f"<!DOCTYPE a [<!ENTITY b '{'c' * 5000}'>]><prompt schema='app'>{'&b;' * 5000}</prompt>",
    "no markup",
    "",
    "<schema name='app'/>",
    "/etc/passwd",
]
NOT_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"prompt"',
    b"{'prompt': 'x'}",
    b'{"prompt": "x",}',
    b'{"prompt": "x"} {"prompt": "y"}',
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x\n"}',
    b"\xef\xbb\xbf\xef\xbb\xbf{}",
]
NOT_UTF8 = [b'{"prompt": "\xff"}', b'{"prompt": "\xc3"}', "{}".encode("utf-16"), b"\x80" * 99]


def _wrong_types(hand: Hand) -> bytes:
    return post(COMPLETIONS, hand.secret, {**TEXT, **hand.rng.choice(WRONG)})


def _unknown_fields(hand: Hand) -> bytes:
    return post(COMPLETIONS, hand.secret, {**TEXT, **hand.rng.choice(UNKNOWN)})


def _wrong_messages(hand: Hand) -> bytes:
    return post(CHATS, hand.secret, {"messages": hand.rng.choice(MESSAGES)})


def _wrong_markup(hand: Hand) -> bytes:
    return post(COMPLETIONS, hand.secret, {"pml": hand.rng.choice(MARKUPS)})


def _cut_json(hand: Hand) -> bytes:
    """A good body that breaks off."""
    case = hand.case()
    raw = json.dumps(case.body).encode()
    return post(case.path, hand.secret, raw[: hand.rng.randrange(len(raw))])


def _not_json(hand: Hand) -> bytes:
    return post(hand.rng.choice([COMPLETIONS, CHATS]), hand.secret, hand.rng.choice(NOT_JSON))


def _not_utf8(hand: Hand) -> bytes:
    return post(COMPLETIONS, hand.secret, hand.rng.choice(NOT_UTF8))


def _deep(hand: Hand) -> bytes:
    depth = hand.rng.choice([64, 65, 500, 5000, 100_000])
    opened, closed = hand.rng.choice([(b'{"a":', b"}"), (b"[", b"]")])
    value = opened * depth + b"1" + closed * depth
    name = hand.rng.choice([b"metadata", b"logit_bias", b"response_format", b"prompt"])
    return post(COMPLETIONS, hand.secret, b'{"' + name + b'": ' + value + b"}")


def _huge(hand: Hand) -> bytes:
    most = hand.site.max_body
    return post(COMPLETIONS, hand.secret, {"prompt": "x" * (most + hand.rng.randrange(1, most))})


def _declared_huge(hand: Hand) -> bytes:
    """It says so, and does not come."""
    return post(COMPLETIONS, hand.secret, TEXT, content_length=str(10**15))


def _media_type(hand: Hand) -> bytes:
    names = [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"]
    return post(COMPLETIONS, hand.secret, TEXT, content_type=hand.rng.choice(names))


def _host(hand: Hand) -> bytes:
    names = ["evil.example", "127.0.0.1.evil.example", "", "[::", "localhost@evil", "10.0.0.1:80"]
    return post(COMPLETIONS, hand.secret, TEXT, host=hand.rng.choice(names))


def _origin(hand: Hand) -> bytes:
    names = ["https://evil.example", "null", "http://127.0.0.1:1", "file://"]
    return post(COMPLETIONS, hand.secret, TEXT, origin=hand.rng.choice(names))


def _key(hand: Hand) -> bytes:
    keys = [None, "", "Bearer", "Bearer nobody", f"Basic {hand.secret}", f"Bearer {hand.secret}x"]
    return post(COMPLETIONS, hand.secret, TEXT, authorization=hand.rng.choice(keys))


OPERATORS = ["/metrics", "/internal/state", "/internal/events", "/"]


def _operators_without_key(hand: Hand) -> bytes:
    return _bare(hand, "GET", hand.rng.choice(OPERATORS), "Bearer key-of-nobody-0")


def _operators_with_key(hand: Hand) -> bytes:
    key = next(key for name, key in hand.site.keys.items() if name != OPERATOR)
    return _bare(hand, "GET", hand.rng.choice(OPERATORS), f"Bearer {key}")


def _not_found(hand: Hand) -> bytes:
    paths = ["/v1", "/v1/engines", "/v1/prefixes/none", "/v1/schemas/none", "/v1/files/none"]
    paths += ["/v1/batches/none", "/..%2f..%2fetc/passwd", "/v1/models/gpt", "/%00", "//", "/v2"]
    paths += ["/v1/files/..%2f..%2fserver.db/content", "/v1/completions/" + "a" * 3000]
    return _bare(hand, "GET", hand.rng.choice(paths))


def _unknown_names(hand: Hand) -> bytes:
    pml = '<prompt schema="none">x</prompt>'
    body = hand.rng.choice([{**TEXT, "model": "gpt"}, {**TEXT, "prefix": "none"}, {"pml": pml}])
    return post(COMPLETIONS, hand.secret, body)


def _method(hand: Hand) -> bytes:
    method = hand.rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
    return _bare(hand, method, hand.rng.choice([COMPLETIONS, CHATS]))


def _query(hand: Hand) -> bytes:
    queries = ["limit=0", "limit=x", "foo=1", "limit=1&limit=2", "order=up", "after=none"]
    return _bare(hand, "GET", f"/v1/files?{hand.rng.choice(queries)}")


def _no_http(hand: Hand) -> bytes:
    return hand.rng.choice([_garbage, _smuggled, _endless_header])(hand.rng, hand.secret)


def _garbage(rng: random.Random, key: str) -> bytes:
    return rng.randbytes(rng.randint(1, 300)).replace(b"\n", b"x") + b"\r\n\r\n"


def _smuggled(rng: random.Random, key: str) -> bytes:
    """Two lengths of one body."""
    raw = post(COMPLETIONS, key, TEXT, transfer_encoding="chunked")
    other = post(COMPLETIONS, key, TEXT)
    return raw.replace(b"transfer-encoding: chunked", b"content-length: 5") + other


def _endless_header(rng: random.Random, key: str) -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * rng.choice([70_000, 300_000])


def _bare(hand: Hand, method: str, path: str, authorization: str = "") -> bytes:
    """Without a body."""
    authorization = authorization or f"Bearer {hand.secret}"
    headers = {"host": "localhost", "authorization": authorization, "connection": "close"}
    return head_of(method, path, headers)


# Kind -> the statuses that are right, and what makes the request.
REFUSED: Mapping[str, tuple[tuple[int, ...], Callable[[Hand], bytes]]] = {
    "wrong types": ((400,), _wrong_types),
    "unknown fields": ((400,), _unknown_fields),
    "wrong messages": ((400,), _wrong_messages),
    "wrong markup": ((400,), _wrong_markup),
    "cut JSON": ((400,), _cut_json),
    "not JSON": ((400,), _not_json),
    "not UTF-8": ((400,), _not_utf8),
    "deep": ((400,), _deep),
    "huge": ((413,), _huge),
    "declared huge": ((413,), _declared_huge),
    "media type": ((415,), _media_type),
    "host": ((403,), _host),
    "origin": ((403,), _origin),
    "key": ((401,), _key),
    "operator's, no key": ((401,), _operators_without_key),
    "operator's, other key": ((403,), _operators_with_key),
    "not found": ((404,), _not_found),
    "unknown names": ((404,), _unknown_names),
    "method": ((405,), _method),
    "query": ((400,), _query),
    "no HTTP": ((400, 431), _no_http),
}
