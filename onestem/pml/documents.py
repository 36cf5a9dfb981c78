"""Documents of a prompt as modules, and which of their tokens are computed in it again.

A document's keys and values are computed once, behind the prompt's first tokens alone, and serve it
at any place of any prompt that begins with these. What they lack is what the document's tokens
would have seen before them. So a share of the tokens is *repaired*: computed with all before them
in sight, and seen in place of the stored ones: those that the question attends to most (as in
InfoFlow-KV and ProphetKV).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onestem.pml.segments import CompiledPrompt, Segment, segment_key

KIND = "documents"  # what keys are named by
# Tokens that are chosen together. Blocks of 16 lose more of the answer, those of 4 hardly less, and
# each block that is computed may be a run with pages of its own.
BLOCK = 8
# A document's own sight: at most so many of the prompt's first tokens, directly before it. Without
# any, its first token would take the place of the prompt's first one, to which all others attend.
# Where they are all that is before the first document, that one is stored as the prompt has it.
HEAD = 64


@dataclass(frozen=True)
class Documents:
    """Where documents are in a prompt whose pieces were tokenised apart: a document's tokens are
    the same ones at any place.

    Attributes:
        spans: the first token of each one, and the one after its last; ascending.
        repair: the share of their tokens that are computed with all before them in sight, from 0
            to below 1.
        lead_in: tokens after which documents other than the first are stored, where the prompt has
            as many before them. No prompt sees these, but what is stored after something like a
            document is more like what the whole prompt has.
    """

    spans: tuple[tuple[int, int], ...]
    repair: float
    lead_in: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Documents:
        """As `dataclasses.asdict` has them, with lists."""
        spans = tuple((start, end) for start, end in fields["spans"])
        return cls(spans, fields["repair"], tuple(fields.get("lead_in", ())))


@dataclass(frozen=True, eq=False)
class DocumentsPrompt(CompiledPrompt):
    """A prompt whose documents are modules: all but the first, where that follows on more than what
    modules see. Nothing of the first one is repaired.

    Attributes:
        ids: int32 `[n]`, the whole prompt.
        documents: where they are.
    """

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    documents: Documents = Documents((), 0.0)

    @property
    def question(self) -> int:
        """Where what follows the last document begins, or the last token: its rows choose."""
        return min(self.documents.spans[-1][1], len(self.ids) - 1)

    @property
    def _behind_first(self) -> list[Segment]:
        """Documents that may be repaired."""
        first = self.documents.spans[0][0]
        return [one for one in self.segments if one.origin == "document" and one.position > first]

    @property
    def num_repaired(self) -> int:
        """Tokens that are computed again, whole blocks."""
        tokens = sum(len(one.token_ids) for one in self._behind_first)
        return int(tokens * self.documents.repair) // BLOCK * BLOCK

    def repaired(self, attended: np.ndarray) -> CompiledPrompt:
        """This prompt with some tokens computed in it.

        Args:
            attended: `[n]`, how much the question attends to each of the prompt's tokens.
        """
        hidden = np.zeros(len(self.ids), bool)
        for start, end in self._chosen(attended):
            hidden[start:end] = True
        stored = [one for one in self.segments if one.is_encoded]
        return replace(self, segments=_segments(self.ids, stored, hidden))

    def _chosen(self, attended: np.ndarray) -> np.ndarray:
        """Blocks, as ranges of the prompt's tokens `[n, 2]`: those that the question attends to
        most, the earlier of equal ones."""
        starts = [np.arange(one.position, one.end, BLOCK) for one in self._behind_first]
        ends = [np.append(each[1:], one.end) for each, one in zip(starts, self._behind_first)]
        ranges = np.stack((np.concatenate(starts), np.concatenate(ends)), 1)
        sums = np.add.reduceat(np.append(attended, 0.0), ranges.ravel())[::2]
        ranges = ranges[np.argsort(-sums / np.diff(ranges)[:, 0], kind="stable")]
        return ranges[np.diff(ranges)[:, 0].cumsum() <= self.num_repaired]


def with_documents(ids: Sequence[int] | np.ndarray, documents: Documents) -> DocumentsPrompt:
    """A prompt whose documents' keys and values are looked for where they were computed."""
    array = np.asarray(ids, np.int32)
    segments = _segments(array, _stored(array, documents), np.zeros(len(array), bool))
    return DocumentsPrompt("", "anchored", segments, len(array), array, documents)


def _stored(ids: np.ndarray, documents: Documents) -> list[Segment]:
    """What is stored, by position."""
    # The prompt's last token is computed, since its logits begin the answer.
    before = documents.spans[0][0]
    modules = [(a, min(b, len(ids) - 1)) for a, b in documents.spans[before > HEAD :]]
    head, lead_in = ids[: min(before, HEAD)], np.array(documents.lead_in, np.int32)
    key = segment_key(KIND, head, ())
    after_head = [Segment("placeholder", head, 0, "head", key=key, home=0)] if len(head) else []
    key = segment_key(KIND, lead_in, [(len(head), one.key) for one in after_head])
    whole = ((0, len(lead_in)),)
    last = Segment("cached", lead_in, 0, "lead-in", key=key, hidden=whole, home=len(head))
    after_both = [*after_head, last]
    stored: list[Segment] = []
    for a, b in modules:
        if b - a < BLOCK:
            continue
        led = a > before and 0 < len(lead_in) <= a - len(head)
        behind, first = after_both if led else after_head, len(stored)
        at = a - sum(len(one.token_ids) for one in behind)
        for one in behind:
            attends = tuple(range(first, len(stored)))
            stored.append(replace(one, position=at, attends=attends))
            at = stored[-1].end
        key = segment_key(KIND, ids[a:b], [(a - one.position, one.key) for one in stored[first:]])
        attends = tuple(range(first, len(stored)))
        home = sum(len(one.token_ids) for one in behind)
        stored.append(Segment("cached", ids[a:b], a, "document", attends, key, home=home))
    return stored


def _segments(
    ids: np.ndarray, stored: Sequence[Segment], hidden: np.ndarray
) -> tuple[Segment, ...]:
    """What is stored, then what is computed, each by position. `hidden` bool `[n]`: tokens that are
    computed though a document has them."""
    own, segments = np.ones(len(ids), bool), []
    for one in stored:
        if one.origin == "document":
            a, b = one.position, one.end
            own[a:b] = hidden[a:b]
            unseen = tuple((i - a, j - a) for i, j in _stretches(hidden, a, b))
            one = replace(one, hidden=unseen)
        segments.append(one)
    computed = [Segment("text", ids[a:b], a, "prompt") for a, b in _stretches(own, 0, len(ids))]
    return (*segments, *computed)


def _stretches(marks: np.ndarray, first: int, end: int) -> list[tuple[int, int]]:
    """Where `marks` is True from first to end-1, as ranges."""
    padded = np.zeros(end - first + 2, bool)
    padded[1:-1] = marks[first:end]
    edges = (padded[1:] != padded[:-1]).nonzero()[0] + first
    return [(a, b) for a, b in edges.reshape(-1, 2).tolist()]
