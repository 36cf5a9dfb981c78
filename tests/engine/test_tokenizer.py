"""Tokenizers: control tokens and text kept apart, BOS once, decoding as the library does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

from onestem.engine.text.detokenize import IncrementalDetokenizer
from onestem.engine.text.tokenizer import Tokenizer, Written, read_hugging_face
from onestem.errors import ConfigError, RequestError, UnsupportedError
from onestem.models.families import FAMILIES
from onestem.rawtext import RawText
from onestem.request import SamplingParams
from tests.engine.tiny_tokenizers import (
    LLAMA_2_TEMPLATE,
    LLAMA_3_TEMPLATE,
    make_byte_fallback_tokenizer,
    make_byte_level_tokenizer,
)

KINDS = ("byte_level", "byte_fallback", "metaspace_first")
# The first text after a control token's name must not melt into it, so names stand everywhere.
NAMES = {
    "byte_level": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
    "byte_fallback": ("<s>", "</s>", "<unk>"),
    "metaspace_first": ("<s>", "</s>", "<unk>"),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": make_byte_level_tokenizer(root / "byte_level"),
        "byte_fallback": make_byte_fallback_tokenizer(root / "byte_fallback"),
        "metaspace_first": make_byte_fallback_tokenizer(root / "metaspace", legacy=False),
    }


@pytest.fixture(scope="module")
def tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    found = {kind: Tokenizer.from_directory(path) for kind, path in directories.items()}
    return {kind: tokenizer for kind, tokenizer in found.items() if tokenizer is not None}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(tokenizers: dict[str, Tokenizer], kind: str) -> Tokenizer:
    return tokenizers[kind]


@pytest.fixture(scope="module")
def oracles(directories: dict[str, Path]) -> dict[str, Any]:
    return {kind: AutoTokenizer.from_pretrained(path) for kind, path in directories.items()}


def word_tokenizer(**extra: Any) -> Tokenizer:
    """Whole words; a control token's name is a word, too."""
    words = ["[UNK]", "</s>", "hello", "world", "<", "/s>"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, value in extra.items():
        setattr(backend, name, value)
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>")
    )


# --- encoding ----------------------------------------------------------------------------------


MORE_OF_MODELS = (
    {},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
     "rope_theta": 500000.0, "max_position_embeddings": 131072},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4},
    {"rope_scaling": None, "layer_types": ["full_attention"], "num_hidden_layers": 2},
    {"text_config": {"model_type": "llama", "rope_scaling": None}},
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [None, "LlamaTokenizer", "GPT2TokenizerFast", "GemmaTokenizer", "Qwen2Tokenizer"]
)
def test_it_is_the_one_that_transformers_chooses(
    directories: dict[str, Path],
    kind: str,
    tmp_path: Path,
    name: str | None,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the model's own configuration, of which nothing else is read, and nothing is said."""
    path = tmp_path / "model"
    shutil.copytree(directories[kind], path)
    fields = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**fields, "tokenizer_class": name}))
    for kind_of_model in (one for one, its in CAUSAL_LMS.items() if its in FAMILIES):
        (path / "config.json").write_text(json.dumps({"model_type": kind_of_model}))
        its = AutoTokenizer.from_pretrained(path)
        for more in MORE_OF_MODELS if name else ({},):
            fields = {"model_type": kind_of_model, **more}
            (path / "config.json").write_text(json.dumps(fields))
            capfd.readouterr()
            recwarn.clear()
            ours = read_hugging_face(path)
            assert capfd.readouterr().err == ""
            assert not recwarn.list
            assert type(ours) is type(its)
            assert ours.backend_tokenizer.to_str() == its.backend_tokenizer.to_str()
            assert ours.special_tokens_map == its.special_tokens_map


@settings(max_examples=150)
@given(st.text() | st.text("ab <s>/|e\n", max_size=30))
def test_encode_is_the_librarys_with_bos_once(
    tokenizers: dict[str, Tokenizer], oracles: dict[str, Any], text: str
) -> None:
    for kind, tokenizer in tokenizers.items():
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.special_ids.isdisjoint(ids[1:])
        assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)
        if not any(name in text for name in NAMES[kind]):
            assert ids == oracles[kind](text)["input_ids"]


