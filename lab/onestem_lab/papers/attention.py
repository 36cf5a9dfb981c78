"""Attention of one step alone: our kernel shared and unshared, peers, and eq. 10's prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from onestem.ops.items import CostModel, SharedItem, make_items
from onestem_lab.attention.cases import Case, Heads, Step, decodes, mixed_step, tensor_bytes
from onestem_lab.attention.measure import measure_step, memory_bytes
from onestem_lab.attention.peers import absent_peers
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import THEORY, Cell
from onestem_lab.papers.experiment import Step as Task

__all__ = ["AttentionSweep", "Decodes", "Mixed", "relay_speedup"]

OURS, UNSHARED, COPIES = "full", "unshared", "copies"
REPEAT = 7


@dataclass(frozen=True)
class Decodes:
    """A decode of each of `groups` x `degree` sequences: a shared prefix, and tokens of its own."""

    prefix: int
    own: int
    degree: int
    groups: int = 1

    def case(self, bench: Bench) -> tuple[Case, dict[str, int]]:
        """The step at the bench's scale, and its sizes."""
        ran = {
            "prefix": bench.size(self.prefix),
            "own": bench.size(self.own),
            "groups": bench.size(self.groups),
            "degree": bench.size(self.degree, 2),
        }
        return decodes(ran["groups"], (ran["degree"],), (ran["prefix"],), ran["own"]), ran

    @staticmethod
    def copied(ran: Mapping[str, int]) -> Case:
        """The step where each sequence has the prefix in pages of its own."""
        return decodes(ran["groups"] * ran["degree"], (1,), (0,), ran["prefix"] + ran["own"])


@dataclass(frozen=True)
class Mixed:
    """Chunks of prompts and decodes in one step, all of them behind one prefix."""

    prefix: int
    own: int
    chunks: int
    decodes: int
    chunk_rows: int = 256

    def case(self, bench: Bench) -> tuple[Case, dict[str, int]]:
        """The step at the bench's scale, and its sizes."""
        ran = {
            "prefix": bench.size(self.prefix),
            "own": bench.size(self.own),
            "chunks": self.chunks,
            "decodes": bench.size(self.decodes, 2),
            "chunk_rows": bench.size(self.chunk_rows, 2),
        }
        make = partial(
            mixed_step,
            chunk_rows=ran["chunk_rows"],
            contexts=(ran["prefix"],) * self.chunks,
            shared=self.chunks,
            decodes=ran["decodes"],
            suffix=ran["own"],
        )
        return Case(make), ran


@dataclass(frozen=True)
class AttentionSweep:
    """Milliseconds of attention in each setting.

    Attributes:
        settings: place in the table, and the step that is measured.
        theory: whether eq. 10 of RelayAttention predicts the speed-up.
        copies: whether each sequence also reads a copy of the prefix of its own, as an engine does
            that stores prefixes as often as they are asked for. (`unshared` reads the same pages
            for each, which a GPU's L2 cache may hold.)
    """

    q_heads: int
    kv_heads: int
    settings: tuple[tuple[Mapping[str, Any], Decodes | Mixed], ...]
    head_dim: int = 128
    theory: bool = False
    copies: bool = False

    def places(self) -> list[Mapping[str, Any]]:
        return [at for at, _ in self.settings]

    def steps(self, bench: Bench) -> list[Task]:
        absent = absent_peers(bench.against, bench.device)
        bench.refused.update(absent)
        peers = tuple(peer for peer in bench.against if peer not in absent)
        heads = self._heads(bench)
        return [
            partial(self._measure, bench, heads, peers, at, kind)
            for at, kind in bench.thin_table(self.settings, itemgetter(0))
        ]

    def _heads(self, bench: Bench) -> Heads:
        group = self.q_heads // self.kv_heads
        kv_heads = bench.size(self.kv_heads)
        name = bench.options.dtype
        dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
        return Heads(kv_heads * group, kv_heads, self.head_dim, dtype)

    def _measure(
        self,
        bench: Bench,
        heads: Heads,
        peers: tuple[str, ...],
        at: Mapping[str, Any],
        kind: Decodes | Mixed,
    ) -> Iterable[Cell]:
        case, ran = kind.case(bench)
        step, heads = case.step(heads)
        share, repeat = bench.share("full") == "full", bench.size(REPEAT, 2)
        impl = bench.options.impl
        entry = measure_step(step, heads, bench.device, peers, impl, repeat, share)
        bench.refused.update(entry["refused"])
        for name, ms, shared in ((OURS, "ms", share), (UNSHARED, "unshared_ms", False)):
            yield Cell(at, name, entry[ms], ran, keys_of(step, shared))
        if self.copies and isinstance(kind, Decodes):
            yield self._copied(bench, heads, at, kind.copied(ran), ran)
        for peer, ms in entry["others_ms"].items():
            yield Cell(at, peer, ms, ran)
        if self.theory and isinstance(kind, Decodes):
            yield Cell(at, THEORY, relay_speedup(ran["prefix"], ran["own"], ran["degree"]), ran)

    def _copied(
        self,
        bench: Bench,
        heads: Heads,
        at: Mapping[str, Any],
        case: Case,
        ran: Mapping[str, int],
    ) -> Cell:
        step, heads = case.step(heads)
        # Twice: the kernel has them in a layout of its own.
        needed, there = 2 * tensor_bytes(step, heads), memory_bytes(bench.device)
        if needed > there:
            note = f"copies of the prefix take {needed >> 30} GiB, {bench.device} has {there >> 30}"
            return Cell(at, COPIES, None, ran, note=note)
        impl, repeat = bench.options.impl, bench.size(REPEAT, 2)
        entry = measure_step(step, heads, bench.device, (), impl, repeat, share=False)
        return Cell(at, COPIES, entry["ms"], ran, keys_of(step, False))


def keys_of(step: Step, share: bool) -> dict[str, float]:
    """Keys that are stored, and keys that the step's work items read. Keys read for several rows at
    once count once."""
    total = 0
    for item in make_items(step.plan, CostModel(), share):
        copies = len(item.rows) if isinstance(item, SharedItem) and item.copies else 1
        total += copies * item.slots.size
    return {"keys_stored": int(step.plan.run_len.sum()), "keys_read": total}


def relay_speedup(system: int, context: int, batch: int) -> float:
    """Speed-up from reading the system prompt once (RelayAttention, eq. 10)."""
    return (system + context + 2) / (system / batch + context + 7)
