"""Texts are bounded before they are tokenised, and never refused without need; what the tokenizers
library cannot do is an error of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from onestem.engine.text import backend as backend_module
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.limits import most_per_token
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from onestem.native import native
from onestem.rawtext import RawText
from tests.batch.fakes import completion, results, run_fake, write_lines
from tests.engine.tiny_tokenizers import make_byte_fallback_tokenizer, make_byte_level_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Llama 3's: its engine of regular expressions gives up at 10 million characters of one match.
BLANKS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
TOO_MANY_BLANKS = " " * 11_000_000


def byte_level(
    *more: str, normalizer: Any = None, added: list[AddedToken] | None = None
) -> Backend:
    """Byte-level BPE with Llama 3's pre-tokenizer; `more`: longer tokens, each of two others."""
    vocabulary = {name: i for i, name in enumerate([*ALPHABET, *more])}
    merges = [(name[: len(name) // 2], name[len(name) // 2 :]) for name in more]
    library = Backend(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BLANKS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_tokens(added or [])
    return library


def made(library: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=library))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return made(byte_level("ĠĠ", "ĠĠĠĠ"))


# --- panics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["encode", "encode_control", "encode_batch"])
def test_a_panic_of_the_library_is_the_texts_error(tokenizer: Tokenizer, call: str) -> None:
    given: Any = TOO_MANY_BLANKS
    if call == "encode_batch":
        given = [RawText("a"), RawText(TOO_MANY_BLANKS)]
    with pytest.raises(
        RequestError, match=r"a text of 11000000 characters cannot be tokenised: .*retry-limit"
    ):
        getattr(tokenizer, call)(given)
    assert tokenizer.encode("ab") == [ALPHABET.index("a"), ALPHABET.index("b")]


def test_only_panics_are_turned() -> None:
    class Deadline(BaseException):
        """As a handler of a signal raises it."""

    for passing in (KeyboardInterrupt, SystemExit, GeneratorExit, Deadline, MemoryError):
        with pytest.raises(passing), native("x", RequestError):
            raise passing
    panic = type("PanicException", (BaseException,), {})
    with (
        pytest.raises(RequestError, match=r"^x: its library fails \(over\)$"),
        native("x", RequestError),
    ):
        raise panic("over\nnote: run with a backtrace")


def test_a_panic_while_ids_are_decoded() -> None:
    panic = type("PanicException", (BaseException,), {})

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def decode(self, *_: Any, **__: Any) -> str:
            raise panic("over")

    library: Any = Library()
    with pytest.raises(RequestError, match=r"^2 tokens cannot be turned into text: .*\(over\)$"):
        backend_module.Backend(library).decode([1, 2])


# --- lengths -----------------------------------------------------------------------------------


def blank_limit(tokenizer: Tokenizer, max_tokens: int, name: str = "prompt") -> int:
    """How many characters are let through."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        try:
            tokenizer.check_length(name, middle, max_tokens)
            low = middle
        except RequestError:
            high = middle - 1
    return low


def test_the_limit_is_reached_by_the_longest_token(tokenizer: Tokenizer) -> None:
    """No text that fits is refused, and one character more has a token too many."""
    assert blank_limit(tokenizer, 10) == 40
    assert len(tokenizer.encode(" " * 40)) == 10
    with pytest.raises(RequestError) as error:
        tokenizer.check_length("prompt", 41, 10)
    assert str(error.value) == (
        "prompt has 41 characters, limit is 40, which are more than 10 tokens in any case: "
        "shorten it"
    )


def kept(strip: str = "") -> list[AddedToken]:
    return [AddedToken("<x>", special=False, normalized=False, **{strip: True} if strip else {})]


DERIVED = {
    "NFC joins four": (byte_level(normalizer=normalizers.NFC()), 4),
    "a normaliser that joins": (byte_level(normalizer=normalizers.Replace("aaa", "b")), 3),
    "two that join": (
        byte_level(
            normalizer=normalizers.Sequence(
                [normalizers.Replace("aa", "b"), normalizers.Replace("bbb", "c")]
            )
        ),
        6,
    ),
    "an added token": (byte_level(added=[AddedToken("<" + "x" * 50 + ">", normalized=False)]), 52),
    "an added token that normalisation lengthens": (
        byte_level(
            normalizer=normalizers.Replace("x", "yyy"),
            added=[AddedToken("xxxx", normalized=True)],
        ),
        12,
    ),
}
UNBOUNDED = {
    "blanks are stripped": byte_level(normalizer=normalizers.Strip()),
    "characters are dropped": byte_level(normalizer=normalizers.Replace("a", "")),
    "any number are one": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "a token takes blanks before it": byte_level(added=kept("lstrip")),
    "a token takes blanks after it": byte_level(added=kept("rstrip")),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_a_token_stands_for(name: str) -> None:
    library, expected = DERIVED[name]
    assert most_per_token(library, control=True) == expected


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_has_no_limit(name: str) -> None:
    assert most_per_token(UNBOUNDED[name], control=True) is None


def test_unknown_words_have_no_limit() -> None:
    library = Backend(models.WordLevel({"[UNK]": 0}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert most_per_token(library, control=False) is None
    tokenizer = made(library)
    BoundedTokenizer(tokenizer, 2).check("prompt", 1 << 20)
    assert BoundedTokenizer(tokenizer, 2).encode_batch([RawText("a" * 10_000)]) == [[0]]


def test_families_have_a_limit(tmp_path: Path) -> None:
    for path in (
        make_byte_level_tokenizer(tmp_path / "level"),
        make_byte_fallback_tokenizer(tmp_path / "fallback"),
        make_byte_fallback_tokenizer(tmp_path / "metaspace", legacy=False),
    ):
        tokenizer = Tokenizer.from_directory(path)
        assert tokenizer is not None
        assert 10 < blank_limit(tokenizer, 10) < 1000


@pytest.mark.parametrize("strip", ["", "rstrip"])
def test_raw_texts_are_bounded(strip: str) -> None:
    """Also where a control token takes the blanks beside it, of which there may be any number."""
    library = byte_level("ĠĠ", "ĠĠĠĠ")
    library.add_special_tokens([AddedToken("<x>", **{strip: True} if strip else {})])
    bounded = BoundedTokenizer(made(library), 10)
    assert [len(ids) for ids in bounded.encode_batch([RawText("<x>" * 10)])] == [10]
    fits = RawText("<x>" + " " * (10_000 if strip else 37))
    assert bounded.encode_batch([fits]) == made(library).encode_batch([fits])
    for text in ("a" * 41, "<x>" + "a" * 40, "<x>" + " a" * 5000):
        for parse_special in (True, False):
            with pytest.raises(RequestError, match=r"more than 10 tokens in any case: shorten it"):
                bounded.encode_batch([RawText.of(text, parse_special)])


def test_one_limit_for_all_texts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends them, and where no model's length applies."""
    monkeypatch.setattr(backend_module, "MOST_CHARACTERS", 100)
    for call in (tokenizer.encode, tokenizer.encode_control):
        with pytest.raises(RequestError, match="a text has 101 characters, limit is 100: shorten"):
            call("a" * 101)
    with pytest.raises(RequestError, match="limit is 100"):
        tokenizer.encode_batch([RawText("a"), RawText("a" * 101)])


def test_what_a_template_writes_is_bounded(tmp_path: Path) -> None:
    template = "{% for i in range(200) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(tmp_path, template=template))
    assert tokenizer is not None
    bounded = BoundedTokenizer(tokenizer, 10)
    for text in ("a" * 10, "a<|eot_id|>"):
        with pytest.raises(RequestError, match=r"the rendered chat has \d+ characters, limit is"):
            bounded.chat([{"role": "user", "content": text}])


def test_a_line_of_a_job_has_its_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """And the others are answered."""
    lines = [completion("good"), completion("bad", TOO_MANY_BLANKS), completion("better")]
    summary = run_fake(
        write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tokenizer=tokenizer
    )
    assert summary.failed == 1
    _, bad, _ = results(tmp_path / "out.jsonl")
    assert bad["error"]["code"] == "invalid_request"
    assert "a text of 11000000 characters cannot be tokenised" in bad["error"]["message"]
