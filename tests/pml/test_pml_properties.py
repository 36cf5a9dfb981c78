"""What holds for every schema and prompt: round trips, layout, masks, against naive definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onestem.engine.modules.prompt import PmlPrompt
from onestem.pml import (
    ISOLATIONS,
    CompiledPrompt,
    Encoding,
    Import,
    Module,
    Parameter,
    PmlError,
    Prompt,
    Role,
    Schema,
    Text,
    Union,
    compile_prompt,
    lay_out,
    parse,
    parse_prompt,
    parse_schema,
    to_markup,
)
from tests.pml.characters import BOS, UNKNOWN, Characters
from tests.pml.mask import segment_of, visible
from tests.pml.random_pml import TEXTS, bodies, schemas, schemas_with_prompts

roles = st.builds(Role, st.sampled_from(["system", "user", "assistant"]), bodies(1))
prompts = st.builds(
    Prompt,
    TEXTS,
    st.lists(
        TEXTS
        | st.builds(Import, st.sampled_from("uvw"), st.dictionaries(st.sampled_from("pq"), TEXTS))
        | st.builds(Role, st.just("user"), st.lists(TEXTS, min_size=1)),
        max_size=4,
    ),
)


# --- round trips -------------------------------------------------------------------------------


@settings(max_examples=50)
@given(schemas)
def test_markup_of_a_schema_parses_to_it(schema):
    assert parse_schema(to_markup(schema)) == schema


@settings(max_examples=50)
@given(st.lists(roles, max_size=3))
def test_markup_of_roles_parses_to_them(body):
    try:
        schema = Schema("s", body)
    except PmlError:  # two roles drew the same name
        assume(False)
    assert parse_schema(to_markup(schema)) == schema


@given(prompts)
def test_markup_of_a_prompt_parses_to_it(prompt):
    assert parse_prompt(to_markup(prompt)) == prompt


def test_what_markup_cannot_have():
    with pytest.raises(PmlError, match=r"has the character U\+0000, which markup cannot have"):
        to_markup(Schema("s", "a\0"))


# --- the naive definition ----------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """A token in use, and all that the design's sentences ask about it."""

    id: int
    position: int
    path: tuple[str, ...]
    kind: str  # cached, placeholder, argument or text
    stretch: int = -1  # number of the stretch of the schema's own text


class Naive:
    """Every token in use, one by one: consecutive positions, members of a union start together."""

    def __init__(self, schema: Schema, prompt: Prompt, isolation: str) -> None:
        self.separator = schema.separator
        self.isolation = isolation
        self.position = self.stretch = 0
        self.tokens: list[Token] = []
        self.end = 0  # one behind the highest position in use
        self.last = ""  # the character there
        self.put([BOS], (), True, True)
        self.last = ""
        self.scope(schema.body, (), prompt, True)
        self.answer([node.text for node in prompt.body if isinstance(node, Text)])

    def scope(self, body, path, taken, cached) -> None:
        """One level; `taken` is the prompt, the import of this module, or None."""
        imports = {i.name: i for i in taken.body if isinstance(i, Import)} if taken else {}
        for part in self.with_separators(body, ends=bool(path)):
            if isinstance(part, (Module, Union)):
                start, ends = self.position, []
                for module in [part] if isinstance(part, Module) else part.body:
                    self.position = start
                    inner = (*path, module.name)
                    self.scope(module.body, inner, imports.get(module.name), module.cache)
                    ends.append(self.position)
                self.position = max(ends)
                self.stretch += 1
            elif isinstance(part, Parameter):
                self.parameter(part, path, taken, cached)
            else:
                self.put(map(ord, part), path, cached, taken)

    def with_separators(self, body, ends):
        last = ""
        for node in [*body, None]:
            block = isinstance(node, (Module, Union))
            if (block or (node is None and ends)) and last and not last.isspace():
                yield self.separator
            if node is not None:
                last = node.text[-1] if isinstance(node, Text) else "" if block else "\0"
                yield node.text if isinstance(node, Text) else node

    def put(self, ids, path, cached, taken) -> None:
        kind = "cached" if cached and self.isolation != "off" else "text"
        for token in ids:
            if taken:
                self.tokens.append(Token(token, self.position, path, kind, self.stretch))
                self.reach(self.position + 1, chr(token))
            self.position += 1

    def parameter(self, node, path, taken, cached) -> None:
        if taken:
            values = {a.name: a.value for a in taken.arguments}
            value = values.get(node.name, node.default)
            for place, character in enumerate(value, self.position):
                self.tokens.append(Token(ord(character), place, path, "argument"))
            for place in range(self.position, self.position + node.length):
                if cached and self.isolation == "isolated":
                    self.tokens.append(Token(UNKNOWN, place, path, "placeholder", self.stretch))
            self.reach(self.position + node.length, "\0")
        self.position += node.length

    def reach(self, end, last) -> None:
        if end > self.end:
            self.end, self.last = end, last

    def answer(self, texts) -> None:
        if texts and self.last and not self.last.isspace():
            texts = [self.separator, *texts]
        for place, character in enumerate("".join(texts), self.end):
            self.tokens.append(Token(ord(character), place, (), "text"))
        used = [token for token in self.tokens if token.kind != "placeholder"]
        highest = max(used, key=lambda token: token.position)
        if highest.kind == "cached":
            self.tokens.remove(highest)
            self.tokens.append(replace(highest, kind="text"))
        self.next_position = max(self.end, highest.position + 1)


