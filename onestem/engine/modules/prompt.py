"""A prompt in PML as the engine runs it: which module runs it imports, and what it computes itself.

What a prompt computes (arguments, new text, the answer) is a sequence like any other, with jumps of
positions. What it imports are runs beside it, each seen by the rows after it (`anchored`) or by all
(`isolated`). `docs/pml.md` has the rules.

Repaired documents leave a prompt many short stretches of its own, and hide as many pieces of what
it imports. As runs they would each take a page and a span. So what such a prompt computes is one
run, whose positions jump, where the model's attention allows that.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from onestem.cache import ModuleRun, ModuleStore
from onestem.models.description import Description
from onestem.pml import CompiledPrompt, DocumentsPrompt, Segment
from onestem.tree import Label, Stretch


@dataclass(frozen=True, slots=True)
class Import:
    """Tokens begin..in_use-1 of an encoded segment are seen by a sequence's tokens from `first`
    on."""

    segment: int
    first: int
    begin: int
    in_use: int


@dataclass(frozen=True, slots=True, eq=False)
class ImportedRun:
    """What a sequence's tokens see of a segment's run, whose token 0 they would see at `position`.

    Attributes:
        pieces: int64 `[n, 3]`, columns `first`, `begin` and `in_use` of its `Import`s, ascending.
    """

    run: ModuleRun
    pieces: np.ndarray
    position: int

    @property
    def shift(self) -> int:
        """How many positions further than it was stored the run is seen."""
        return self.position - self.run.position

    @property
    def whole(self) -> bool:
        """Whether all of the run's tokens are seen, from one token on."""
        (_, begin, in_use), *more = self.pieces.tolist()
        return not more and in_use - begin == len(self.run.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """int64 `[n]`, ascending: the run's tokens that the sequence's last one sees."""
        return np.concatenate([np.arange(a, b) for _, a, b in self.pieces.tolist()])


class PmlPrompt:
    """A compiled prompt, taken apart for the engine.

    Args:
        salt: of what it computes for itself; module_salt: of the modules that it imports.
        model: what it runs on; None: each position has its own modules, and a run no jumps.
        chooses: its question's rows are there to choose what is repaired: only others that choose
            may find them.
        private: no other sequence may use the runs that it imports (`share="off"`).

    Attributes:
        tokens: ids that are computed for the prompt, in the order of their positions.
        stretches: where they and the answer are, and which runs they may share: those of prompts
            that see the same modules.
        encoded: segments that are computed once for all prompts, and their placeholders, each
            after those that it attends to.
        imports: what the tokens see of these, segment by segment.
        moves: a module's keys and values serve any position; else each position has its own.
    """

    def __init__(
        self,
        compiled: CompiledPrompt,
        salt: str,
        module_salt: str,
        model: Description | None,
        *,
        chooses: bool = False,
        private: bool = False,
    ) -> None:
        own = [segment for segment in compiled.segments if not segment.is_encoded]
        self.encoded = tuple(segment for segment in compiled.segments if segment.is_encoded)
        self.tokens = array("i", np.concatenate([segment.token_ids for segment in own]).tolist())
        self.salt = salt
        self.module_salt = module_salt
        self._chooses = chooses
        self.private = private
        self.moves = model is not None and model.sees_distances and not private
        positions = np.concatenate([np.arange(s.position, s.end) for s in own])
        self.imports = tuple(self._imports(positions, isolated=compiled.isolation == "isolated"))
        may_jump = model is not None and not model.asks_for_places
        joins = may_jump and isinstance(compiled, DocumentsPrompt)
        self.stretches = tuple(self._stretches(positions, compiled.next_position, joins=joins))

    def _imports(self, positions: np.ndarray, *, isolated: bool) -> Iterator[Import]:
        for index, segment in enumerate(self.encoded):
            seen = list(segment.seen) if segment.kind == "cached" else []
            begins = np.array([begin for begin, _ in seen], np.int64) + segment.position
            firsts = np.searchsorted(positions, begins) * (not isolated)
            for first, (begin, end) in zip(firsts.tolist(), seen, strict=True):
                yield Import(index, first, begin, end)

    def _stretches(
        self, positions: np.ndarray, next_position: int, *, joins: bool
    ) -> Iterator[Stretch]:
        """joins: all from the first jump or import on is one."""
        shifts = np.append(positions, next_position) - np.arange(len(positions) + 1)
        jumps = (np.flatnonzero(np.diff(shifts)) + 1).tolist()
        starts = ends = sorted({0, *jumps, *(one.first for one in self.imports)})
        if joins and len(starts) > 1:
            starts, ends = starts[:2], [0, len(positions)]
        spaces = self._spaces(ends)
        for at, end in zip(starts, ends, strict=True):
            inside = jumps[bisect_right(jumps, at) : bisect_right(jumps, end)]
            before = tuple((jump, int(shifts[jump - 1])) for jump in inside)
            yield Stretch(at, Label(next(spaces), int(shifts[end]), before))

    def _spaces(self, tokens: Iterable[int]) -> Iterator[Hashable]:
        """Names for what ascending tokens see that is not on their path."""
        later = sorted(self.imports, key=lambda one: one.first)[::-1]
        digest = hashlib.blake2b(b"chooses " if self._chooses else b"", digest_size=16)
        for token in tokens:
            while later and later[-1].first <= token:
                one = later.pop()
                its = self.encoded[one.segment]
                digest.update(f"{its.key} {its.position} {one.begin} {one.in_use} ".encode())
            seen = len(later) < len(self.imports)
            yield (self.salt, digest.hexdigest()) if seen else self.salt

    def num_pages(self, page_size: int) -> int:
        """Maximum pages that it takes in an empty cache before its answer begins."""
        bounds = [stretch.start for stretch in self.stretches if stretch.start < len(self.tokens)]
        own = np.diff([*bounds, len(self.tokens)]).tolist()
        runs = {run_name("", one, moves=self.moves): len(one.token_ids) for one in self.encoded}
        return sum(-(-length // page_size) for length in (*runs.values(), *own))

    def most_tokens(self, *, max_positions: int, num_pages: int, page_size: int) -> int:
        """Own tokens, those of the answer included, that the model's positions and an otherwise
        empty cache have room for."""
        start, label = self.stretches[-1]
        own = len(self.tokens)
        free = (num_pages - self.num_pages(page_size)) * page_size
        # The answer fills the last page first, unless it begins a run of its own.
        slack = (start - own) % page_size if start < own else 0
        return min(max_positions - label.shift, own + slack + free)


def run_name(salt: str, segment: Segment, *, moves: bool) -> tuple[Hashable, ...]:
    """By which a segment's run is found; see `PmlPrompt.moves`."""
    return salt, segment.key, None if moves else segment.position


def place_of(segment: Segment, *, moves: bool) -> int:
    """Where a segment is stored, if what it attends to is stored as the prompt has it."""
    return segment.home if moves and segment.home is not None else segment.position


class SequenceModules:
    """The module runs of an admitted sequence, pinned.

    Args:
        store: of the runs.
        prompt: what the sequence imports.
        owner: the sequence: it computes what is not there.

    Attributes:
        seen: what the sequence's tokens see of them.
    """

    def __init__(self, store: ModuleStore, prompt: PmlPrompt, owner: object) -> None:
        self.prompt = prompt
        self._store = store
        self._owner = owner
        self._runs: dict[int, ModuleRun] = {}
        for index, segment in enumerate(prompt.encoded):
            if segment.kind == "cached":
                self._attach(index, segment)
        self.seen = tuple(
            ImportedRun(
                self._runs[index],
                np.array([(one.first, one.begin, one.in_use) for one in pieces]),
                prompt.encoded[index].position,
            )
            for index, pieces in groupby(prompt.imports, lambda one: one.segment)
        )

    def _attach(self, index: int, segment: Segment) -> None:
        moves, private = self.prompt.moves, self.prompt.private
        position = place_of(segment, moves=moves) + (self._frame(segment) if moves else 0)
        name = run_name(self.prompt.module_salt, segment, moves=moves)
        name = (*name, id(self._owner)) if private else name
        kept = not private and segment.kind == "cached"
        self._runs[index] = self._store.attach(
            name, segment.token_ids, position, self._owner, kept=kept
        )

    def _frame(self, segment: Segment) -> int:
        """How much further what a segment attends to was stored than the prompt has it: if it is
        new, the segment is stored so too."""
        held = (other for other in segment.attends if other in self._runs)
        encoded = self.prompt.encoded
        places = (self._runs[i].position - place_of(encoded[i], moves=True) for i in held)
        return next(places, 0)

    @property
    def complete(self) -> bool:
        """Whether what the sequence sees is computed, or will be in the present step."""
        return all(one.run.complete for one in self.seen)

    def missing(self, load: Callable[[ModuleRun], bool]) -> Iterator[tuple[int, ModuleRun]]:
        """Runs that are still to be computed, with the placeholders that they attend to, in their
        order. `load` may find a run elsewhere: it is complete then."""
        needed: set[int] = set()
        for one in self.prompt.imports:
            run = self._runs[one.segment]
            if not run.complete and not (run.computed == 0 and load(run)):
                needed.update((one.segment, *self.prompt.encoded[one.segment].attends))
        for index in sorted(needed):
            if index not in self._runs:
                self._attach(index, self.prompt.encoded[index])
            if not self._runs[index].complete:
                yield index, self._runs[index]

    def attended(self, index: int) -> list[tuple[ModuleRun, int]]:
        """Runs that the tokens of a run see whole, and how many positions further than they were
        stored."""
        encoded, here = self.prompt.encoded, self._runs[index].position
        frame = here - encoded[index].position
        seen = ((self._runs[i], encoded[i].position) for i in encoded[index].attends)
        return [(run, position + frame - run.position) for run, position in seen]

    def missing_pages(self) -> int:
        """Pages still to be allocated, for runs that this sequence is to compute."""
        return sum(
            max(0, self._store.pool.pages_for(len(run.tokens)) - len(run.pages))
            for run in set(self._runs.values())
            if not run.complete and run.owner in (None, self._owner)
        )

    def release_placeholders(self) -> None:
        """Release placeholders once what attends to them is computed: nothing else sees them."""
        placeholders = self._runs.keys() - {one.segment for one in self.prompt.imports}
        if placeholders and self.complete:
            for index in placeholders:
                self._store.unpin(self._runs.pop(index))

    def fork(self, owner: object) -> SequenceModules:
        """The same for a sequence that goes on beside this one."""
        return SequenceModules(self._store, self.prompt, owner)

    def release(self) -> None:
        """Release all; others that hold unfinished runs may take them over."""
        for run in self._runs.values():
            if run.owner is self._owner:
                run.owner = None
            self._store.unpin(run)
        self._runs.clear()
