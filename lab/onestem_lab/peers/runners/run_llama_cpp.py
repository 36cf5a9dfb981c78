"""llama.cpp through its C interface: all sequences in one context, decoded together.

Each prefix is computed once in a sequence of its own and given to the sequences of its prompts with
`llama_memory_seq_cp`. With a unified KV buffer that copies nothing, and attention of every row goes
over all of the buffer, masked; without, each sequence has a stream of its own and the prefix's keys
and values are copied into it. Requests run in waves as large as memory and `max_seqs` allow (all
answers are equally long, so a wave ends at once).

Settings: weights and kv (f32, f16, bf16), unified, flash_attention, ubatch, max_seqs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_model import TYPES, convert
from job import Group, Job, main

Wave = list[tuple[Group, list[int]]]
Token = tuple[int, int, int]  # id, position, sequence

GGML_LOG_LEVEL_ERROR = 3
BATCH_TOKENS = 2048  # of one llama_decode; `ubatch` says how many it computes at a time


@dataclass(frozen=True)
class Settings:
    weights: str = "f16"
    kv: str = "f16"
    unified: bool = True
    flash_attention: bool = False
    ubatch: int = 512
    max_seqs: int = 64


class LlamaCpp:
    def __init__(self, job: Job, settings: Settings) -> None:
        self.unified, self.capacity = settings.unified, job.kv_tokens
        self.most = min(settings.max_seqs, len(job.prompts))
        if not settings.unified:
            self.most = min(self.most, max(job.kv_tokens // job.longest, 1))
        waves = list(self._waves(job))
        # Sequences behind the requests' own hold prefixes.
        sequences = self.most + max(len(wave) for wave in waves)
        if settings.unified:
            cells = _rounded(max(self._cells(job, wave) for wave in waves))
        else:
            cells = sequences * _rounded(job.longest)
        self.model = load_model(convert(Path(job.model), settings.weights))
        self.context = make_context(self.model, settings, cells, sequences, job.threads)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = Batch(BATCH_TOKENS)
        self.vocab_size = job.vocab_size
        self.held: dict[Group, int] = {}

    def answer(self, job: Job) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in job.prompts]
        for wave in self._waves(job):
            self._answer_wave(job, wave, answers)
        return answers

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)
        self.held.clear()

    def facts(self) -> dict[str, Any]:
        return {
            "n_ctx": llama_cpp.llama_n_ctx(self.context),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    # ------------------------------------------------------------------------------ waves

    def _waves(self, job: Job) -> Iterator[Wave]:
        wave: Wave = []
        for group in job.groups:
            for member in group.members:
                longer = _with(wave, group, member)
                if wave and not self._fits(job, longer):
                    yield wave
                    longer = [(group, [member])]
                wave = longer
        yield wave

    def _fits(self, job: Job, wave: Wave) -> bool:
        count = sum(len(members) for _, members in wave)
        return count <= self.most and (not self.unified or self._cells(job, wave) <= self.capacity)

    @staticmethod
    def _cells(job: Job, wave: Wave) -> int:
        """Tokens whose KV a wave holds in a unified buffer."""
        total = 0
        for group, members in wave:
            own = sum(len(job.prompts[m]) - group.prefix_tokens for m in members)
            total += group.prefix_tokens + own + len(members) * job.output_tokens
        return total

    def _answer_wave(self, job: Job, wave: Wave, answers: list[list[int]]) -> None:
        self._drop_all_but([group for group, _ in wave])
        holders = self._holders([group for group, _ in wave])
        self._decode(
            [
                (token, position, holders[group])
                for group, members in wave
                if group not in self.held
                for position, token in enumerate(job.prompts[members[0]][: group.prefix_tokens])
            ],
            [],
        )
        self.held = holders
        members = [member for _, chosen in wave for member in chosen]
        last = self._decode_own(job, wave)
        for member, token in zip(members, last, strict=True):
            answers[member].append(token)
        for _ in range(job.output_tokens - 1):
            tokens = [
                (last[seq], len(job.prompts[m]) + len(answers[m]) - 1, seq)
                for seq, m in enumerate(members)
            ]
            last = self._decode(tokens, range(len(tokens)))
            for member, token in zip(members, last, strict=True):
                answers[member].append(token)

    def _decode_own(self, job: Job, wave: Wave) -> list[int]:
        """Compute what each prompt has behind its prefix; the first token of each answer."""
        tokens: list[Token] = []
        ends: list[int] = []
        seq = 0
        for group, members in wave:
            for member in members:
                if group.prefix_tokens:
                    llama_cpp.llama_memory_seq_cp(self.memory, self.held[group], seq, -1, -1)
                own = enumerate(job.prompts[member])
                tokens += [(t, p, seq) for p, t in own if p >= group.prefix_tokens]
                ends.append(len(tokens) - 1)
                seq += 1
        return self._decode(tokens, ends)

    # ----------------------------------------------------------------- prefixes kept between waves

    def _drop_all_but(self, groups: list[Group]) -> None:
        """Free every request's sequence and the prefixes of groups that are done."""
        for seq in range(self.most):
            llama_cpp.llama_memory_seq_rm(self.memory, seq, -1, -1)
        for group in [group for group in self.held if group not in groups]:
            llama_cpp.llama_memory_seq_rm(self.memory, self.held.pop(group), -1, -1)

    def _holders(self, groups: list[Group]) -> dict[Group, int]:
        """The sequence of each group's prefix."""
        free = iter(
            seq
            for seq in range(self.most, self.most + len(groups))
            if seq not in self.held.values()
        )
        return {group: self.held[group] if group in self.held else next(free) for group in groups}

    # ------------------------------------------------------------------------------- decode

    def _decode(self, tokens: Sequence[Token], wanted: Sequence[int]) -> list[int]:
        """Compute tokens; greedy choices behind those at the indices `wanted` (ascending)."""
        chosen: list[int] = []
        size = self.batch.size
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            ends = [i - start for i in wanted if start <= i < start + len(part)]
            code = llama_cpp.llama_decode(self.context, self.batch.fill(part, ends))
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code} for {len(part)} tokens")
            chosen += [self._best(end) for end in ends]
        return chosen

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