def naive_sees(row: Token, key: Token, isolation: str) -> bool:
    """Whether a token sees another, sentence by sentence."""
    before = key.position < row.position
    if row == key:
        return True
    if row.kind in ("cached", "placeholder"):
        if isolation == "isolated":
            module = row.path == key.path and (row.path != () or row.stretch == key.stretch)
            return module and before and key.kind in ("cached", "placeholder")
        return key.kind == "cached" and before and row.path[: len(key.path)] == key.path
    if key.kind == "placeholder":
        return False
    return before or (isolation == "isolated" and key.kind == "cached")


def tokens_of(compiled: CompiledPrompt) -> list[tuple[str, int, int]]:
    kinds = [compiled.segments[number].kind for number in segment_of(compiled)]
    return list(zip(kinds, compiled.positions.tolist(), compiled.token_ids.tolist(), strict=True))


@settings(max_examples=90)
@given(case=schemas_with_prompts(), isolation=st.sampled_from(ISOLATIONS))
def test_tokens_positions_and_mask_are_those_of_the_definition(case, isolation):
    schema, prompt = case
    layout = lay_out(schema, Characters())
    compiled = compile_prompt(layout, prompt, isolation)
    naive = Naive(schema, prompt, isolation)
    assert layout.end == naive.position
    assert compiled.next_position == naive.next_position
    by_name = {(token.kind, token.position, token.id): token for token in naive.tokens}
    names = tokens_of(compiled)
    assert len(names) == len(set(names))
    left_out = by_name.keys() - set(names)
    assert set(names) <= by_name.keys()
    tokens = [by_name[name] for name in names]
    mask = [[naive_sees(row, key, isolation) for key in tokens] for row in tokens]
    np.testing.assert_array_equal(visible(compiled), np.array(mask))
    # Left out are only placeholders that nothing would have seen.
    for name in left_out:
        key = by_name[name]
        assert key.kind == "placeholder"
        assert not any(naive_sees(row, key, isolation) for row in tokens)


# --- what the engine relies on -----------------------------------------------------------------


