"""What a job would save if the fields of its prompts had another order."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onestem.batch import JobInput, SpooledPrompts
from onestem.batch.format import BatchLine, BatchRequest, parse_line
from onestem.batch.pieces import NAMELESS, Message, Piece, joined, parts_of
from onestem.batch.spool import Spool
from onestem.batch.template_pieces import rendered, sources, template_pieces
from onestem.batch.text_pieces import TextPieces
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from onestem.openai.read import Prompt
from onestem.planner import JobPlan
from onestem.planner.fields import best_order, costs_in
from onestem.rawtext import RawText
from onestem.tree import num_common

IntArray = npt.NDArray[np.int64]

SAMPLE = 2000  # prompts that labels and dates are learnt from
CHUNK = 256  # prompts that are tokenised at once
EXAMPLES = 3
EXAMPLE_CHARACTERS = 80
END_CHARACTERS = 500  # of a long prompt's beginning and end
TITLE_CHARACTERS = 32
LEAST_GAIN = 0.005  # share of the prompt tokens; a smaller gain is not reported
MOST_PIECES = 24
MOST_FAMILIES = 20


@dataclass(eq=False)
class _Family:
    """Prompts with the same pieces.

    Attributes:
        names: of the pieces; roles: of the messages that they are in.
        values, lengths: of each prompt's pieces, prompt after prompt.
        lines: the line of each prompt. examples: some texts of each piece.
    """

    names: Sequence[str]
    roles: Sequence[str | None]
    values: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    examples: list[list[str]] = field(default_factory=list)

    def add(self, line: int, pieces: Sequence[Piece]) -> None:
        self.lines.append(line)
        self.values.extend(hash(piece.text) for piece in pieces)
        self.lengths.extend(len(piece.text) + len(piece.gap) for piece in pieces)
        self.examples = self.examples or [[] for _ in pieces]
        for told, piece in zip(self.examples, pieces, strict=True):
            text = piece.text
            short = (
                text if len(text) <= EXAMPLE_CHARACTERS else text[: EXAMPLE_CHARACTERS - 1] + "…"
            )
            if len(told) < EXAMPLES and short not in told:
                told.append(short)

    def table(self, numbers: array[int]) -> IntArray:
        """`[num_pieces, num_prompts]`"""
        return np.array(numbers, np.int64).reshape(-1, len(self.names)).T

    def order(self, distinct: Sequence[int]) -> list[int]:
        """The order to try. A piece that ends all prompts alike stays at the end."""
        fixed = len(self.names) > 1 and distinct[-1] == 1
        return best_order(self.table(self.values), self.table(self.lengths), last=int(fixed))


@dataclass(frozen=True)
class Advice:
    """What another order of a job's fields would save.

    Attributes:
        fields: of prompts that are made alike, in their order: an object each with name, role,
            distinct (how many values), characters (mean) and examples. `shared` is the share of its
            text that earlier prompts have computed, `shared_reordered` that in the better order.
        prompts: how many are made like this.
        shared_tokens: number of tokens that all of these prompts begin with.
        order: of the fields, if another one saves more; None: none does.
        moved: fields that a later one goes before in that order.
        plan: of all prompts with their fields in that order. reordered: these prompts.
        example: a prompt in that order: role and text of each message (of a long text its ends).
        template: the template in that order, likewise; empty: the job has none.
    """

    fields: Sequence[dict[str, Any]]
    prompts: int
    shared_tokens: int
    order: Sequence[int] | None = None
    moved: Sequence[int] = ()
    plan: JobPlan | None = None
    reordered: SpooledPrompts | None = None
    example: Sequence[tuple[str | None, str]] = ()
    template: Sequence[tuple[str | None, str]] = ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict, with the counts of the plan's report."""
        known = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del known["plan"], known["reordered"]
        report = None if self.plan is None else self.plan.report
        return known | {
            "processed_tokens": None if report is None else report.processed_tokens,
            "logical_prompt_tokens": None if report is None else report.logical_prompt_tokens,
            "saving": None if report is None else report.saving,
        }