class Batch:
    """Memory for a `llama_batch` of at most `size` tokens, one sequence each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns = np.zeros((3, size), np.int32)  # token, position, sequence
        self.counts = np.ones(size, np.int32)
        self.wanted = np.zeros(size, np.int8)
        stride = self.columns.itemsize
        self.seq_pointers = (
            self.columns[2].ctypes.data + stride * np.arange(size, dtype=np.uint64)
        ).astype(np.uint64)

    def fill(self, tokens: Sequence[Token], wanted: Sequence[int]) -> llama_cpp.llama_batch:
        self.columns[:, : len(tokens)] = np.array(tokens, np.int32).T
        self.wanted[: len(tokens)] = 0
        self.wanted[list(wanted)] = 1
        int32, pointer = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER
        return llama_cpp.llama_batch(
            n_tokens=len(tokens),
            token=self.columns[0].ctypes.data_as(int32),
            embd=None,
            pos=self.columns[1].ctypes.data_as(int32),
            n_seq_id=self.counts.ctypes.data_as(int32),
            seq_id=self.seq_pointers.ctypes.data_as(pointer(int32)),
            logits=self.wanted.ctypes.data_as(pointer(ctypes.c_int8)),
        )


def _with(wave: Wave, group: Group, member: int) -> Wave:
    if wave and wave[-1][0] is group:
        return [*wave[:-1], (group, [*wave[-1][1], member])]
    return [*wave, (group, [member])]


def _rounded(tokens: int) -> int:
    return -(-tokens // 256) * 256


def load_model(path: Path | str) -> Any:
    llama_cpp.llama_log_set(_only_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"{path} could not be loaded; llama.cpp's log says why")
    return model


def make_context(model: Any, settings: Settings, cells: int, sequences: int, threads: int) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = cells
    params.n_batch = BATCH_TOKENS
    params.n_ubatch = settings.ubatch
    params.n_seq_max = params.n_outputs_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = int(settings.flash_attention)  # 0 disabled, 1 enabled
    params.type_k = params.type_v = int(TYPES[settings.kv])
    params.kv_unified = settings.unified
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama_init_from_model gave no context; its log says why")
    return context


@llama_cpp.llama_log_callback
def _only_errors(level: int, text: bytes, _: Any) -> None:
    if level == GGML_LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def load(job: Job) -> LlamaCpp:
    return LlamaCpp(job, Settings(**job.settings))


if __name__ == "__main__":
    main("llama_cpp", load, ("llama_cpp_python", "gguf", "numpy"))
