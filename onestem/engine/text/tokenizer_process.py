"""A process that loads a tokenizer and uses it; `onestem.engine.text.directory` starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from onestem.children import serve

# Characters of several scripts, marks, and what is no letter; names of tokens; blanks.
TEXTS = [
    "",
    "Hello  world\n\t <s>[X]</s>",
    " " * 100,
    "".join(map(chr, range(0x20, 0x600))),
    "e\u0301 \ufb01 漢字 한글 \U0001f600 \u200d\x00",
]


def _prepare() -> Callable[[bytes], bytes]:
    from tokenizers import Tokenizer

    def answer(file: bytes) -> bytes:
        """Of a `tokenizer.json`. Errors are found again where it is loaded: only what ends the
        process counts."""
        try:
            library = Tokenizer.from_file(file.decode())
            library.no_truncation()
            library.no_padding()
            copied = Tokenizer.from_str(library.to_str())
            for text in TEXTS:
                library.decode(copied.encode(text).ids)
        except BaseException as error:
            if isinstance(error, MemoryError):
                raise
        return b""

    return answer


if __name__ == "__main__":
    serve(sys.argv[1:], _prepare)
