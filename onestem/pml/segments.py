"""Segments: what is computed once, what is computed for a prompt, and which token sees which.

A *segment* is a stretch of tokens at consecutive positions that is stored as one run. Cached
segments depend on the schema alone. A segment's keys and values are a function of its token ids,
its position and the segments that it attended to. A hash of these (`key`) names them, in which
positions are distances to what it attended to: where only distances count, it serves any position.

Three isolations are rules of which token sees which (docs/pml.md): `anchored`, `isolated`, `off`.
In `isolated` (Prompt Cache, section 3.3) cached text sees its own module alone, with placeholder
tokens in place of parameters. In `off` the same tokens at the same positions are all computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast, get_args

import numpy as np

from onestem.errors import ConfigError
from onestem.pml.layout import Layout, Slot, Span

Isolation = Literal["anchored", "isolated", "off"]
ISOLATIONS: tuple[str, ...] = get_args(Isolation)
SegmentKind = Literal["cached", "placeholder", "argument", "text"]


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens at consecutive positions: one run.

    Attributes:
        kind: `cached`: text of the schema, stored. `placeholder`: tokens in place of an argument,
            computed only together with the cached text of their module. `argument`. `text`: new
            text of the prompt, and text of the schema that is computed for each request.
        token_ids: int32 `[n]`.
        position: of the first token.
        origin: where the tokens come from, for display.
        attends: the earlier cached and placeholder segments that a cached or placeholder segment
            sees whole: indices of a prompt's segments, or keys of `Encoding.segments`. It sees its
            own tokens causally.
        key: names the KV of a cached or placeholder segment, apart from position, model and dtype;
            else "".
        in_use: leading tokens that this prompt uses. Fewer than all only where a prompt ends
            without own tokens: its last token is then computed, so that it has logits.
        hidden: ranges of them, ascending, that this prompt computes itself and does not see here.
        home: where it is stored if it serves any position; None: where its first prompt has it.
    """

    kind: SegmentKind
    token_ids: np.ndarray
    position: int
    origin: str
    attends: tuple[int, ...] = ()
    key: str = ""
    in_use: int = -1
    hidden: tuple[tuple[int, int], ...] = ()
    home: int | None = None

    def __post_init__(self) -> None:
        if self.in_use < 0:
            object.__setattr__(self, "in_use", len(self.token_ids))

    @property
    def end(self) -> int:
        """The position of its last token in use + 1."""
        return self.position + self.in_use

    @property
    def seen(self) -> Iterator[tuple[int, int]]:
        """Ranges of its tokens that the prompt sees."""
        at = 0
        for first, end in (*self.hidden, (self.in_use, self.in_use)):
            if first > at:
                yield at, first
            at = end

    @property
    def is_encoded(self) -> bool:
        """Whether its tokens are computed with the schema, not for a prompt."""
        return self.kind in ("cached", "placeholder")

    def with_last_computed(self) -> tuple[Segment, Segment]:
        """This one without its last token in use, and that as one which is computed."""
        at = self.in_use - 1
        last = Segment("text", self.token_ids[at : self.in_use], self.end - 1, self.origin)
        return replace(self, in_use=at), last


