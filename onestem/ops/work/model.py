"""What items cost: tile shapes, and when sharing and cutting pay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

__all__ = ["CostModel", "Tile"]


@dataclass(frozen=True)
class Tile:
    """A tile's shape, and what an item made of such tiles takes on one program.

    Attributes:
        block_m: rows times query heads of a KV head.
        block_n: tokens.
        item_ns: starting and ending an item, in ns.
        token_ns: each token of its walk, in ns, in whole tiles.
    """

    block_m: int
    block_n: int
    item_ns: float = 2500.0
    token_ns: float = 45.0


@dataclass(frozen=True)
class CostModel:
    """When a shared run gets items of its own, and how items are cut.

    Items of the widest tiles *multiply*, those of narrower ones *read*: the first wait for the
    tensor cores, the others for the memory.

    Attributes:
        tiles: narrow to wide. Rows that fill the widest walk all they see by themselves.
        programs: works (an item for one KV head) at a time, of those that read and of those that
            multiply, on the whole device.
        together: whether both kinds run at the same time, on a part of the device each, and who
            takes what is settled beforehand.
        merge_tokens: what one more state costs a row, in tokens read for it.
        min_tokens: no item is cut shorter.
        cut_ns: what cutting must save.
        memory_ns: a token's keys and values of one KV head at the memory's full rate.
        entry_ns: what each further run takes that an item walks, besides its tiles.
        cached_share: the part of `memory_ns` that a token takes out of the cache.
        merge_ns, state_ns: what merging takes by itself, and for each state and query head. With
            the two before it fitted to the times of 35 trees on an H200 (docs/gpu-attention.md).
    """

    tiles: tuple[Tile, ...]
    programs: tuple[int, int]
    together: bool = False
    merge_tokens: int = 16
    min_tokens: int = 128
    cut_ns: float = 6000.0
    memory_ns: float = 0.17
    entry_ns: float = 600.0
    cached_share: float = 0.54
    merge_ns: float = 4500.0
    state_ns: float = 0.18

    def tile_rows(self, group: int) -> np.ndarray:
        """int64 `[num_tiles]`: rows of each tile, with `group` query heads per KV head."""
        return np.array([tile.block_m // group for tile in self.tiles])

    def end_ns(self, last_ns: float, memory_ns: float, num_states: int) -> float:
        """When a step is done, counted from its start: its programs and the memory take so long,
        `num_states` are to be merged, one for each query head."""
        merge = self.merge_ns + self.state_ns * num_states if num_states else 0.0
        return max(last_ns, memory_ns) + merge

    def crowded(self, readers: int) -> CostModel:
        """The model where so many read at a time, who cannot be faster together than the memory."""
        slowest = self.memory_ns * readers
        narrow = (replace(t, token_ns=max(t.token_ns, slowest)) for t in self.tiles[:-1])
        return replace(self, tiles=(*narrow, self.tiles[-1]))
