"""A model directory of a shape that every server can load: weights, and a tokenizer of words.

Token i is the word "wI": any server can tokenise and detokenise it, at the same small cost.
"""

from __future__ import annotations

import json
from pathlib import Path

from onestem.shapes import find_shape
from onestem_lab.peers.weights import model_directory

__all__ = ["config_alone", "servable"]

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def servable(work: Path, shape: str, dtype: str) -> Path:
    """A directory with config, weights and tokenizer; made unless it is there."""
    directory = model_directory(work, shape, dtype)
    if not (directory / "tokenizer.json").exists():
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        _write_tokenizer(directory, vocab_size)
    return directory


def config_alone(work: Path, shape: str, dtype: str) -> Path:
    """A directory without weights, for servers that make them up."""
    directory = work / f"{shape}-{dtype}-made-up"
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((find_shape(shape) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}) + "\n")
    if not (directory / "tokenizer.json").exists():
        _write_tokenizer(directory, config["vocab_size"])
    return directory


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = [*SPECIAL.values(), *(f"w{i}" for i in range(len(SPECIAL), vocab_size))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
