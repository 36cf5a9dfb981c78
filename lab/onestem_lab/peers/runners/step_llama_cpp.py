"""Steps of llama.cpp, timed one at a time: reads a line `prefill N` or `decode ROWS`, computes, and
writes seconds by the wall and of the process's processors, of several decodes the least.

    python step_llama_cpp.py MODEL.gguf THREADS CONTEXT FLASH EXTRA

`CONTEXT`: tokens that each sequence has before a decode; FLASH: attention's, 0 or 1; EXTRA: whether
weights may be repacked (for AMX among others), 0 or 1.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable

import llama_cpp
import numpy as np
from run_llama_cpp import Batch

SEQUENCES, MOST = 64, 512
DECODES = 5  # in a turn, as many as on the other side


class Steps:
    def __init__(self, path: str, threads: int, context: int, flash: int, extra: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = bool(extra)
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = SEQUENCES * (context + 1) + MOST
        options.n_batch = options.n_ubatch = MOST
        options.n_seq_max = options.n_outputs_max = SEQUENCES + 1
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = flash
        options.kv_unified = True
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch, self.tokens = Batch(MOST), context
        self.size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.random = np.random.default_rng(0)
        held = [(self.token(), at, one) for one in range(SEQUENCES) for at in range(context)]
        for start in range(0, len(held), MOST):
            self.decode(held[start : start + MOST], [])

    def token(self) -> int:
        return int(self.random.integers(self.size))

    def decode(self, tokens: list[tuple[int, int, int]], wanted: list[int]) -> None:
        if llama_cpp.llama_decode(self.context, self.batch.fill(tokens, wanted)) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)

    def prefill(self, count: int) -> Callable[[], None]:
        tokens = [(self.token(), at, SEQUENCES) for at in range(count)]
        self.drop(SEQUENCES, 0)
        return lambda: self.decode(tokens, [count - 1])

    def decodes(self, rows: int) -> Callable[[], None]:
        self.drop(SEQUENCES, 0)
        for sequence in range(rows):
            self.drop(sequence, self.tokens)
        tokens = [(self.token(), self.tokens, sequence) for sequence in range(rows)]
        return lambda: self.decode(tokens, list(range(rows)))

    def drop(self, sequence: int, start: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, start, -1)


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, _: object) -> None:
    if level == 4 or b"AMX" in text or b"buffer size" in text:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    path, *numbers = sys.argv[1:]
    steps = Steps(path, *map(int, numbers))
    print(json.dumps(llama_cpp.llama_print_system_info().decode().strip()), flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        take, turns = (steps.prefill, 1) if kind == "prefill" else (steps.decodes, DECODES)
        found = []
        for _ in range(turns):
            step = take(int(count))
            wall, own = time.perf_counter(), time.process_time()
            step()
            found.append([time.perf_counter() - wall, time.process_time() - own])
        print(json.dumps([min(values) for values in zip(*found, strict=True)]), flush=True)


if __name__ == "__main__":
    main()