def test_names_of_control_tokens_are_characters(tokenizer: Tokenizer, kind: str) -> None:
    for name in NAMES[kind]:
        for text in (name, f"a {name} b", f"{name}{name}", f"{name} \n{name}x"):
            ids = tokenizer.encode(text)
            assert tokenizer.special_ids.isdisjoint(ids[1:])
            assert tokenizer.decode(ids) == text


def test_encode_control_reads_names_as_tokens_and_does_not_double_bos(
    tokenizer: Tokenizer, kind: str
) -> None:
    bos, other = NAMES[kind][:2]
    ids = tokenizer.encode_control(f"{bos}hello{other}")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.token_name(ids[-1]) == other
    assert tokenizer.encode_control("hello").count(tokenizer.bos_token_id) == 1


def test_quoted_texts_are_characters(tokenizer: Tokenizer, kind: str) -> None:
    texts = ["", "hello", f"x {NAMES[kind][1]} y", "".join(NAMES[kind]), "你好 😀", "a" * 1000]
    quoted = [RawText.of(text, parse_special=False) for text in texts]
    assert tokenizer.encode_batch(quoted) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(quoted, add_special_tokens=False) == [
        tokenizer.encode(text, add_special_tokens=False) for text in texts
    ]
    assert tokenizer.encode_batch([]) == []


PIECES = [
    *sorted({name for names in NAMES.values() for name in names}),
    "a", " the", "\n", "  ", "<", "s>", "|>", "é", "😀", "[INST] ", "hello world",
]  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=4))
def test_raw_texts_are_the_librarys_with_bos_once(
    tokenizers: dict[str, Tokenizer], oracles: dict[str, Any], texts: list[str]
) -> None:
    for kind, tokenizer in tokenizers.items():
        raw = [RawText(text) for text in texts]
        plain = [oracles[kind](text, add_special_tokens=False)["input_ids"] for text in texts]
        assert tokenizer.encode_batch(raw, add_special_tokens=False) == plain
        bos = tokenizer.bos_token_id
        begun = [ids if ids[:1] == [bos] else [bos, *ids] for ids in plain]
        assert tokenizer.encode_batch(raw) == begun


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
def test_quoted_parts_are_as_messages_in_a_template(directories: Any, value: str) -> None:
    for kind, directory in directories.items():
        bos, end, begin = NAMES[kind]
        loaded = AutoTokenizer.from_pretrained(directory)
        loaded.chat_template = f"{bos}{begin}x: {{{{ messages[0].content }}}}{end}y"
        tokenizer = Tokenizer(loaded)
        head, tail = f"{bos}{begin}x: ", f"{end}y"
        parts = (RawText(head), RawText.of(value, parse_special=False), RawText(tail))
        raw = RawText.joined(parts)
        assert raw.text == head + value + tail
        expected = tokenizer.apply_chat_template([{"role": "user", "content": value}])
        assert tokenizer.encode_batch([raw]) == [expected]


def test_a_name_that_is_quoted_in_part_is_characters(tokenizer: Tokenizer, kind: str) -> None:
    name = NAMES[kind][1]
    for cut in range(1, len(name)):
        parts = (RawText(name[:cut]), RawText.of(name[cut:], parse_special=False))
        (ids,) = tokenizer.encode_batch([RawText.joined(parts)])
        assert ids == tokenizer.encode(name)


def test_quoted_parts_that_touch_are_one() -> None:
    parts = [RawText("a"), *(RawText.of(text, parse_special=False) for text in ("bc", "", "d"))]
    assert RawText.joined([*parts, RawText("e")]) == RawText("abcde", ((1, 4),))


