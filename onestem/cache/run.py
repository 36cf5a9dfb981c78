"""A run: tokens whose keys and values are stored once, and the pages that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from onestem.cache.pages import PagePool
from onestem.tree import PLAIN, Label, Node

NO_ANSWER = 2**62  # an index that no sequence has


class Run(Node):
    """Tokens whose keys and values are (or will be) stored once.

    Attributes:
        pages: page ids of the first tokens; allocated as the tokens are computed.
        offset: slot of the first token in its first page.
        computed: leading tokens whose KV is written, or is scheduled for the current step.
        pins: sequences (and groups) whose path holds this run.
        owner: the object that computes the rest of it, or None.
        grows: a sequence appends its answer to it, and nobody else holds it. A sequence that
            matches its tokens splits it: the writer keeps the lower part, of at least one token.
        answer_at: index in the sequence from which its tokens are an answer's.
        last_used: the cache's clock when it was last released.
        rank: set then; of runs that nobody holds, the lowest is evicted first.
        is_continued: a sequence has continued from its end.
        is_shared: a second one has.
        is_turn: it goes on from an earlier answer, or from the prompt before it.
        is_wanted: a request may come back to it, though nothing has continued from it yet.
        snapshot: slot of the recurrent state after its last token; -1: there is none.
        maker: the object that will take that snapshot when it comes there, or None.
        is_branch: planned requests go on from its end in several ways.
        is_awaited: more of them are to come.
        uid: number of creation; orders rows so that a run's rows are neighbours.
    """

    __slots__ = (
        "answer_at",
        "computed",
        "grows",
        "is_awaited",
        "is_branch",
        "is_continued",
        "is_shared",
        "is_turn",
        "is_wanted",
        "last_used",
        "maker",
        "offset",
        "owner",
        "pages",
        "pages_array",
        "pins",
        "pool",
        "rank",
        "snapshot",
        "uid",
    )
    _uids = itertools.count()

    def __init__(
        self,
        tokens: Sequence[int],
        parent: Run | None,
        start: int,
        label: Label = PLAIN[0].label,
    ) -> None:
        super().__init__(tokens, parent, start, label)
        self.pages: list[int] = []
        self.pages_array: np.ndarray | None = None
        self.offset = 0
        self.computed = 0
        self.pins = 0
        self.owner: object | None = None
        self.grows = False
        self.answer_at = NO_ANSWER
        self.last_used = 0
        self.rank = 0.0
        self.is_continued = self.is_shared = self.is_turn = self.is_wanted = False
        self.snapshot = -1
        self.maker: object | None = None
        self.is_branch = self.is_awaited = False
        self.uid = next(Run._uids)
        self.pool: PagePool | None = None

    @property
    def scratch_slot(self) -> int:
        """A slot for keys and values that are never read, after those of all pages."""
        assert self.pool is not None
        return self.pool.num_tokens

    @property
    def is_held(self) -> bool:
        """Whether sequences or groups hold it, or planned requests are to come to its end."""
        return self.pins > 0 or self.is_awaited

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens have KV."""
        return self.computed >= len(self.tokens)

    @property
    def num_matchable(self) -> int:
        """All tokens; of a run that `grows` those that have KV, without the last one."""
        return min(self.computed, len(self.tokens) - 1) if self.grows else len(self.tokens)

    @property
    def kind(self) -> int:
        """0: a first prompt; 1: a turn of a conversation."""
        return int(self.is_turn or self.is_continued)

    def split_off(self, at: int) -> Run:
        """Split without copying: if the cut falls inside a page, both parts refer to it."""
        upper = super().split_off(at)
        upper.pool, upper.owner = self.pool, self.owner
        upper.pins, upper.last_used, upper.rank = self.pins, self.last_used, self.rank
        upper.is_continued, upper.is_shared = True, self.is_shared
        upper.is_wanted = self.is_wanted
        upper.is_turn = self.is_turn
        upper.answer_at = self.answer_at
        upper.offset = self.offset
        upper.computed = min(self.computed, at)
        self.computed -= upper.computed
        assert self.pool is not None
        cut = self.offset + at
        whole, inside = divmod(cut, self.pool.page_size)
        upper.pages = self.pages[: whole + (inside > 0)]
        if inside and len(self.pages) > whole:
            self.pool.share(self.pages[whole], held=self.pins > 0)
            self.pages, self.offset = self.pages[whole:], inside
        else:
            self.pages, self.offset = self.pages[whole:], 0
        self.pages_array = upper.pages_array = None
        return upper

    def page_ids(self) -> np.ndarray:
        """`pages` as int32 `[len(pages)]`."""
        if self.pages_array is None or len(self.pages_array) != len(self.pages):
            self.pages_array = np.array(self.pages, dtype=np.int32)
        return self.pages_array

    def slots(self, first: int, end: int) -> np.ndarray:
        """Slots of tokens first..end-1 of this run, int64."""
        assert self.pool is not None
        index = np.arange(self.offset + first, self.offset + end)
        size = self.pool.page_size
        return self.page_ids()[index // size].astype(np.int64) * size + index % size
