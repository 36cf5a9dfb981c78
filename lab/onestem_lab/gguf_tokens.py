"""Ids of a GGUF file's tokenizer beside those of the model's own `tokenizer.json`.

    python -m onestem_lab.gguf_tokens tokenizer.json PRE|FILE.gguf [--texts 10000] [--seed 0]

With the name of a splitting (`qwen2`), the vocabulary is written into a GGUF file as llama.cpp's
converter does (in the root of a clone). With a GGUF file, its own fields are read.
Texts are made of words of several
scripts, code, numbers, emoji, marks, blanks, names of tokens, and characters from all of Unicode.
Exit code 1 where a text has other ids.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from onestem.engine.text.gguf_tokenizer import read_tokenizer
from onestem.models.gguf.file import open_gguf
from tests.models.as_gguf import vocabulary, write_file

_TEXT = """the quick brown Fox's DON'T we'll I'd they've camelCase snake_case HTTPServer x86_64
    für Grüße façade naïve Ærø Straße İstanbul ΑΒΓ αβγ привет МОСКВА ёж עברית שלום العربية مرحبا
    हिन्दी नमस्ते বাংলা ไทย สวัสดี 漢字 仮名
    ひらがな カタカナ 한국어 안녕하세요 中文，标点。 tiếng Việt e\u0301 ﬁ
    0 7 42 123 1234 12345 3.14 1,000,000 ٣٤٥ Ⅷ ½ ² 2024-11-28 12:34:56 #include <stdio.h>
    def f(x): return{'a':[1,2]} /* */ // != <= => ~~ `` $PATH https://a.b/c?d=e&f=g
    😀 👩‍👩‍👧‍👦 🇩🇪 ☃️ … — “quoted” ‘it’s’ «x» ¿qué? 100% a@b.c ___ *** --- === \\n \\t"""
WORDS = _TEXT.split()
BLANKS = [" "] * 12
BLANKS += ["  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "", "\u00a0", "\u3000", "\x00"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("file", help="a GGUF file, or the name of a splitting")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    truth = Tokenizer.from_file(str(options.json))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(options.file)
        if not file.is_file():
            file = Path(folder) / "vocabulary.gguf"
            fields = vocabulary(json.loads(options.json.read_text()), options.file)
            rows = np.zeros((len(fields["tokenizer.ggml.tokens"]), 1), np.float32)
            fields["general.architecture"] = "llama"
            write_file(file, fields, {"token_embd.weight": rows})
        ours = read_tokenizer(open_gguf(file)).backend_tokenizer
    names = [token.content for token in truth.get_added_tokens_decoder().values()]
    texts = make(options.texts, options.seed, names)
    wrong = [text for text in texts if not same(truth, ours, text)]
    print(f"{options.json}: {len(texts)} texts, {len(wrong)} with other ids")
    for text in wrong[:2]:
        found = [one.encode(text, add_special_tokens=False) for one in (truth, ours)]
        print(repr(text), *(one.tokens for one in found), sep="\n  ")
    sys.exit(1 if wrong else 0)


def same(truth: Tokenizer, ours: Tokenizer, text: str) -> bool:
    return all(
        truth.encode(text, add_special_tokens=special).ids
        == ours.encode(text, add_special_tokens=special).ids
        for special in (False, True)
    )


def make(count: int, seed: int, names: list[str]) -> list[str]:
    draw = random.Random(seed)
    borders = (0x20, 0x250, 0x3000, 0x10000, 0x2FFFF)
    planes = [range(first, last) for first, last in pairwise(borders)]

    def anything() -> str:
        while True:
            found = chr(draw.choice(draw.choice(planes)))
            if unicodedata.category(found) not in ("Cs", "Cn"):
                return found

    def word() -> str:
        kind = draw.random()
        if kind < 0.75:
            return draw.choice(WORDS)
        if kind < 0.85:
            return "".join(anything() for _ in range(draw.randint(1, 6)))
        if kind < 0.95:
            return "".join(
                draw.choice("abcdefghijklmnop'ABC019 .") for _ in range(draw.randint(1, 9))
            )
        return draw.choice(names) if names else "x"

    return [
        "".join(word() + draw.choice(BLANKS) for _ in range(draw.randint(1, 24)))
        for _ in range(count)
    ]


if __name__ == "__main__":
    main()
