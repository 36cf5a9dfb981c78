"""A token's event, written in one go, is the one that is written from its parts."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.openai.echo import echoed, form_of_echo
from onestem.openai.write import Chunks, ResponseFormat, answer_body
from onestem.request import CompletionOutput, RequestOutput

TEXTS = ("a", "", '"\\', "\u00e9\u2028\n", "\0", " </think>", "\U0001f600")


@pytest.mark.parametrize(
    ("kind", "ids", "usage"),
    [*itertools.product(("chat", "completion"), (False, True), (False, True))],
)
def test_a_token_is_written_as_its_piece(kind, ids, usage):
    form = ResponseFormat(
        kind=kind, model='m"\\u0000\0', logprobs=None, return_token_ids=ids, token_bytes=None
    )
    one, other = (
        Chunks("id", 7, form, prompts=[[5, 6]], n=1, include_usage=usage) for _ in range(2)
    )
    for chunks in (one, other):
        chunks.events({(0, 0): CompletionOutput(index=0, text="first", token_ids=[1])})
    for token, text in enumerate(TEXTS):
        piece = CompletionOutput(index=0, text=text, token_ids=[token])
        assert one.token(token, text) == other.events({(0, 0): piece})


def test_a_prompt_is_read_only_where_offsets_are_asked_for():
    class Unread(list):
        def __reversed__(self):
            raise AssertionError("nobody has asked where tokens begin")

    form = ResponseFormat(
        kind="completion", model="m", logprobs=None, return_token_ids=False, token_bytes=None
    )
    answer = CompletionOutput(index=0, text="a", token_ids=[1])
    output = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=Unread([5, 6]),
        outputs=[answer],
        finished=True,
    )
    (choice,) = answer_body("r", output, form)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a", None)


@pytest.mark.parametrize(
    ("spelled", "offsets"),
    [
        ([b"a", b"\xc3", b"\xa6", b"b"], [0, 1, 1, 2]),
        ([b"\xf0\x9f", b"\x98", b"\x80x", b"y"], [0, 0, 0, 2]),
        ([b"\xc3", b"a", b"b"], [0, 1, 2]),  # a character that is never finished is U+FFFD
        ([b"\xe2\x82", b"\xc3", b"\xa6"], [0, 1, 1]),
        ([b"\x80", b"", b"a"], [0, 1, 1]),
        ([b"\xc3\xa6\xc3", b"\xa6b", b"c"], [0, 1, 3]),
    ],
)
def test_offsets_count_characters_of_the_text(spelled, offsets):
    """Not those of the names that tokens without a text of their own have (`bytes:...`)."""
    form = ResponseFormat(
        kind="completion", model="m", logprobs=0, return_token_ids=False,
        token_bytes=spelled.__getitem__,
    )  # fmt: skip
    ids, text = list(range(len(spelled))), b"".join(spelled).decode(errors="replace")
    whole = CompletionOutput(
        index=0, text=text, token_ids=ids, logprobs=[{token: -1.0} for token in ids]
    )
    for at, piece in zip(offsets, spelled, strict=True):
        assert not piece.isascii() or text[at:].startswith(piece.decode())
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[], outputs=[whole], finished=True
    )
    (choice,) = answer_body("r", output, form)["choices"]
    assert choice["logprobs"]["text_offset"] == offsets
    chunks, streamed = Chunks("id", 7, form, prompts=[[]], n=1, include_usage=False), []
    for token in ids:
        piece = CompletionOutput(index=0, text="", token_ids=[token], logprobs=[{token: -1.0}])
        event = json.loads(chunks.events({(0, 0): piece}).decode().removeprefix("data: "))
        streamed += event["choices"][0]["logprobs"]["text_offset"]
    assert streamed == offsets


@pytest.mark.parametrize(
    ("skips", "prompt", "offsets"),
    [(True, [3], [0, 0, 2, 2]), (True, [0], [0, 0, 1, 1]), (False, [3], [0, 3, 5, 8])],
)
def test_offsets_leave_out_what_the_text_leaves_out(skips, prompt, offsets):
    """Control tokens; and the space of a text's first token, which SentencePiece drops."""
    spelled = [b"<s>", b" a", b"<i>", b"b"]
    form = ResponseFormat(
        kind="completion", model="m", logprobs=0, return_token_ids=False,
        token_bytes=spelled.__getitem__, first_token_bytes=lambda token: spelled[token].lstrip(),
        special_ids={0, 2}, skips_special=skips,
    )  # fmt: skip
    whole = CompletionOutput(
        index=0, text="", token_ids=[*range(4)], logprobs=[{token: -1.0} for token in range(4)]
    )
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=prompt, outputs=[whole], finished=True
    )
    (choice,) = answer_body("r", output, form)["choices"]
    assert choice["logprobs"]["text_offset"] == offsets


