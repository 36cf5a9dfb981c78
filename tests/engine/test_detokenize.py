"""Streamed text is the whole text, and stop strings end it where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.request import SamplingParams
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    paths: dict[str, Path] = {
        "byte_level": make_byte_level_tokenizer(root / "byte_level"),
        "byte_fallback": make_byte_fallback_tokenizer(root / "byte_fallback"),
        "metaspace_first": make_byte_fallback_tokenizer(root / "metaspace", legacy=False),
    }
    found = {kind: Tokenizer.from_directory(path) for kind, path in paths.items()}
    return {kind: tokenizer for kind, tokenizer in found.items() if tokenizer is not None}


def streamed(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    """All text, up to the stop string if there is one."""
    pieces = []
    for token in ids:
        pieces.append(detokenizer.append(token))
        if detokenizer.stop_reason is not None:
            break
    return "".join(pieces) + detokenizer.finish()


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    single = {
        tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))
    }
    return [single[bytes([byte])] for byte in data]


# --- text --------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.text(), st.booleans())
def test_text(tokenizers: dict[str, Tokenizer], text: str, special: bool) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert streamed(IncrementalDetokenizer(tokenizer), ids) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 450), max_size=40), st.booleans(), st.sampled_from([None, "\ufffd "])
)
def test_any_ids(
    tokenizers: dict[str, Tokenizer], ids: list[int], skip: bool, stop: str | None
) -> None:
    """Also ids that are no text, control tokens and ids past the vocabulary."""
    for tokenizer in tokenizers.values():
        params = SamplingParams(skip_special_tokens=skip, stop=stop)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        expected = whole if stop is None else whole.split(stop)[0]
        assert streamed(IncrementalDetokenizer(tokenizer, params), ids) == expected


@settings(max_examples=150)
@given(st.binary(max_size=12))
def test_any_bytes(tokenizers: dict[str, Tokenizer], data: bytes) -> None:
    for tokenizer in tokenizers.values():
        single = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
        if not all(bytes([byte]) in single for byte in data):
            continue
        ids = byte_ids(tokenizer, data)
        text = streamed(IncrementalDetokenizer(tokenizer), ids)
        assert text == tokenizer.decode(ids)
        assert text.lstrip(" ") == data.decode("utf-8", "replace").lstrip(" ")


def test_a_character_comes_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.append(token) for token in byte_ids(tokenizer, "😀x\n".encode())]
        assert pieces == ["", "", "", "😀", "x", "\n"]
        assert detokenizer.finish() == ""


def test_an_unfinished_character_is_flushed_as_decode_does(
    tokenizers: dict[str, Tokenizer],
) -> None:
    for tokenizer in tokenizers.values():
        ids = byte_ids(tokenizer, b"a\xf0\x9f\x98")
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(detokenizer.append(token) for token in ids) == "a"
        assert detokenizer.finish() == "\ufffd"
        assert tokenizer.decode(ids) == "a\ufffd"


@settings(max_examples=150)
@given(st.text(), st.text(), st.data())
def test_after_a_prompt_the_text_goes_on(
    tokenizers: dict[str, Tokenizer], before: str, after: str, data: st.DataObject
) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(before + after)
        cut = data.draw(st.integers(0, len(ids)))
        prompt, output = ids[:cut], ids[cut:]
        shown = tokenizer.decode(prompt).rstrip("\ufffd")
        whole = tokenizer.decode(ids)
        text = streamed(IncrementalDetokenizer(tokenizer, None, prompt), output)
        if not whole.startswith(shown):  # the texts themselves hold U+FFFD
            continue
        assert whole[len(shown) :].lstrip("\ufffd").endswith(text.lstrip("\ufffd"))
        if "\ufffd" not in tokenizer.decode(prompt):
            assert text == whole[len(shown) :]


def test_leading_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    prompt = tokenizer.encode("Say:")
    assert streamed(IncrementalDetokenizer(tokenizer), ids) == "Hello world"
    assert streamed(IncrementalDetokenizer(tokenizer, None, prompt), ids) == " Hello world"
    only_bos = [tokenizer.bos_token_id or 0]
    assert streamed(IncrementalDetokenizer(tokenizer, None, only_bos), ids) == "Hello world"


# --- stop strings ------------------------------------------------------------------------------


def reference_stop(text: str, stops: list[str], included: bool) -> tuple[str, str | None]:
    """Reads character by character."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if included else end - len(stop)], stop
    return text, None


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", " ", "é", "the", "\n", "😀"]), max_size=25).map(
        "".join
    ),
    st.lists(st.text("ab\né ", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_strings_are_those_of_the_reference(
    tokenizers: dict[str, Tokenizer], text: str, stops: list[str], included: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=included)
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text)
        text = tokenizer.decode(ids)
        detokenizer = IncrementalDetokenizer(tokenizer, params)
        found = streamed(detokenizer, ids)
        assert (found, detokenizer.stop_reason) == reference_stop(text, stops, included)
        # However the text is cut into tokens, the answer is the same.
        detokenizer = IncrementalDetokenizer(tokenizer, params)
        if all(ord(character) < 128 for character in text) and not text.startswith(" "):
            found = streamed(detokenizer, byte_ids(tokenizer, text.encode()))
            assert (found, detokenizer.stop_reason) == reference_stop(text, stops, included)


@pytest.fixture(scope="module")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


def pieces_of(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    pieces = []
    for token in byte_ids(tokenizer, text.encode()):
        pieces.append(detokenizer.append(token))
        if detokenizer.stop_reason is not None:
            return pieces, detokenizer.stop_reason
    return [*pieces, detokenizer.finish()], None


def test_what_may_be_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, "xENx", stop="END") == (["x", "", "", "ENx", ""], None)
    assert pieces_of(tokenizer, "xEEND", stop="END") == (["x", "", "E", "", ""], "END")
    assert pieces_of(tokenizer, "xEN", stop="END") == (["x", "", "", "EN"], None)


def test_the_stop_string_can_be_kept(tokenizer: Tokenizer) -> None:
    pieces, stop = pieces_of(tokenizer, "xEND", stop=["END"], include_stop_str_in_output=True)
    assert ("".join(pieces), stop) == ("xEND", "END")


def test_the_first_complete_stop_string_wins(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, "abcd", stop=["abcd", "bc"]) == (["", "", "a"], "bc")
    pieces, stop = pieces_of(tokenizer, "xabc", stop=["bc", "abc"])
    assert ("".join(pieces), stop) == ("x", "abc")


def test_text_after_a_stop_string_in_the_same_token_is_cut(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode(" world", add_special_tokens=False)
    assert len(token) == 1
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="or"))
    assert detokenizer.append(token[0]) == " w"
    assert detokenizer.stop_reason == "or"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("<|eot_id|>", "ab"),
        ("b<|eot_id|>", "a"),
        ("<|eot_id|>c", "ab"),
        ("<|eot_id|>cx", None),
        ("ab", ""),
        ("bc", "a"),  # as the text has it
    ],
)
def test_stop_strings_with_names_of_tokens_that_the_text_leaves_out(
    tokenizer: Tokenizer, stop: str, shown: str | None, included: bool
) -> None:
    eot = tokenizer.control_token("<|eot_id|>")
    assert eot is not None
    a, b, c = byte_ids(tokenizer, b"abc")
    params = SamplingParams(stop=["xyz", stop], include_stop_str_in_output=included)
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    text = streamed(detokenizer, [a, b, eot, c])
    if shown is None:
        assert (text, detokenizer.stop_reason) == ("abc", None)
        return
    assert (text, detokenizer.stop_reason) == (shown + stop * included, stop)
    # The same letters without the token are a stop string too, as ever.
    typed = byte_ids(tokenizer, f"x{stop}".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    assert streamed(detokenizer, typed) == "x" + stop * included


def test_a_control_token_that_a_stop_string_names_is_not_in_the_text(tokenizer: Tokenizer) -> None:
    eot, eos = (tokenizer.control_token(name) for name in ("<|eot_id|>", "<|end_of_text|>"))
    assert eot is not None
    assert eos is not None
    a, b = byte_ids(tokenizer, b"ab")
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="<|eot_id|>!"))
    pieces = [detokenizer.append(token) for token in (a, eot, b, eos, eot)]
    assert pieces == ["a", "", "b", "", ""]
    assert detokenizer.finish() == ""
    early = IncrementalDetokenizer(tokenizer, SamplingParams(stop="<|eot_id|>"))
    assert [early.append(eot, check_stop=False), early.append(a)] == ["", "a"]
    assert (early.append(eot), early.stop_reason) == ("", "<|eot_id|>")


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("stops", "ids", "shown", "found"),
    [
        (["bc", "<|eot_id|>!"], "ab.c", "a", "bc"),  # as readers see the text
        (["bc", "<|eot_id|>!"], "ab...c", "a", "bc"),
        (["bc", "<|eot_id|>c"], "ab.c", "ab", "<|eot_id|>c"),  # the longest of two
        (["bcd", "<|eot_id|>c"], "ab.cd", "ab", "<|eot_id|>c"),  # ends first
        (["bcd", "<|eot_id|>!"], "ab.c.a", "abca", None),
        (["bcd", "<|eot_id|>."], "ab" + "." * 60 + "cd", "a", "bcd"),
    ],
)
def test_tokens_that_one_stop_string_names_are_not_in_the_way_of_others(
    tokenizer: Tokenizer,
    stops: list[str],
    ids: str,
    shown: str,
    found: str | None,
    included: bool,
) -> None:
    eot = tokenizer.control_token("<|eot_id|>")
    assert eot is not None
    tokens = [eot if one == "." else byte_ids(tokenizer, one.encode())[0] for one in ids]
    params = SamplingParams(stop=stops, include_stop_str_in_output=included)
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    text = streamed(detokenizer, tokens)
    assert (text, detokenizer.stop_reason) == (shown + (found or "") * included, found)