class Advisor:
    """Looks for a better order of a job's fields.

    Args:
        source: the job, which is read again.
        spool: what the first pass has kept of it. indices: of its good lines.
        planner: the job's.
    """

    def __init__(
        self,
        source: JobInput,
        spool: Spool,
        indices: IntArray,
        tokenizer: Tokenizer,
        planner: Callable[..., JobPlan],
    ) -> None:
        self._source, self._spool, self._indices = source, spool, indices
        self._tokenizer, self._planner = tokenizer, planner
        self._numbers = set(spool.line_numbers[indices].tolist())
        recipe = source.recipe
        is_known = recipe is not None and recipe.kind != "score"
        self._slots = template_pieces(recipe) if recipe is not None and is_known else None
        self._pieces = TextPieces(self._sample() if self._slots is None else ())

    def advise(self, plan: JobPlan, folder: Path) -> Advice | None:
        """What another order would save; None where prompts have no fields.

        Args:
            plan: of the job as it is.
            folder: for the ids of the prompts in that order.
        """
        families = self._families()
        large = [one for one in families if len(one.lines) > 1][:MOST_FAMILIES]
        if not large:
            return None
        orders: dict[int, list[int]] = {}
        found = []
        for family in large:
            distinct = [len(np.unique(row)) for row in family.table(family.values)]
            order = family.order(distinct)
            if order != sorted(order):
                orders |= dict.fromkeys(family.lines, order)
            found.append((family, distinct, order))
        # Report the first family whose order changes, else the largest.
        family, distinct, order = next((one for one in found if one[2] != sorted(one[2])), found[0])
        advice = self._described(family, distinct, order)
        if not orders:
            return advice if len(family.names) > 1 else None
        try:
            prompts, example = self._in_other_order(orders, folder, family.lines[0])
        except RequestError:  # a chat template that takes no system message without text
            return advice
        lengths = self._spool.output_lengths(self._indices)
        other = self._planner(prompts, output_lengths=lengths)
        if other.report.saving - plan.report.saving < LEAST_GAIN:
            return advice
        return dataclasses.replace(
            advice,
            order=order,
            moved=_moved(order),
            plan=other,
            reordered=prompts,
            example=example,
            template=self._template(order),
        )

    def _template(self, order: Sequence[int]) -> list[tuple[str | None, str]]:
        """The job's template in another order."""
        messages = sources(self._slots or ())
        texts = joined(messages, order) if messages else []
        return [(one.role, text) for one, text in zip(messages, texts, strict=True)]

    def _sample(self) -> Iterator[Sequence[tuple[str | None, str]]]:
        step = -(-len(self._indices) // SAMPLE)
        for place, (_, request) in enumerate(self._requests()):
            if place % step == 0:
                parts = parts_of(request.prompt)
                if parts is not None:
                    yield parts

    def _requests(self) -> Iterator[tuple[int, BatchRequest]]:
        """Good lines, by number."""
        for number, line in self._source.read(lambda _: None):
            if number in self._numbers and isinstance(line, BatchLine):
                yield number, parse_line(line, self._source.parse_special)

    def _messages(self) -> Iterator[tuple[int, list[Message], Prompt]]:
        """Number, pieces and prompt of each good line that has pieces."""
        recipe = self._source.recipe
        if self._slots is None or recipe is None:
            for number, request in self._requests():
                parts = parts_of(request.prompt)
                if parts is not None and not request.is_scored:
                    yield number, self._pieces.of(parts), request.prompt
            return
        for number, row in self._source.rows():
            if number in self._numbers:
                request = parse_line(recipe.line(number, row), self._source.parse_special)
                yield number, rendered(self._slots, row), request.prompt

    def _families(self) -> list[_Family]:
        """The largest first."""
        families: dict[tuple[Any, ...], _Family] = {}
        for number, messages, _ in self._messages():
            pieces = [piece for message in messages for piece in message.pieces]
            if not 0 < len(pieces) <= MOST_PIECES:
                continue
            key = tuple((one.role, *(piece.name for piece in one.pieces)) for one in messages)
            if key not in families:
                roles = [message.role for message in messages for _ in message.pieces]
                families[key] = _Family([piece.name for piece in pieces], roles)
            families[key].add(number, pieces)
        return sorted(families.values(), key=lambda one: -len(one.lines))

    def _described(self, family: _Family, distinct: list[int], order: list[int]) -> Advice:
        values, lengths = family.table(family.values), family.table(family.lengths)
        total = lengths.sum(axis=1)
        shared, then = (
            (1 - np.array(costs_in(values, lengths, one)) / np.maximum(total, 1)).tolist()
            for one in (sorted(order), order)
        )
        fields = [
            {
                "name": _title(name, family.examples[i]), "role": family.roles[i],
                "distinct": distinct[i], "characters": float(lengths[i].mean()),
                "shared": shared[i], "shared_reordered": then[i],
                "examples": family.examples[i],
            }
            for i, name in enumerate(family.names)
        ]  # fmt: skip
        return Advice(fields, len(family.lines), self._shared_tokens(family))

    def _shared_tokens(self, family: _Family) -> int:
        ids = (self._spool.prompt(self._spool.index_of(line)) for line in family.lines)
        shared = next(ids)
        for other in ids:
            shared = shared[: num_common(shared, other)]
        return len(shared)

    def _in_other_order(
        self, orders: dict[int, list[int]], folder: Path, shown: int
    ) -> tuple[SpooledPrompts, list[tuple[str | None, str]]]:
        """The job's prompts with fields in other orders, and the text of one of them."""
        example: list[tuple[str | None, str]] = []
        place = np.full(len(self._spool), -1, np.int64)
        sizes, path = np.zeros(len(self._spool), np.int64), folder / "reordered"
        with open(path, "wb") as file:
            for chunk in _chunks(self._reordered(orders)):
                prompts = [prompt for _, prompt in chunk]
                for (number, prompt), tokens in zip(chunk, self._tokenized(prompts), strict=True):
                    index = self._spool.index_of(number)
                    place[index], sizes[index] = file.tell() // 4, len(tokens)
                    file.write(np.asarray(tokens, np.int32).tobytes())
                    if number == shown:
                        example = [(role, _ends(text)) for role, text in parts_of(prompt) or ()]
        ids = np.memmap(path, np.int32, "r")
        return _Reordered(self._spool, self._indices, ids, place, sizes), example

    def _reordered(self, orders: dict[int, list[int]]) -> Iterator[tuple[int, Prompt]]:
        for number, messages, prompt in self._messages():
            if number in orders:
                texts = joined(messages, orders[number])
                yield number, _with_texts(prompt, texts)

    def _tokenized(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[int]]:
        texts = [prompt.raw for prompt in prompts if prompt.raw is not None]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for prompt in prompts:
            yield (
                next(encoded)
                if prompt.raw is not None
                else self._tokenizer.apply_chat_template(
                    prompt.messages or [], **dataclasses.asdict(prompt.template)
                )
            )


def _ends(text: str) -> str:
    """Beginning and end of a text."""
    if len(text) <= 2 * END_CHARACTERS:
        return text
    return f"{text[:END_CHARACTERS]}\n[…]\n{text[-END_CHARACTERS:]}"


def _title(name: str, examples: Sequence[str]) -> str:
    """A field's name, as a terminal may show it; for text without a name, its first words."""
    nameless = name.partition(" (")[0] == NAMELESS
    words = " ".join((examples[0] if nameless else name).split())
    words = "".join(character if character.isprintable() else "·" for character in words)
    if not nameless:
        return words
    short = words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 1] + "…"
    return f"“{short}”" if len(examples) == 1 else f"text like “{short}”"