def test_what_a_normaliser_makes_a_name_is_quoted_too() -> None:
    backend = Backend(models.BPE({"<": 0, "x": 1, ">": 2, "y": 3}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<x>", special=True, normalized=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    control = tokenizer.control_token("<x>")
    assert tokenizer.encode_batch([RawText("y<X>")]) == [[3, control]]
    quoted = RawText.joined((RawText("<x>"), RawText.of("<X>", parse_special=False)))
    assert tokenizer.encode_batch([quoted]) == [[control, 0, 1, 2]]


def test_a_vocabulary_with_the_name_as_a_word_does_not_forge_it() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer.encode("hello </s> world") == [2, 4, 5, 3]
    quoted = [RawText.of(text, parse_special=False) for text in ("hello </s>", "nothing")]
    assert tokenizer.encode_batch(quoted) == [[2, 4, 5], [0]]
    assert tokenizer.encode_batch([RawText("hello </s>")]) == [[2, 1]]
    assert tokenizer.encode_control("hello </s>") == [2, 1]


def test_eos_of_the_post_processor_is_kept() -> None:
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = word_tokenizer(post_processor=template)
    assert tokenizer.encode("hello world") == [2, 3, 1]
    assert tokenizer.encode_batch([RawText("hello")]) == [[2, 1]]


def test_truncation_and_padding_of_the_directory_are_not_used() -> None:
    backend = Backend(models.WordLevel({"a": 0, "[PAD]": 1}, "[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("a a a a") == [0] * 4
    assert tokenizer.encode_batch([RawText("a a a a"), RawText("a")]) == [[0] * 4, [0]]


# --- chat --------------------------------------------------------------------------------------


def chat(*contents: Any) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_as_transformers_has_it(
    tokenizer: Tokenizer, oracles: dict[str, Any], kind: str, add_generation_prompt: bool
) -> None:
    for messages in (chat("Hi"), chat(" Hello  there\n", "Fine.", "你好")):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt)
        expected = oracles[kind].apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        assert ids == expected
        assert ids.count(tokenizer.bos_token_id) == 1


@settings(max_examples=60)
@given(data=st.data())
def test_names_in_messages_are_characters_and_nothing_else_changes(
    tokenizers: dict[str, Tokenizer], oracles: dict[str, Any], data: st.DataObject
) -> None:
    """Decoded with control tokens shown, the ids are the rendered text; the control tokens are
    those of the same conversation without the names."""
    for kind, tokenizer in tokenizers.items():
        part = st.sampled_from(NAMES[kind]) | st.sampled_from(
            ["a", " ", "\n", "é😀", "<", "|>", "s>"]
        )
        contents = data.draw(
            st.lists(st.lists(part, max_size=6).map("".join), min_size=1, max_size=3)
        )
        messages = chat(*contents)
        ids = tokenizer.apply_chat_template(messages)
        harmless = tokenizer.apply_chat_template(chat(*("a" for _ in contents)))
        special = tokenizer.special_ids
        assert [i for i in ids if i in special] == [i for i in harmless if i in special]
        if kind == "byte_level":
            rendered = tokenizer.render_chat(messages)
            assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_the_marked_way_gives_the_ordinary_tokens(
    tokenizers: dict[str, Tokenizer], contents: list[str]
) -> None:
    """Without any mention, marking changes nothing: control tokens are the only cuts."""
    for tokenizer in tokenizers.values():
        messages = chat(*contents)
        marker = tokenizer.marker
        text, literal = marker.unmark(tokenizer.render_chat(marker.mark(messages)))
        assert not literal
        if tokenizer.apply_chat_template(messages) != marker.encode(text, literal=False):
            assert any(name in text for names in NAMES.values() for name in names)


def test_a_mention_does_not_change_the_rest_of_the_conversation(tokenizer: Tokenizer) -> None:
    plain = tokenizer.apply_chat_template(chat("one two three", "four", "five"))
    name = tokenizer.token_name(tokenizer.eos_token_id or 0)
    mention = tokenizer.apply_chat_template(chat("one two three", "four", f"five {name}"))
    text = tokenizer.decode(plain[:-3], skip_special_tokens=False)
    common = next(i for i, (a, b) in enumerate(zip(plain, mention, strict=False)) if a != b)
    assert "four" in tokenizer.decode(plain[:common], skip_special_tokens=False)
    assert text


def test_a_template_without_bos_gets_one(tmp_path: Path) -> None:
    template = LLAMA_2_TEMPLATE.removeprefix("{{ bos_token }}")
    tokenizer = Tokenizer.from_directory(make_byte_fallback_tokenizer(tmp_path, template=template))
    assert tokenizer is not None
    for text in ("Hi", "Hi </s>"):
        ids = tokenizer.apply_chat_template(chat(text))
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_no_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="messages is empty"):
        tokenizer.apply_chat_template([])


def test_what_the_template_refuses(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="only user and assistant may speak"):
        tokenizers["byte_fallback"].apply_chat_template([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{{ messages[0].content.nothing() }}", "has no attribute 'nothing'"),
        ("{{ missing.field }}", "'missing' is undefined"),
    ],
)
def test_a_template_that_fails(tmp_path: Path, template: str, reason: str) -> None:
    path = make_byte_level_tokenizer(tmp_path, template=template)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    with pytest.raises(RequestError, match=re.escape(reason)) as error:
        tokenizer.apply_chat_template(chat("x"))
    assert "\n" not in str(error.value)


def test_variables_of_a_template(tmp_path: Path) -> None:
    """A control token's name in them is characters, as in messages."""
    template = "{{ messages[0].content }}{% if think %}<|eot_id|>{{ think }}{% endif %}"
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(tmp_path, template=template))
    assert tokenizer is not None
    eot = tokenizer.encode_control("<|eot_id|>")[-1]
    plain = tokenizer.encode("a")
    assert tokenizer.apply_chat_template(chat("a")) == plain
    for think in ("yes", "<|eot_id|>"):
        ids = tokenizer.apply_chat_template(chat("a"), fields={"think": think})
        assert ids == [*plain, eot, *tokenizer.encode(think, add_special_tokens=False)]
    for fields, reason in (({"tokenize": True}, "'tokenize'"), ([1], "expected a mapping")):
        with pytest.raises(RequestError, match=reason):
            tokenizer.apply_chat_template(chat("a"), fields=fields)


def test_an_answer_that_goes_on(tokenizer: Tokenizer) -> None:
    messages = [*chat("Count."), {"role": "assistant", "content": "One, two,"}]
    ids = tokenizer.apply_chat_template(messages, False, continue_final_message=True)
    whole = tokenizer.apply_chat_template(messages, False)
    assert whole[: len(ids)] == ids
    assert tokenizer.decode(ids).endswith("One, two,")
    with pytest.raises(RequestError, match="both set"):
        tokenizer.apply_chat_template(messages, True, continue_final_message=True)


def test_half_a_character_is_named(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_control):
        with pytest.raises(RequestError, match=r"has '\\ud800' at character 2, which is half"):
            encode("ab\ud800")
    with pytest.raises(RequestError, match="half a character"):
        tokenizer.encode_batch([RawText("a"), RawText("\udfff")])
    with pytest.raises(RequestError, match="half a character"):
        tokenizer.apply_chat_template(chat("\udfff"))


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(tmp_path, template=None))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(chat("x"))


