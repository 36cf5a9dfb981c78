"""The jobs that all engines run, as values; and how one becomes a job file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onestem.bench import BatchCase
from onestem.models.config import ModelConfig
from onestem.shapes import find_shape
from onestem_lab.cases import prompts_of
from onestem_lab.peers.runners.job import Group, Job

__all__ = ["CASES", "Case", "kv_bytes_per_token"]

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """`groups` prefixes, `degree` requests behind each, random token ids; tokens.

    Attributes:
        order: `shuffled`, `sorted` or `round-robin` (all prefixes in turn: question-major).
        kv_share: KV memory as a share of what all prefixes take; None: 4 GiB.
    """

    shape: str
    groups: int
    degree: int
    prefix: int
    distinct: int
    output: int
    order: str = "shuffled"
    kv_share: float | None = None

    def scaled(self, factor: float) -> Case:
        """With prefix, distinct and output tokens times `factor`, at least 1 where not 0."""

        def times(tokens: int) -> int:
            return max(round(factor * tokens), min(tokens, 1))

        return dataclasses.replace(
            self,
            prefix=times(self.prefix),
            distinct=times(self.distinct),
            output=times(self.output),
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_directory(find_shape(self.shape))

    def job(self, *, model: Path, dtype: str, threads: int, outputs: Path, seed: int = 0) -> Job:
        """The job without settings."""
        config = self.config
        prompts = self._prompts(config.vocab_size, seed)
        token_bytes = kv_bytes_per_token(config, dtype)
        kv_tokens = self._kv_tokens(token_bytes)
        return Job(
            model=str(model),
            dtype=dtype,
            vocab_size=config.vocab_size,
            prompts=prompts,
            groups=self._groups(prompts),
            output_tokens=self.output,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * token_bytes,
            threads=threads,
            settings={},
            outputs=str(outputs),
        )

    def _prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        case = BatchCase(
            self.groups,
            (self.degree,),
            (self.prefix,),
            self.distinct,
            self.output,
            self.order,
            seed,
        )
        return prompts_of(case, vocab_size)

    def _groups(self, prompts: list[list[int]]) -> list[Group]:
        members: dict[tuple[int, ...], list[int]] = {}
        for index, ids in enumerate(prompts):
            members.setdefault(tuple(ids[: self.prefix]), []).append(index)
        return [Group(self.prefix, tuple(indices)) for indices in members.values()]

    def _kv_tokens(self, token_bytes: int) -> int:
        if self.kv_share is None:
            return 4 * GIB // token_bytes
        # The longest request must fit in blocks of 128, whatever the share.
        longest = self.prefix + self.distinct + self.output
        least = (-(-longest // 128) + 1) * 128
        return max(int(self.kv_share * self.groups * self.prefix), least)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    return config.kv_values_per_token * (4 if dtype == "float32" else 2)


def _cases() -> dict[str, Case]:
    kinds: dict[str, dict[str, Any]] = {
        "4x16": {"groups": 4, "degree": 16, "prefix": 1000, "distinct": 50, "output": 50},
        "1x64": {"groups": 1, "degree": 64, "prefix": 4096, "distinct": 64, "output": 128},
        "64x1": {"groups": 64, "degree": 1, "prefix": 0, "distinct": 512, "output": 64},
        "60x8": {
            "groups": 60,
            "degree": 8,
            "prefix": 2048,
            "distinct": 192,
            "output": 16,
            "order": "round-robin",
            "kv_share": 0.1,
        },
    }
    kinds["60x8-sorted"] = {**kinds["60x8"], "order": "sorted"}
    cases = {
        f"{shape}-{name}": Case(shape, **sizes)
        for name, sizes in kinds.items()
        for shape in ("0.1b", "0.5b")
    }
    # Of layers with states: peers but transformers do not read it.
    return {**cases, "qwen3.5-0.8b-4x16": Case("qwen3.5-0.8b", **kinds["4x16"])}


CASES = _cases()