ECHOED = [b"<s>", b" a", b"<i>", b"b", b" <i>", b"\xc3", b"\xa6"]


@pytest.mark.parametrize(
    ("text", "ids", "spells", "offsets"),
    [
        ("ab", [0, 1, 3], True, [0, 0, 1]),  # BOS is the tokenizer's; SentencePiece adds a space
        (" ab", [0, 1, 3], True, [0, 0, 2]),
        ("<s>a<i>b", [0, 1, 2, 3], True, [0, 3, 4, 7]),
        ("<s> a<i> \n a", [0, 1, 2, 1], True, [0, 3, 5, 10]),  # <i> takes the blanks after it
        ("a <i><i>b<s>", [0, 1, 2, 2, 3, 0], True, [0, 0, 2, 5, 8, 9]),
        ("b<s>", [0, 3, 0], True, [0, 0, 1]),
        ("b", [3, 0], True, [0, 1]),  # what the tokenizer adds behind
        ("a <i>b", [0, 1, 4, 3], False, [0, 0, 1, 5]),  # characters
        ("<s><i>\xe6b", [0, 2, 5, 6, 3], True, [0, 3, 6, 6, 7]),
        ("ab", [0, 1, 2, 3], False, [0, 0, 1, 1]),  # ids, whose text leaves control tokens out
    ],
)
def test_offsets_of_an_echoed_prompt(text, ids, spells, offsets):
    form = ResponseFormat(
        kind="completion", model="m", logprobs=0, return_token_ids=False,
        token_bytes=ECHOED.__getitem__, first_token_bytes=lambda token: ECHOED[token].lstrip(),
        special_ids={0, 2},
    )  # fmt: skip
    answer = CompletionOutput(index=0, text="bb", token_ids=[3, 3], logprobs=[{3: -1.0}] * 2)
    logprobs = [None, *({token: -1.0} for token in ids[1:])]
    whole = echoed(answer, text, ids, logprobs, alone=False)
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=ids, outputs=[whole], finished=True
    )
    own = form_of_echo(form, text, ids, spells_control=spells)
    (choice,) = answer_body("r", output, own)["choices"]
    assert choice["text"] == text + "bb"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text), len(text) + 1]


@pytest.mark.parametrize(
    ("prompt", "spelled", "offsets"),
    [
        (b"a\xc3", [b"\xa6", b"b"], [0, 1]),
        (b"a\xf0\x9f", [b"\x98", b"\x80", b"b"], [0, 0, 1]),
        (b"a\xc3", [b"b", b"c"], [1, 2]),  # what the prompt does not finish is U+FFFD
        (b"\xc3\xa6", [b"b"], [0]),
    ],
)
def test_offsets_after_a_prompt_that_ends_within_a_character(prompt, spelled, offsets):
    pieces = [*spelled, *(bytes([byte]) for byte in prompt)]
    ids = [*range(len(spelled), len(pieces))]
    form = ResponseFormat(
        kind="completion", model="m", logprobs=0, return_token_ids=False,
        token_bytes=pieces.__getitem__,
    )  # fmt: skip
    tokens = [*range(len(spelled))]
    tokenizer = SimpleNamespace(special_ids=frozenset(), token_bytes=pieces.__getitem__)
    detokenizer = IncrementalDetokenizer(tokenizer, None, ids)
    text = "".join([*map(detokenizer.append, tokens), detokenizer.finish()])
    for at, piece in zip(offsets, spelled, strict=True):
        assert not piece.isascii() or text[at:].startswith(piece.decode())
    whole = CompletionOutput(
        index=0, text=text, token_ids=tokens, logprobs=[{token: -1.0} for token in tokens]
    )
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=ids, outputs=[whole], finished=True
    )
    (choice,) = answer_body("r", output, form)["choices"]
    assert choice["logprobs"]["text_offset"] == offsets
