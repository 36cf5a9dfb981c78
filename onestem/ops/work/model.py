"""The cost of items: tile shapes, and when sharing and cutting pay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Tile:
    """A tile's shape, and the time of an item of such tiles on one program.

    Attributes:
        block_m: rows times query heads of a KV head.
        block_n: tokens.
        item_ns: time to start and end an item, in ns.
        token_ns: time of each token of its walk, in ns; tiles are walked whole.
    """

    block_m: int
    block_n: int
    item_ns: float = 2500.0
    token_ns: float = 45.0


@dataclass(frozen=True)
class CostModel:
    """Decides when a shared run gets items of its own, and how items are cut.

    Items of the widest tiles *multiply*: they wait for the tensor cores. Items of narrower tiles
    *read*: they wait for the memory.

    Attributes:
        tiles: narrow to wide. Rows that fill the widest share no items: they walk all they see.
        programs: items (for one KV head each) that run at a time on the whole device: of those that
            read, and of those that multiply.
        together: whether both kinds run at the same time, each on a part of the device, with items
            dealt to programs beforehand.
        merge_tokens: cost of one more state of a row, in tokens read for it.
        min_tokens: minimum tokens of a cut item.
        cut_ns: minimum that cutting must save.
        memory_ns: time of a token's keys and values of one KV head at the memory's full rate.
        late_ns: time by which the first warpgroup of a program that reads begins after the second,
            and by which programs that multiply do: their instructions come later.
        entry_ns: time of each further run that an item walks, besides its tiles.
        cached_share: the part of `memory_ns` that a token in the cache takes.
        crowd: the part of `memory_ns` by which each program that reads at the same time slows a
            token of the others down: they do not all wait at the same time.
        row_crowd: the part of a token's time in the cache by which each program that reads for 9 to
            64 queries slows the others of them down.
        row_share: the part of `row_crowd` that holds where all programs that read do so.
        bound_factor: how many times as long programs that multiply take where the memory is the
            limit: they get their share of it like all others.
        merge_ns: time of merging itself.
        mixed_factor: how many times as long tokens from memory take beside tokens from the cache.
        beside_factor: how many times as long all tokens take beside programs that multiply.
        state_share: time of each state and query head, in `memory_ns`: it is written and read, and
            has as many bytes as a token.
        part_ns: time of each state of the row that has the most: they are merged in turn.
        multiply: whether there are items of the widest tiles.

    From `late_ns` to `part_ns` all are fitted to the measured times of trees and of other decode
    steps (lab/notes/gpu-attention.md).
    """

    tiles: tuple[Tile, ...]
    programs: tuple[int, int]
    together: bool = False
    merge_tokens: int = 16
    min_tokens: int = 128
    cut_ns: float = 6000.0
    memory_ns: float = 0.17
    late_ns: tuple[float, float] = (4000.0, 12000.0)
    entry_ns: float = 600.0
    cached_share: float = 0.54
    crowd: float = 0.5
    row_crowd: float = 1.3
    row_share: float = 0.8
    bound_factor: float = 1.5
    merge_ns: float = 3000.0
    mixed_factor: float = 1.1
    beside_factor: float = 1.1
    state_share: float = 1.5
    part_ns: float = 24.0
    multiply: bool = True

    def tile_rows(self, group: int) -> np.ndarray:
        """int64 `[num_tiles]`: rows of each tile, with `group` query heads per KV head; those that
        no item has count as the next narrower."""
        rows = [tile.block_m // group for tile in self.tiles]
        return np.array(rows if self.multiply else [*rows[:-1], rows[-2]])

    @cached_property
    def reading(self) -> CostModel:
        """The model of lists whose items all read: no program begins late, since the kernel of
        these has less code (`Kernels.most_queries`)."""
        return replace(self, multiply=len(self.tiles) == 1, late_ns=(0.0, 0.0))

    def read_share(self, different: float) -> float:
        """The part of the memory's time that tokens take of which a part, `different`, comes from
        memory and the others from the cache."""
        return min(1.0, max(self.cached_share, self.mixed_factor * different))

    def end_ns(self, last_ns: float, memory_ns: float, num_states: int, parts: int) -> float:
        """Time of a step whose last program takes `last_ns` and memory `memory_ns`, and that merges
        `num_states` states, one for each query head, `parts` of one row at most."""
        merge = self.merge_ns + self.state_share * self.memory_ns * num_states
        merge += self.part_ns * parts
        return max(last_ns, memory_ns) + merge * (num_states > 0)

    def crowded(self, readers: int, crowd: float = 1.0, in_rows: int = 0) -> CostModel:
        """The model with `readers` programs reading at a time: together no faster than memory.
        `in_rows` of them have tiles of the next to widest shape: together no faster than the cache.
        Of two shapes that is the one in which all read, from memory too.
        """
        slowest = crowd * self.memory_ns * readers
        tiles = [replace(t, token_ns=max(t.token_ns, slowest)) for t in self.tiles[:-1]]
        if tiles:
            row_ns = self.row_ns(in_rows) * (1.0 if len(tiles) > 1 else self.row_share)
            tiles[-1] = replace(tiles[-1], token_ns=max(tiles[-1].token_ns, row_ns))
        return replace(self, tiles=(*tiles, self.tiles[-1]))

    def row_ns(self, in_rows: int) -> float:
        """Time of a token in the cache for each of `in_rows` programs that read it at a time."""
        return self.row_crowd * self.cached_share * self.memory_ns * in_rows
