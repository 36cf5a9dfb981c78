"""The tokenizer in a GGUF file's fields, as one of the `tokenizers` library.

Files have a vocabulary, kinds of tokens, and merges (BPE) or scores (SentencePiece), but no rules:
`tokenizer.ggml.pre` names how a text is split into words, and whoever reads the file must know it.
Tokens are those of the model's own `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from onestem.errors import ConfigError, UnsupportedError
from onestem.models.gguf.file import GgufFile
from onestem.models.gguf.header import Header, List

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # `tokenizer.ggml.token_type`

# Ends of a turn, in files that name only the end of a text. gpt-oss ends its parts with `<|end|>`.
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip

MOST_PIECE = 1024  # characters: all ways to join one are tried

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"{_MARK}{_UPPER}*{_LOWER}+{_ENDING}|{_MARK}{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}{_REST}"
)
_TEKKEN = rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"


@dataclass(frozen=True)
class Splitting:
    """How a byte-level BPE splits a text into words.

    Attributes:
        pattern: words are what it matches, and what lies between; None: GPT-2's, which the library
            has.
        composed: the text is brought into NFC before.
        digits: each digit is a word.
        whole: a word that is a token is not put together from parts.
        begun: a text begins with BOS where the file does not say.
    """

    pattern: str | None = None
    composed: bool = False
    digits: bool = False
    whole: bool = False
    begun: bool = False


_SPLITTINGS = {
    "gpt-2": Splitting(),
    "olmo": Splitting(),
    "smollm": Splitting(digits=True),
    "starcoder": Splitting(digits=True),
    "refact": Splitting(digits=True),
    "llama-bpe": Splitting(_LLAMA3, whole=True, begun=True),
    "dbrx": Splitting(_LLAMA3),
    "smaug-bpe": Splitting(_LLAMA3),
    "qwen2": Splitting(_LLAMA3.replace("{1,3}", ""), composed=True),
    "deepseek-r1-qwen": Splitting(_LLAMA3.replace("{1,3}", ""), composed=True),
    "gpt-4o": Splitting(_GPT4O, whole=True),
    "tekken": Splitting(_TEKKEN, whole=True, begun=True),
    "falcon": Splitting(),
}


def read_tokenizer(file: GgufFile) -> Any | None:
    """A fast tokenizer of `transformers`, with `turn_end_ids`; None: the file says that it has
    none.

    Raises:
        ConfigError: fields are missing or contradict each other.
        UnsupportedError: another kind of tokenizer, or way of splitting.
        WeightsError: the file is damaged.
    """
    header = file.header
    kind = header.fields.get("tokenizer.ggml.model")
    if kind in ("none", "no_vocab"):
        return None
    if kind is None:
        raise ConfigError(
            f"{header.file} has no tokenizer (tokenizer.ggml.model): convert the model with its "
            "vocabulary"
        )
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.model is {kind!r}, supported: gpt2 (BPE), llama "
            "(SentencePiece)"
        )
    words = _words(file, pieces=kind == "llama")
    library, begun = _bpe(header, words) if kind == "gpt2" else (_pieces(header, words), True)
    _add_tokens(library, header, words)
    _add_ends(library, header, words, begun)
    return _wrapped(library, header, words)


@dataclass(frozen=True)
class _Words:
    """The vocabulary. `kinds`: of each token, as in the file."""

    texts: list[str]
    kinds: list[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """By text; without places that a converter filled."""
        return {
            text: i
            for i, text in enumerate(self.texts)
            if self.kinds[i] != UNUSED or text != f"[PAD{i}]"
        }

    def of(self, *kinds: int) -> list[str]:
        return [text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in kinds]

    def named(self, header: Header, field: str) -> str | None:
        """The text of the token whose id a field gives."""
        token = header.fields.get(f"tokenizer.ggml.{field}_token_id")
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.texts):
            raise ConfigError(
                f"{header.file}: tokenizer.ggml.{field}_token_id is {token!r}, and there are "
                f"{len(self.texts)} tokens"
            )
        return self.texts[token]


def _words(file: GgufFile, *, pieces: bool) -> _Words:
    header, rows = file.header, file.tensors["token_embd.weight"].shape[0]
    found = header.fields.get("tokenizer.ggml.tokens")
    if isinstance(found, List) and found.size > rows:
        raise ConfigError(
            f"{header.file}: tokenizer.ggml.tokens has {found.size} tokens, and token_embd.weight "
            f"{rows} rows"
        )
    texts = header.strings("tokenizer.ggml.tokens")
    kinds = [1] * len(texts)
    if "tokenizer.ggml.token_type" in header.fields:
        kinds = header.numbers("tokenizer.ggml.token_type").tolist()
    if len(kinds) != len(texts):
        raise ConfigError(
            f"{header.file}: tokenizer.ggml.token_type has {len(kinds)} kinds, and there are "
            f"{len(texts)} tokens"
        )
    if pieces:  # a converter writes such tokens as they look in a text
        for i, kind in enumerate(kinds):
            if kind == USER_DEFINED:
                texts[i] = texts[i].replace(" ", "▁")
    if len(set(texts)) < len(texts):
        ids = dict(zip(texts, range(len(texts)), strict=True))
        twice = next(text for i, text in enumerate(texts) if ids[text] != i)
        raise ConfigError(f"{header.file}: tokenizer.ggml.tokens has {twice!r} twice")
    return _Words(texts, kinds)


def _bpe(header: Header, words: _Words) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether its texts begin with BOS where the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre

    name = header.fields.get("tokenizer.ggml.pre")
    how = _SPLITTINGS.get(name) if isinstance(name, str) else None
    if how is None:
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.pre is {name!r}, supported: {', '.join(_SPLITTINGS)} "
            "(others split texts in ways that are not known here)"
        )
    merges = [_pair(merge) for merge in header.strings("tokenizer.ggml.merges")]
    library = Tokenizer(models.BPE(words.ids, merges, ignore_merges=how.whole))
    if how.composed:
        library.normalizer = normalizers.NFC()
    steps: list[Any] = [pre.ByteLevel(add_prefix_space=False, use_regex=how.pattern is None)]
    if how.digits:
        steps.insert(0, pre.Digits(individual_digits=True))
    if how.pattern is not None:
        steps.insert(0, pre.Split(Regex(how.pattern), "isolated"))
    if name == "falcon":
        by_three = pre.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        steps = [pre.Punctuation("contiguous"), *steps, pre.Digits(), by_three]
    library.pre_tokenizer = pre.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library, how.begun


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pieces(header: Header, words: _Words) -> Tokenizer:
    """SentencePiece's BPE: pieces of the best score are joined first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(words.texts):
        raise ConfigError(
            f"{header.file}: tokenizer.ggml.scores has {len(scores)} scores, and there are "
            f"{len(words.texts)} tokens"
        )
    # SentencePiece joins them before all others; a converter writes some low score.
    scores = [0.0 if k == USER_DEFINED else s for s, k in zip(scores, words.kinds, strict=True)]
    ids = words.ids
    unknown = next(iter(words.of(UNKNOWN)), None)
    model = models.BPE(
        ids, _merges(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    library = Tokenizer(model)
    blank = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.fields.get("tokenizer.ggml.add_space_prefix", True):
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        library.normalizer = blank
    library.decoder = decoders.Sequence(steps)
    return library


def _merges(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those with the best score first."""
    found = []
    for piece, token in ids.items():
        if len(piece) > MOST_PIECE:
            raise ConfigError(
                f"tokenizer.ggml.tokens has {len(piece)} characters in one, limit is {MOST_PIECE}"
            )
        pairs = [
            (piece[:at], piece[at:])
            for at in range(1, len(piece))
            if piece[:at] in ids and piece[at:] in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(scores[token], *pair) for pair in pairs]
    found.sort(key=lambda one: (one[0], len(one[1]), len(one[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_tokens(library: Tokenizer, header: Header, words: _Words) -> None:
    """Tokens that are found in a text before it is split."""
    from tokenizers import AddedToken

    # Phi-3's take blanks after them.
    phi3 = header.fields["general.architecture"] == "phi3" and (
        header.fields["tokenizer.ggml.model"] == "llama"
    )
    plain = ("<unk>", "<s>", "<|endoftext|>")

    def added(text: str) -> AddedToken:
        return AddedToken(text, normalized=False, rstrip=phi3 and text not in plain)

    library.add_tokens([added(text) for text in words.of(USER_DEFINED) if text])
    library.add_special_tokens([added(text) for text in words.of(UNKNOWN, CONTROL) if text])


def _add_ends(library: Tokenizer, header: Header, words: _Words, begun: bool) -> None:
    """What is put before and after each text."""
    from tokenizers import processors

    whole, used = ["$A"], {}
    for field, is_first, default in (("bos", True, begun), ("eos", False, False)):
        token = words.named(header, field)
        if token is not None and header.fields.get(f"tokenizer.ggml.add_{field}_token", default):
            whole.insert(0 if is_first else len(whole), token)
            used[token] = words.ids[token]
    if used:
        library.post_processor = processors.TemplateProcessing(
            single=whole, special_tokens=list(used.items())
        )


def _wrapped(library: Tokenizer, header: Header, words: _Words) -> Any:
    from transformers import PreTrainedTokenizerFast

    fields = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{ours}_token": words.named(header, theirs) for ours, theirs in fields.items()}
    found = PreTrainedTokenizerFast(
        tokenizer_object=library,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
    found.chat_template = _templates(header)
    named = [words.named(header, field) for field in ("eot", "eom")]
    ids = words.ids
    ends = [name for name in (*named, *TURN_ENDS) if name in ids]
    if "<|return|>" in ids:
        ends.remove("<|end|>")
    found.turn_end_ids = tuple(dict.fromkeys(ids[name] for name in ends))
    return found


def _templates(header: Header) -> str | dict[str, str] | None:
    """The chat template, or several by name."""
    prefix = "tokenizer.chat_template"
    found = {
        name.removeprefix(prefix).removeprefix(".") or "default": value
        for name, value in header.fields.items()
        if name.startswith(prefix) and isinstance(value, str)
    }
    return found.get("default") if len(found) == 1 else found or None