@dataclass(frozen=True, eq=False)
class CompiledPrompt:
    """A prompt as segments: the encoded ones, then the computed ones, each by position.

    The last token is a computed one at the highest position: its logits begin the answer.

    Attributes:
        next_position: of the answer's first token.
    """

    schema: str
    isolation: Isolation
    segments: tuple[Segment, ...]
    next_position: int

    @cached_property
    def token_ids(self) -> np.ndarray:
        """int32 `[num_tokens]`: tokens in use, in the order of the segments."""
        return _joined([s.token_ids[: s.in_use] for s in self.segments])

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 `[num_tokens]`."""
        return _joined([np.arange(s.position, s.end, dtype=np.int32) for s in self.segments])

    @cached_property
    def ordered_token_ids(self) -> np.ndarray:
        """int32: tokens in use except placeholders, in the order of their positions."""
        shown = [segment for segment in self.segments if segment.kind != "placeholder"]
        shown.sort(key=lambda segment: segment.position)  # no two share a position
        return _joined([segment.token_ids[: segment.in_use] for segment in shown])

    @property
    def num_tokens(self) -> int:
        """Tokens in use, placeholders among them."""
        return sum(segment.in_use for segment in self.segments)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV may come from the store (placeholders are not seen and not counted)."""
        cached = (one for one in self.segments if one.kind == "cached")
        return sum(end - first for one in cached for first, end in one.seen)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are always computed for this prompt."""
        return sum(segment.in_use for segment in self.segments if not segment.is_encoded)


class Encoding:
    """The part of a schema that is computed once, under one isolation.

    Attributes:
        segments: text and placeholders, by the indices of their spans and slots in the layout; each
            comes after those that it attends to.
    """

    def __init__(self, layout: Layout, isolation: Isolation) -> None:
        self.layout = layout
        self.isolation = parse_isolation(isolation)
        self.segments: dict[int, Segment] = {}
        if isolation == "off":
            return
        for item in layout.items():
            if item.block.cached and (isinstance(item, Span) or self._is_attended(item)):
                self._add(item)

    def in_prompt(self, indices: Iterable[int]) -> list[Segment]:
        """Some of the segments, with all that they attend to, as a prompt has them."""
        place = {index: number for number, index in enumerate(indices)}
        return [
            replace(one, attends=tuple(place[other] for other in one.attends))
            for one in map(self.segments.__getitem__, place)
        ]

    def prompts(self) -> Iterator[CompiledPrompt]:
        """A prompt for each cached segment: it imports that and what it attends to, nothing else.

        Its own token is the segment's last one, so it needs no positions beyond the schema's.
        """
        for index, target in self.segments.items():
            if target.kind == "cached":
                segments = self.in_prompt([*target.attends, index])
                segments[-1:] = segments[-1].with_last_computed()
                schema = self.layout.schema.name
                yield CompiledPrompt(schema, self.isolation, tuple(segments), target.end)

    def _add(self, item: Span | Slot) -> None:
        attends = tuple(sorted(other.index for other in self._attended(item)))
        seen = [self.segments[index] for index in attends]
        ids = item.token_ids if isinstance(item, Span) else self._placeholders(item)
        self.segments[item.index] = Segment(
            kind="cached" if isinstance(item, Span) else "placeholder",
            token_ids=ids,
            position=item.position,
            origin=str(item.block),
            attends=attends,
            key=segment_key(
                self.isolation, ids, [(item.position - one.position, one.key) for one in seen]
            ),
        )

    def _attended(self, item: Span | Slot) -> list[Span | Slot]:
        if self.isolation == "isolated":
            # Each stretch of the schema's own text counts as a module without a name.
            before = [] if item.block.module is None else item.block.items
            return [other for other in before if other.index < item.index]
        return [
            span
            for block in item.block.enclosing()
            if block.cached
            for span in block.spans
            if span.index < item.index
        ]

    def _is_attended(self, slot: Slot) -> bool:
        """Whether text of its module follows a placeholder, so that it must be computed."""
        return self.isolation == "isolated" and any(
            span.index > slot.index for span in slot.block.spans
        )

    def _placeholders(self, slot: Slot) -> np.ndarray:
        token = self.layout.tokenizer.placeholder_token_id
        if token is None:
            raise ConfigError(
                f"isolation is isolated, parameter {slot.parameter.name} needs placeholder tokens, "
                "and the tokenizer has no unknown and no padding token: use anchored"
            )
        return np.full(slot.parameter.length, token, dtype=np.int32)


def segment_key(isolation: str, ids: np.ndarray, attended: Iterable[tuple[int, str]]) -> str:
    """`Segment.key` of ids int32 `[n]`; `attended`: the distance of what the segment attends to,
    from there to here, and its key."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"pml 2 {isolation} {len(ids)} ".encode())
    digest.update(ids.astype("<i4").tobytes())
    for distance, key in attended:
        digest.update(f"{distance} {key} ".encode())
    return digest.hexdigest()


def parse_isolation(name: str) -> Isolation:
    """The isolation with this name; other names are refused."""
    if name not in ISOLATIONS:
        raise ConfigError(f"isolation is {name!r}, expected one of {', '.join(ISOLATIONS)}")
    return cast(Isolation, name)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
