"""Constants of kernels: words of the work list (`W`) and of sampled rows (`R`) by name, logarithms,
and what the attention kernels are compiled for.

Gluon's constants are Triton's, so both languages take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton.language as tl

from onestem.ops.sampling.rows import ROW
from onestem.ops.work import lists


class _Names(tl.constexpr):
    """Constants by their names. Compilers look into the value. It is a constant itself since a
    cached kernel's key has these, and has no attributes of modules."""

    def __init__(self, words: Mapping[str, int]) -> None:
        constants = {name: tl.constexpr(word) for name, word in words.items()}
        super().__init__(SimpleNamespace(**constants))

    def __getattr__(self, name: str) -> Any:
        if name == "value" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)  # in the interpreter

    # Each launch compares a kernel's globals with copies of when it was compiled: word by word that
    # takes as long as the launch.
    def __deepcopy__(self, memo: object) -> _Names:
        return self

    def __ne__(self, other: object) -> bool:
        return self.value is not getattr(other, "value", None)


W: tl.constexpr = _Names({name: word for name, word in vars(lists).items() if type(word) is int})
R: tl.constexpr = _Names(dict(zip(ROW.names or (), range(ROW.itemsize // 4), strict=True)))
ROW_WORDS: tl.constexpr = tl.constexpr(ROW.itemsize // 4)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Form:
    """Heads, pages and scores that a kernel is compiled for. block_d: head_dim, rounded up to a
    power of 2."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_d: int
    page_size: int
    windowed: bool
    alibi: bool
    softcap: bool


@dataclass(frozen=True)
class HopperForm(Form):
    """A form of `sm90.attend_hopper`.

    Attributes:
        block_n: tokens of a tile.
        stages: tiles in the ring.
        box: tokens that the copy engine takes at a time.
        columns: queries of the items with few; 0: there are none.
        most: maximum queries of an item: without the code of larger ones a launch begins sooner.
    """

    block_n: int
    stages: int
    box: int
    columns: int
    most: int

    @property
    def ahead(self) -> bool:
        """Whether also items with fewer rows than the widest tiles are walked as `attend_rows` has
        it; they and their copies must have the same order of tiles."""
        return self.columns == 0
