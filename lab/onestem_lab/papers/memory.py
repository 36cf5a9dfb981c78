"""Memory of one cached token, from the sizes of models (Prompt Cache, table 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onestem.models.memory import token_memory
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Step

__all__ = ["TokenMemories"]


@dataclass(frozen=True)
class TokenMemories:
    """MiB of a token at 16 bits: with a key and a value for each query head, as in the paper, and
    with the heads that the model stores.

    Attributes:
        models: name -> layers, hidden size, query heads, KV heads.
    """

    models: Mapping[str, tuple[int, int, int, int]]

    def places(self) -> list[dict[str, str]]:
        return [{"model": name} for name in self.models]

    def steps(self, bench: Bench) -> list[Step]:
        return [self._measure]

    def _measure(self) -> Iterable[Cell]:
        for name, (layers, hidden, heads, kv_heads) in self.models.items():
            config = {
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
            }
            found = token_memory(config)
            yield Cell({"model": name}, "all heads", found.all_heads, config)
            yield Cell({"model": name}, "stored", found.kv_heads, config)