def test_stop_strings_before_min_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="ab"))
    ids = byte_ids(tokenizer, b"abxaab")
    flags = [False, False, False, False, True, True]
    pieces = [detokenizer.append(i, check_stop=flag) for i, flag in zip(ids, flags, strict=True)]
    # One that began before the limit and ends after it counts.
    assert "".join(pieces) == "abxa"
    assert detokenizer.stop_reason == "ab"
    assert detokenizer.finish() == ""


def test_a_stop_string_across_the_limit_counts(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="abc"))
    first, second, third = byte_ids(tokenizer, b"abc")
    assert detokenizer.append(first, check_stop=False) == ""
    assert detokenizer.append(second, check_stop=False) == ""
    assert detokenizer.append(third, check_stop=True) == ""
    assert detokenizer.stop_reason == "abc"


def test_stop_strings_see_no_skipped_control_tokens(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id or 0
    first, second = byte_ids(tokenizer, b"ab")
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="ab"))
    assert [detokenizer.append(token) for token in (first, eos, second)] == ["", "", ""]
    assert detokenizer.stop_reason == "ab"
    shown = IncrementalDetokenizer(tokenizer, SamplingParams(stop="ab", skip_special_tokens=False))
    assert streamed(shown, [first, eos, second]) == "a<|end_of_text|>b"


def test_the_flushed_end_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="a\ufffd"))
    assert streamed(detokenizer, byte_ids(tokenizer, b"xa\xf0")) == "x"
    assert detokenizer.stop_reason == "a\ufffd"