def test_a_template_that_changes_letters_does_not_leak_marks(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(tmp_path, template=template))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.apply_chat_template(chat("hello"))) == "HELLO"
    with pytest.raises(RequestError, match="changes the letters"):
        tokenizer.apply_chat_template(chat("hello <|eot_id|>"))


# --- decoding ----------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.integers(0, 500), max_size=25), st.booleans())
def test_decode_is_the_librarys_unless_bytes_are_no_utf8(
    tokenizers: dict[str, Tokenizer], oracles: dict[str, Any], ids: list[int], skip: bool
) -> None:
    for kind, tokenizer in tokenizers.items():
        known = [token for token in ids if token < tokenizer.vocab_size]
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        expected = oracles[kind].backend_tokenizer.decode(known, skip_special_tokens=skip)
        if kind == "byte_level" or "\ufffd" not in expected:
            assert text == expected
        assert text == tokenizer.decode_bytes(ids, skip).decode("utf-8", "replace")


def test_valid_characters_stay_in_a_run_with_broken_ones(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    by_name = {tokenizer.token_name(token): token for token in range(tokenizer.vocab_size)}
    ids = [by_name[f"<0x{byte:02X}>"] for byte in "é".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "é\ufffd"


@settings(max_examples=100)
@given(st.text())
def test_text_survives(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for kind, tokenizer in tokenizers.items():
        # SentencePiece's sign for a space is read as one; "first" puts no space before a space.
        if "▁" not in text and not (kind == "metaspace_first" and text.startswith(" ")):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve 😀", add_special_tokens=False)
    data = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert data.decode().strip() == "naïve 😀"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.first_token_bytes(tokenizer.vocab_size) == b""
    bos = tokenizer.bos_token_id or 0
    assert tokenizer.token_bytes(bos).decode() == tokenizer.token_name(bos)


@pytest.mark.parametrize(
    ("decoder", "vocabulary", "text"),
    [
        (decoders.WordPiece(), ["hello", "##s", "world", "."], "hellos world. hello"),
        (decoders.Metaspace(), ["▁hello", "s", "▁world", "."], "hellos world. hello"),
        (None, ["hello", "s", "world", "."], "hello s world . hello"),
    ],
)
def test_other_decoders(decoder: Any, vocabulary: list[str], text: str) -> None:
    names = {name: place for place, name in enumerate([*vocabulary, "?"])}
    backend = Backend(models.WordLevel(names, "?"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = [0, 1, 2, 3, 0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids, True).decode() == text


def test_decoders_that_look_ahead_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="decoder BPEDecoder cannot be streamed"):
        word_tokenizer(decoder=decoders.BPEDecoder())


# What converters write before ByteLevel.
IDLE = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 600), max_size=30), st.booleans())
def test_steps_that_find_nothing_before_byte_level(
    tokenizers: dict[str, Tokenizer], directories: dict[str, Path], ids: list[int], skips: bool
) -> None:
    loaded = AutoTokenizer.from_pretrained(directories["byte_level"])
    library = Backend.from_str(loaded.backend_tokenizer.to_str())
    loaded.backend_tokenizer.decoder = decoders.Sequence([*IDLE, decoders.ByteLevel()])
    library.decoder = decoders.Sequence([*IDLE, decoders.ByteLevel()])
    tokenizer = Tokenizer(loaded)
    known = [token for token in ids if token < tokenizer.vocab_size]
    whole = library.decode(known, skip_special_tokens=skips)
    assert tokenizer.decode(known, skip_special_tokens=skips) == whole
    params = SamplingParams(skip_special_tokens=skips)
    stream = IncrementalDetokenizer(tokenizer, params)
    assert "".join([*map(stream.append, known), stream.finish()]) == whole


def test_an_added_token_of_other_characters_leaves_other_tokens_readable(
    directories: dict[str, Path],
) -> None:
    loaded = AutoTokenizer.from_pretrained(directories["byte_level"])
    loaded.backend_tokenizer.decoder = decoders.Sequence([*IDLE, decoders.ByteLevel()])
    loaded.add_tokens(["<a▁b c>"])
    tokenizer = Tokenizer(loaded)
    ids = tokenizer.encode("the fox <a▁b c> é")
    assert tokenizer.decode(ids) == "the fox <a▁b c> é"


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ([decoders.Replace("Ġ", " ")], []),  # a sign of ByteLevel's own
        (IDLE, ["<0x0A>"]),
        (IDLE, ["▁the"]),
        ([decoders.Strip("_", 1, 0)], []),
        ([decoders.CTC()], []),
    ],
)
def test_steps_that_find_something_before_byte_level_are_refused(
    steps: list[Any], names: list[str]
) -> None:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *names]
    backend = Backend(models.BPE({name: place for place, name in enumerate(alphabet)}, []))
    backend.decoder = decoders.Sequence([*steps, decoders.ByteLevel()])
    with pytest.raises(UnsupportedError, match=r"ByteLevel cannot be streamed, expected ByteLevel"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


# --- directories -------------------------------------------------------------------------------


def test_ids_that_it_names(tokenizer: Tokenizer, oracles: dict[str, Any], kind: str) -> None:
    oracle = oracles[kind]
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.special_ids == set(oracle.all_special_ids)
    assert tokenizer.vocab_size == len(oracle)


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_directory(tmp_path) is None


def test_damaged_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.from_directory(tmp_path)


def test_added_tokens_that_are_not_control_tokens_are_found_in_text(tmp_path: Path) -> None:
    path = make_byte_level_tokenizer(tmp_path)
    oracle = AutoTokenizer.from_pretrained(path)
    oracle.add_tokens([AddedToken("<think>", special=False)])
    tokenizer = Tokenizer(oracle)
    token = tokenizer.encode("a<think>b")[2]
    assert tokenizer.token_name(token) == "<think>"
    assert token not in tokenizer.special_ids


# --- what a template writes before an answer ---------------------------------------------------

BEGUN = "<think>\n\n</think>\n\n"
UNLESS = "{% if not enable_thinking %}" + BEGUN + "{% endif %}{% endif %}"
TEMPLATES = {
    "as earlier answers": (LLAMA_3_TEMPLATE, {}, 0),
    "an empty thought": (LLAMA_3_TEMPLATE.replace("{% endif %}", UNLESS), {}, None),
    "or none": (LLAMA_3_TEMPLATE.replace("{% endif %}", UNLESS), {"enable_thinking": True}, 0),
    "users' turns differ later": ("{{ messages | length }}" + LLAMA_3_TEMPLATE, {}, 0),
    "no answers": ("{{ raise_exception('no') if messages[1:] }}" + LLAMA_3_TEMPLATE, {}, 0),
    "no template": (None, {}, 0),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prefilled_tokens(tmp_path: Path, name: str) -> None:
    template, fields, expected = TEMPLATES[name]
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(tmp_path, template=template))
    assert tokenizer is not None
    if expected is None:
        expected = len(tokenizer.encode(BEGUN, add_special_tokens=False))
    tools = [{"type": "function", "function": {"name": "f"}}]
    for _ in range(2):
        assert tokenizer.written(fields).prefilled == expected
        assert tokenizer.written({**fields, "tools": tools}).prefilled == expected


def test_tokens_of_the_first_message(tmp_path: Path) -> None:
    """Its name inside a message is characters."""
    path = make_byte_level_tokenizer(tmp_path, template=LLAMA_3_TEMPLATE)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    written = tokenizer.written()
    assert written.turn == tokenizer.control_token("<|start_header_id|>")
    system = {"role": "system", "content": "Be <|start_header_id|> brief."}
    prompt = tokenizer.apply_chat_template([system, {"role": "user", "content": "a"}])
    alone = tokenizer.apply_chat_template([system], False)
    assert written.first_message(prompt) == len(alone)
    assert written.first_message(alone) == 0
    assert Written(0, None).first_message(prompt) == 0


def test_a_processors_template_is_read_where_the_tokenizer_has_none(tmp_path):
    """Older checkpoints of models that read images too have it in chat_template.json alone."""
    for own in (None, "own{{ messages[0]['content'] }}"):
        path = tmp_path / str(own is None)
        make_byte_level_tokenizer(path, template=own)
        (path / "chat_template.json").write_text('{"chat_template": "their{{ bos_token }}"}')
        tokenizer = Tokenizer.from_directory(path)
        text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}]))
        assert text == ("their" if own is None else "ownx")
    (path := tmp_path / "True").joinpath("chat_template.json").write_text("[")
    with pytest.raises(ConfigError, match=r"chat_template\.json cannot be read as JSON"):
        Tokenizer.from_directory(path)
