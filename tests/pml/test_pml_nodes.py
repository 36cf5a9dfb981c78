"""Nodes: canonical bodies, equality, and what no node may be."""

from __future__ import annotations

import dataclasses

import pytest

from onestem.errors import OnestemError, RequestError
from onestem.pml import (
    Argument,
    Import,
    Module,
    Parameter,
    Place,
    PmlError,
    Prompt,
    Role,
    Schema,
    Text,
    Union,
    parse_prompt,
    parse_schema,
)

CITIES = Schema(
    "cities",
    [
        Role("system", ["You plan trips."]),
        Role(
            "user",
            [
                Module("trip-plan", ["I have ", Parameter("duration", 8), " & like < 3 towns."]),
                Union(
                    [
                        Module("miami", ["Beaches."]),
                        Module("rome", ["Ruins.", Module("food", [Parameter("dish", 3, "pasta")])]),
                    ]
                ),
                "Answer in one line.",
            ],
        ),
        Module("secret", ["x"], cache=False),
    ],
)
CITIES_MARKUP = """
<!-- a comment -->
<schema name="cities">
  <system>You plan trips.</system>
  <user>
    <module name="trip-plan">
      I have <parameter name="duration" length="8"/> &amp; like <![CDATA[< 3 towns.]]>
    </module>
    <union>
      <module name="miami" cache="true">Beaches.</module>
      <module name="rome">
        Ruins.
        <module name="food"><param default="pasta" len="3" name="dish"/></module>
      </module>
    </union>
    Answer <!-- not in two -->in one line.
  </user>
  <module name="secret" cache="false">x</module>
</schema>
"""
TRIP = Prompt(
    "cities",
    [
        Import("trip-plan", {"duration": "3 days"}),
        Import("rome", body=["Go.", Import("food")]),
        Role("user", ["Highlight the surf spots."]),
    ],
)
TRIP_MARKUP = """<prompt schema="cities">
  <trip-plan duration="3 days"/>
  <rome>Go.<food/></rome>
  <user>Highlight the surf spots.</user>
</prompt>"""


def test_built_in_code_equals_parsed():
    assert parse_schema(CITIES_MARKUP) == CITIES
    assert parse_prompt(TRIP_MARKUP) == TRIP
    assert hash(parse_schema(CITIES_MARKUP)) == hash(CITIES)
    assert parse_schema(CITIES_MARKUP.replace("Beaches", "beaches")) != CITIES


def test_places_are_known_and_take_no_part_in_equality():
    schema = parse_schema(CITIES_MARKUP, file="cities.xml")
    system = schema.body[0]
    assert isinstance(system, Role)
    assert schema.at == Place("cities.xml", 3, 1)
    assert system.at == Place("cities.xml", 4, 3)
    assert system.body[0].at == Place("cities.xml", 4, 11)
    moved = dataclasses.replace(schema, at=None)
    assert moved == schema
    assert "cities.xml" not in repr(schema)


def test_nodes_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CITIES.body[0].role = "user"


def test_neighbouring_texts_are_one_and_empty_ones_none():
    assert Module("m", ["a", Text(""), "b", Text("c")]).body == (Text("abc"),)
    assert Module("m", "abc") == Module("m", [Text("abc")])
    assert Module("m", [""]) == Module("m")
    assert Module("m", ["a", Parameter("p", 1), "b"]).body == (
        Text("a"),
        Parameter("p", 1),
        Text("b"),
    )


def test_nodes_may_be_of_classes_of_ones_own():
    class Document(Module):
        pass

    schema = Schema("s", [Document("m", ["a"])])
    assert schema.body == (Document("m", ["a"]),)


def test_arguments_have_no_order():
    one = Import("m", {"b": "1", "a": "2"})
    assert one == Import("m", [Argument("a", "2"), Argument("b", "1")])
    assert one.arguments == (Argument("a", "2"), Argument("b", "1"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Module("9lives"), "module name is '9lives'"),
        (lambda: Module("two words"), "module name is 'two words'"),
        (lambda: Module("user"), "'user' is a tag of the language"),
        (lambda: Parameter("p", 0), "length of parameter p is 0"),
        (lambda: Parameter("p", True), "length of parameter p is True"),
        (lambda: Parameter("", 3), "parameter name is ''"),
        (lambda: Parameter("p", 3, 4), "default of parameter p is 4, expected text"),
        (lambda: Text(3), "text is 3, expected text"),
        (lambda: Import("m", {"p": 3}), "argument p is 3, expected text"),
        (lambda: Import("m", [Argument("p", "1"), Argument("p", "2")]), "p is given twice"),
        (lambda: Module("m", [Role("user")]), "role user stands in module m"),
        (lambda: Module("m", [Parameter("p", 1), Parameter("p", 2)]), "parameter p of module m"),
        (lambda: Union([]), "union is empty"),
        (lambda: Union([Text("a")]), "text 'a' stands in a union"),
        (lambda: Role("tool"), "role is 'tool'"),
        (lambda: Schema(""), "name is empty"),
        (lambda: Schema("s", [Parameter("p", 1)]), "parameter p stands in a schema"),
        (lambda: Schema("s", separator="--"), "separator is '--', expected whitespace"),
        (lambda: Schema("s", [Module("m"), Module("m")]), "module m of the schema is defined"),
        (
            lambda: Schema("s", [Module("m"), Role("user", [Union([Module("m")])])]),
            "module m of the schema is defined twice",
        ),
        (
            lambda: Schema("s", [Module("a", [Module("m"), Union([Module("m")])])]),
            "module m of module a is defined twice",
        ),
        (lambda: Schema("s", [Role("user", [Import("m")])]), "import m does not belong"),
        (lambda: Prompt("s", [Module("m")]), "module m stands in a prompt"),
        (lambda: Prompt("s", [Role("user", [Module("m")])]), "module m does not belong"),
        (lambda: Prompt("s", [Role("user")]), "<user> of a prompt is empty"),
    ],
)  # fmt: skip
def test_refused(make, message):
    with pytest.raises(PmlError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_name_may_stand_in_two_modules():
    inner = Module("hotels", ["x"])
    Schema("s", [Module("a", [inner]), Module("b", [inner]), Module("hotels")])


def test_errors_are_a_callers_mistake():
    assert issubclass(PmlError, RequestError)
    assert issubclass(PmlError, OnestemError)