def _with_texts(prompt: Prompt, texts: Sequence[str]) -> Prompt:
    if prompt.messages is None:
        # Where a row's values have gone is not followed: it matters for names of control tokens.
        assert prompt.raw is not None
        is_quoted = prompt.raw.quoted == ((0, len(prompt.raw.text)),)
        return dataclasses.replace(prompt, raw=RawText.of(texts[0], not is_quoted))
    both = zip(prompt.messages, texts, strict=True)
    return dataclasses.replace(
        prompt, messages=[message | {"content": text} for message, text in both]
    )


def _chunks(prompts: Iterator[tuple[int, Prompt]]) -> Iterator[list[tuple[int, Prompt]]]:
    while chunk := list(islice(prompts, CHUNK)):
        yield chunk


def _moved(order: Sequence[int]) -> list[int]:
    """Pieces that now come after a later one."""
    return [
        number
        for number in sorted(order)
        if any(before > number for before in order[: order.index(number)])
    ]


class _Reordered(SpooledPrompts):
    """Prompts of a job, some of them in another order. Those are in a file of their own."""

    def __init__(
        self,
        spool: Spool,
        indices: IntArray,
        ids: npt.NDArray[np.int32],
        place: IntArray,
        sizes: IntArray,
    ) -> None:
        super().__init__(spool, indices)
        self._ids, self._at, self._sizes = ids, place[indices], sizes[indices]

    @property
    def lengths(self) -> IntArray:
        return np.where(self._at < 0, super().lengths, self._sizes)

    def __getitem__(self, i: int, /) -> npt.NDArray[np.int32]:
        first = self._at[i]
        return super().__getitem__(i) if first < 0 else self._ids[first : first + self._sizes[i]]
