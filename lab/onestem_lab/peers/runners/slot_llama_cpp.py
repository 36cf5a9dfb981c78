"""Requests of llama.cpp one after the other, as one slot of its server takes them, without the
server: each keeps what it shares with the one before. Reads lines of JSON, prompts and the tokens
of each answer, and writes the seconds that all take.

    python slot_llama_cpp.py MODEL.gguf THREADS CONTEXT
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import llama_cpp
import numpy as np
from run_llama_cpp import BATCH_TOKENS, Batch, Settings, load_model, make_context


class Slot:
    def __init__(self, path: str, threads: int, context: int) -> None:
        self.model = load_model(path)
        settings = Settings(flash_attention=True)
        self.context = make_context(self.model, settings, context, 1, threads)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch, self.held = Batch(BATCH_TOKENS), list[int]()
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(vocab)

    def answer(self, prompt: list[int], tokens: int) -> None:
        equal = itertools.takewhile(
            lambda two: two[0] == two[1], zip(self.held, prompt, strict=False)
        )
        shared = min(sum(1 for _ in equal), len(prompt) - 1)
        llama_cpp.llama_memory_seq_rm(self.memory, 0, shared, -1)
        self.held = prompt[:shared]
        new = prompt[shared:]
        for _ in range(tokens):
            new = [self.decode(new)]

    def decode(self, new: list[int]) -> int:
        """The likeliest token behind those held and `new` ones, which are held then."""
        for start in range(0, len(new), BATCH_TOKENS):
            part = new[start : start + BATCH_TOKENS]
            tokens = [(one, len(self.held) + at, 0) for at, one in enumerate(part)]
            if llama_cpp.llama_decode(self.context, self.batch.fill(tokens, [len(part) - 1])) != 0:
                raise RuntimeError("llama_decode failed")
            self.held += part
        logits = llama_cpp.llama_get_logits_ith(self.context, len(part) - 1)
        return int(np.ctypeslib.as_array(logits, (self.size,)).argmax())


def main() -> None:
    path, *numbers = sys.argv[1:]
    slot = Slot(path, *map(int, numbers))
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        began = time.perf_counter()
        for prompt in prompts:
            slot.answer(prompt, tokens)
        print(json.dumps(time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