@settings(max_examples=60)
@given(case=schemas_with_prompts(), isolation=st.sampled_from(ISOLATIONS))
def test_segments_are_runs_and_imports_say_what_computed_tokens_see(case, isolation):
    schema, prompt = case
    compiled = compile_prompt(lay_out(schema, Characters()), prompt, isolation)
    segments = compiled.segments
    encoded = [segment.is_encoded for segment in segments]
    assert encoded == sorted(encoded, reverse=True)
    for number, segment in enumerate(segments):
        assert 0 < segment.in_use <= len(segment.token_ids)
        assert all(other < number and encoded[other] for other in segment.attends)
        assert bool(segment.key) == segment.is_encoded
        assert not segment.attends or segment.is_encoded
        attended = [segments[other] for other in segment.attends]
        assert all(other.in_use == len(other.token_ids) for other in attended)
        assert all(other.end <= segment.position for other in attended)
    shown = [s for s in segments if s.kind != "placeholder"]
    places = [p for s in shown for p in range(s.position, s.end)]
    assert len(places) == len(set(places))
    assert not segments[-1].is_encoded
    assert segments[-1].end == max(places) + 1 <= compiled.next_position

    rows = np.flatnonzero(~np.array(encoded)[segment_of(compiled)])
    assert (np.diff(compiled.positions[rows]) > 0).all()
    first = np.searchsorted(segment_of(compiled), np.arange(len(segments)))
    seen = np.zeros((len(rows), compiled.num_tokens), dtype=int)
    for one in PmlPrompt(compiled, "", "", None).imports:
        seen[one.first :, first[one.segment] : first[one.segment] + one.in_use] += 1
    seen[:, rows] += np.tri(len(rows), dtype=int)  # what is computed is a sequence
    np.testing.assert_array_equal(seen, visible(compiled)[rows])


@settings(max_examples=30)
@given(case=schemas_with_prompts(count=2), isolation=st.sampled_from(["anchored", "isolated"]))
def test_a_key_names_tokens_distances_and_all_that_was_attended_to(case, isolation):
    schema, *prompts = case
    layout = lay_out(schema, Characters())
    known: dict[str, object] = {}
    for prompt in prompts:
        compiled = compile_prompt(layout, prompt, isolation)
        for number, segment in enumerate(compiled.segments):
            if segment.is_encoded:
                content = contents(compiled, number)
                assert known.setdefault(segment.key, content) == content
    assert len(known) == len(set(map(repr, known.values())))
    every = Encoding(layout, isolation).segments
    assert known.keys() <= {segment.key for segment in every.values()}
    for index, segment in every.items():
        assert all(other < index and other in every for other in segment.attends)


def contents(compiled: CompiledPrompt, number: int) -> tuple:
    segment = compiled.segments[number]
    attended = tuple(
        (segment.position - compiled.segments[other].position, contents(compiled, other))
        for other in segment.attends
    )
    return (segment.token_ids.tolist(), attended)


def test_keys_differ_with_isolation_and_distances():
    def keys(schema, isolation="anchored"):
        layout = lay_out(schema, Characters())
        return {s.origin: s.key for s in Encoding(layout, isolation).segments.values()}

    schema = Schema("s", ["A", Module("m", "M")])
    assert keys(schema) == keys(Schema("t", ["A", Module("m", "M")]))
    assert keys(schema)["module m"] != keys(schema, "isolated")["module m"]
    assert keys(schema)["module m"] != keys(Schema("s", ["B", Module("m", "M")]))["module m"]
    moved = Schema("s", ["AB", Module("m", "M")])
    assert keys(schema, "isolated")["module m"] == keys(moved, "isolated")["module m"]
    assert keys(schema)["module m"] != keys(moved)["module m"]
    apart = Schema("s", ["B", Module("m", "M")])
    assert keys(schema, "isolated")["module m"] == keys(apart, "isolated")["module m"]


# --- damaged markup ----------------------------------------------------------------------------

DAMAGE = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 3), st.text("<>&;\"'/! a\n\0é=[]", max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(schemas_with_prompts(), DAMAGE)
def test_damaged_markup_is_refused_in_one_line_or_means_something(case, damage):
    for document in case:
        text = to_markup(document)
        for at, gone, new in damage:
            text = text[: at % len(text)] + new + text[at % len(text) + gone :] + " "
        try:
            parsed = parse(text)
        except PmlError as error:
            message = str(error)
            assert message.startswith("<text>:")
            assert len(message.splitlines()) == 1
        else:
            assert parse(to_markup(parsed)) == parsed
