"""Nothing of a stream may be missing, doubled or out of order without being told."""

from __future__ import annotations

import json
import random

import pytest

from lab.tests.load.fake_server import events_of
from onestem_lab.load.stream import Answer, Events

TOKENS = 6


def answered(events: list[bytes], expected_ids=tuple(range(TOKENS)), output_tokens=TOKENS):
    answer = Answer(output_tokens, expected_ids)
    for now, event in enumerate(events):
        answer.feed(event, float(now))
    answer.end()
    return answer


def events() -> list[bytes]:
    return events_of(0, {"max_tokens": TOKENS, "prompt": [1, 2, 3, 4]})


def changed(event: bytes, **choice: object) -> bytes:
    chunk = json.loads(event.removeprefix(b"data: "))
    chunk["choices"][0] |= choice
    return b"data: %s\n\n" % json.dumps(chunk).encode()


def test_a_whole_stream_has_no_fault():
    answer = answered(events())
    assert answer.faults == []
    assert answer.token_ids == list(range(TOKENS))
    assert "".join(answer.text) == " 0 1 2 3 4 5"
    assert answer.token_times == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (answer.output_tokens, answer.cached_tokens) == (TOKENS, 2)
    assert answer.finish_reason == "length"


def test_bytes_may_be_cut_anywhere():
    whole = b": hello\n\n" + b"".join(events()).replace(b"\n", b"\r\n")
    for seed in range(50):
        rng = random.Random(seed)
        cuts = sorted(rng.choices(range(len(whole)), k=20))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
        assert answered(pieces).faults == []


def test_data_of_several_lines_is_one_event():
    assert Events().feed(b"event: state\ndata: {\ndata: }\nid: 3\n\n") == [b"{\n}"]


SPOILT = {
    "missing chunk": (lambda e: e[:2] + e[3:], "5 tokens streamed, 6 counted"),
    "doubled chunk": (lambda e: [*e[:3], *e[2:]], "7 tokens streamed, 6 counted"),
    "out of order": (lambda e: [e[0], e[2], e[1], *e[3:]], "text offset 2 after 4"),
    "last first": (lambda e: [e[5], *e[:5], *e[6:]], "after the finish_reason"),
    "no end": (lambda e: e[:-1], "without [DONE]"),
    "torn event": (lambda e: [*e[:4], e[4][:30]], "within an event"),
    "after the end": (lambda e: [*e, e[3]], "after [DONE]"),
    "no JSON": (lambda e: [e[0], b"data: {oops\n\n", *e[1:]], "no JSON"),
    "error": (
        lambda e: [*e[:3], b'data: {"error": {"message": "engine died"}}\n\n'],
        "engine died",
    ),
    "no finish": (
        lambda e: [*e[:5], changed(e[5], finish_reason=None), *e[6:]],
        "no finish_reason",
    ),
    "foreign choice": (lambda e: [e[0], changed(e[1], index=1), *e[2:]], "choice 1"),
    "foreign id": (lambda e: [e[0], e[1].replace(b"cmpl-0", b"cmpl-9"), *e[2:]], "another id"),
    "too short": (
        lambda e: events_of(0, {"max_tokens": 5, "prompt": []}),
        "5 tokens answered, 6 asked",
    ),
    "other token": (lambda e: [*e[:4], changed(e[4], token_ids=[99]), *e[5:]], "differ at 4"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_stream_is_told(name):
    spoil, says = SPOILT[name]
    answer = answered(spoil(events()))
    assert any(says in fault for fault in answer.faults), answer.faults


def test_servers_that_count_nothing_are_not_blamed_for_it():
    bare = [
        b"data: "
        + json.dumps({"choices": [{"text": text, "finish_reason": end}]}).encode()
        + b"\n\n"
        for text, end in (("a", None), ("b", "stop"))
    ]
    answer = answered([*bare, b"data: [DONE]\n\n"], expected_ids=None)
    assert answer.faults == []
    assert answer.output_tokens == 2


def test_chat_chunks():
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "Hi"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    stream = [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    answer = answered([*stream, b"data: [DONE]\n\n"], expected_ids=None, output_tokens=None)
    assert answer.faults == []
    # The role alone is no token.
    assert answer.token_times == [1.0]
