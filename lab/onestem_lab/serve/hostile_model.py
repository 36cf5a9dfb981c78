"""The embedded model with a tokenizer that cuts texts as Qwen's and Llama 3's do.

Its own pattern takes blanks one by one. Theirs looks for the end of a run of them, and a run of
some millions is more than the tokenizer's engine of regular expressions bears. A server refuses
texts by their length, which models of 128k tokens have room for and this one has not. So one token
is made long, as the longest ones are that such models have: of a length that makes up for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onestem.models.find import find_model
from onestem.options import EMBEDDED

__all__ = ["PATTERN", "make_model"]

PATTERN = (  # Qwen2's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER = "tokenizer.json"
# Times 1,024 tokens: more characters than the attacks have (`RUN_LENGTH`).
LONGEST_TOKEN = 10_800


def make_model(folder: Path) -> Path:
    """Make the model's directory, of links but for its tokenizer; returns `folder`."""
    model = find_model(EMBEDDED)
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != TOKENIZER:
            (folder / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((model / TOKENIZER).read_text("utf-8"))
    split = tokenizer["pre_tokenizer"]["pretokenizers"][0]
    assert split["type"] == "Split"
    split["pattern"] = {"Regex": PATTERN}
    _lengthen(tokenizer["model"])
    (folder / TOKENIZER).write_text(json.dumps(tokenizer), "utf-8")
    return folder


def _lengthen(bpe: dict[str, Any]) -> None:
    """Make the last token one of many blanks, which no text is cut into."""
    last = "".join(bpe["merges"].pop())
    bpe["vocab"]["Ġ" * LONGEST_TOKEN] = bpe["vocab"].pop(last)
