"""Schemas at hand: by name, with what a next prompt may want."""

from __future__ import annotations

import pytest

from onestem.errors import ConfigError
from onestem.pml import Import, Library, Module, PmlError, Prompt, Schema, Union
from tests.pml.characters import Characters, text_of

SCHEMA = Schema(
    "s",
    [
        Union(
            [
                Module("a", ["aa", Union([Module("x", ["xx"]), Module("y", ["yy"])])]),
                Module("b", ["bb"]),
                Module("c", ["cc"], cache=False),
            ]
        ),
        Module("d", ["dd"]),
    ],
)


@pytest.fixture
def library():
    library = Library(Characters())
    library.add(SCHEMA)
    return library


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_other_members_of_unions(library, isolation):
    def others(*imports: Import) -> set[str]:
        compiled = library.compile(Prompt("s", [*imports, "?"]), isolation)
        return {text_of(s.token_ids).strip() for s in library.alternatives(compiled)}

    assert others(Import("d")) == set()
    assert others(Import("b")) == {"aa"}
    assert others(Import("a", {}, [Import("y")])) == {"bb", "xx"}
    assert others(Import("c")) == set()  # nothing of it is cached: its union is not seen


def test_isolations_are_encoded_once_each(library):
    assert library.encoding("s", "anchored") is library.encoding("s", "anchored")
    assert library.encoding("s", "anchored") is not library.encoding("s", "isolated")
    with pytest.raises(ConfigError, match="isolation is 'far'"):
        library.compile(Prompt("s", ["?"]), "far")
    with pytest.raises(PmlError, match="'t'"):
        library.compile(Prompt("t", ["?"]))


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_encoding_prompts_have_each_cached_segment_once(library, isolation):
    encoding = library.encoding("s", isolation)
    prompts = list(encoding.prompts())
    keys = [segment.key for segment in encoding.segments.values() if segment.kind == "cached"]
    targets = [[s for s in prompt.segments if s.is_encoded][-1] for prompt in prompts]
    assert [target.key for target in targets] == keys
    for prompt, target in zip(prompts, targets, strict=True):
        assert target.in_use == len(target.token_ids) - 1
        assert prompt.next_position <= library.layouts["s"].end
        assert prompt.positions.max() == prompt.next_position - 1
