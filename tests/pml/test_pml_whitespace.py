"""The whitespace rule: what of a file's layout is text, and that indenting it changes nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onestem.pml import Module, Parameter, Role, Schema, Text, Union, parse_prompt, parse_schema

EXAMPLES = Path(__file__).parents[2] / "examples" / "pml"


def texts(markup: str) -> list[str]:
    """What stands in a module: texts, and [name] for parameters."""
    schema = parse_schema(f'<schema name="s"><module name="m">{markup}</module></schema>')
    return [n.text if isinstance(n, Text) else f"[{n.name}]" for n in schema.body[0].body]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("a", "a"),
        ("  a  ", "a"),
        ("\n\n  a\n\n", "a"),
        ("\n  a\n  b\n", "a\nb"),
        ("a\n    b\n    c", "a\nb\nc"),
        ("\n  a:\n    b\n  c\n", "a:\n  b\nc"),
        ("\n    deep\n  flat\n", "  deep\nflat"),
        ("\n\ta\n\t\tb\n", "a\n\tb"),
        ("\n\ta\n  b\n", "\ta\n  b"),
        ("\n  a  \n  b\t\n", "a\nb"),
        ("\n  a\n\n      \n  b\n", "a\n\n\nb"),
        ("a   b\tc", "a   b\tc"),
        ("\n  a\n  <!-- alone --> <!-- more -->\n  b\n", "a\nb"),
        ("\n  a <!-- here -->\n  b\n", "a\nb"),
        ("<!-- first -->\n  a\n    b\n", "a\n  b"),
        ("\n <!-- two\n lines -->\n  a\n", "a"),
        ("\n  &#32;a&#10;\n", " a\n"),
        ("\n  a\n  &#9;b\n", "a\n\tb"),
        ("\n  <![CDATA[a\n    b\n  ]]>\n", "a\n  b"),
        ("a\n<![CDATA[&  ]]>\n", "a\n&"),
        ("&#32;", " "),
        ("\u00a0a\u2003", "\u00a0a\u2003"),
    ],
)
def test_rule(markup, text):
    assert texts(markup) == [text]


@pytest.mark.parametrize("markup", ["", " ", "\n\t ", "<!-- c -->", " <!-- c -->\n <!-- d --> "])
def test_nothing(markup):
    assert texts(markup) == []


def test_parameters_are_words_of_their_line():
    one, two = '<param name="p" len="1"/>', '<param name="q" len="1"/>'
    assert texts(f"\n  for {one} days\n") == ["for ", "[p]", " days"]
    assert texts(f" {one} ") == ["[p]"]
    assert texts(f"\n  a\n    {one}\n  b\n") == ["a\n  ", "[p]", "\nb"]
    assert texts(f"{one} {two}") == ["[p]", " ", "[q]"]
    assert texts(f"a, {one}{two}, b") == ["a, ", "[p]", "[q]", ", b"]


def test_each_stretch_between_tags_stands_alone():
    markup = """<schema name="s">
      Intro.
        Deeper.
      <module name="a"> x
          y</module> and <union>
      <module name="b"/> <module name="c"/> </union>
    Shallow.
    </schema>"""
    assert parse_schema(markup) == Schema(
        "s",
        [
            "Intro.\n  Deeper.",
            Module("a", ["x\ny"]),
            "and",
            Union([Module("b"), Module("c")]),
            "Shallow.",
        ],
    )


def test_preserve():
    markup = """<prompt schema="s" xml:space="preserve"> a
  b <!-- c --> <m>
 x </m><n xml:space="default">
 y </n> </prompt>"""
    prompt = parse_prompt(markup)
    assert [getattr(node, "text", None) for node in prompt.body] == [" a\n  b  ", None, None, " "]
    assert prompt.body[1].body == (Text("\n x "),)
    assert prompt.body[2].body == (Text("y"),)


def test_places_are_those_of_the_text():
    schema = parse_schema(
        '<schema name="s">\n\n   <!-- c -->one\n  <module name="m"> <param name="p" len="1"/>\n two'
        "</module>\n&#32;<union><module name='n'/></union></schema>"
    )
    one, module, space, _ = schema.body
    assert (one.at.line, one.at.column) == (3, 14)
    assert (module.body[1].at.line, module.body[1].at.column) == (5, 2)
    assert (space.at.line, space.at.column) == (6, 1)


# --- indenting changes nothing -----------------------------------------------------------------

WORDS = st.sampled_from(["a", "bc", "d e", "(f", "g &amp;"])
PARAMETER = '<param name="p" len="2"/>'


@st.composite
def sources(draw, tag="schema", depth=0):
    """Markup as (indentation level, line) pairs, every tag of a block on a line of its own."""
    names = draw(st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=2 if depth < 3 else 0))
    lines = []
    for name in [None, *names]:
        if name is not None:
            union = draw(st.booleans())
            inner = draw(sources(tag="module", depth=depth + 1))
            block = [(0, f'<module name="{name}">'), *shifted(inner), (0, "</module>")]
            lines += [(0, "<union>"), *shifted(block), (0, "</union>")] if union else block
        lines += [(0, line) for line in draw(st.lists(text_lines(tag), max_size=3))]
    return lines


@st.composite
def text_lines(draw, tag):
    indent = draw(st.sampled_from(["", "  "]))
    words = draw(st.lists(WORDS, min_size=1, max_size=2))
    return indent + " ".join(words)


def shifted(lines):
    return [(level + 1, line) for level, line in lines]


def written(lines, unit: str, base: str = "", blank: bool = False) -> str:
    body = "\n".join(base + unit * (level + 1) + line for level, line in lines)
    gap = "\n   \n" if blank else "\n"
    return f'{base}<schema name="s">{gap}{body}{gap}{base}</schema>'


@given(sources(), st.sampled_from(["", " ", "    ", "\t"]), st.sampled_from(["", "  ", "\t\t"]))
def test_indenting_changes_nothing(lines, unit, base):
    expected = parse_schema(written(lines, "  "))
    assert parse_schema(written(lines, unit, base)) == expected
    assert parse_schema(written(lines, unit, base, blank=True)) == expected


@given(sources())
def test_line_breaks_at_tags_change_nothing(lines):
    """Where no line has an indentation of its own, tags may stand on one line with the text."""
    flat = [(level, line.strip()) for level, line in lines]
    one_line = "".join(line if line.startswith("<") else f" {line}\n" for _, line in flat)
    compact = parse_schema(f'<schema name="s">{one_line}</schema>')
    assert compact == parse_schema(written(flat, "    "))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/schema.xml")), ids=lambda p: p.parent.name)
def test_examples_may_be_indented(path):
    source = path.read_text()
    head, _, rest = source.partition("<schema")
    expected = parse_schema(source, folder=path.parent)
    for prefix in ("  ", "\t", "        "):
        moved = head + textwrap.indent("<schema" + rest, prefix)
        assert parse_schema(moved, folder=path.parent) == expected
    wider = "\n".join(
        line[: len(line) - len(line.lstrip())].replace("  ", "\t") + line.lstrip()
        for line in source.splitlines()
    )
    assert parse_schema(wider, folder=path.parent) == expected


def test_one_line_equals_many():
    short = (
        '<schema name="s"><system>Be brief.</system><user><module name="m">Hello <param name="p" '
        'len="2"/>!</module><union><module name="n">x</module></union>Bye.</user></schema>'
    )
    long = """
    <schema
        name="s">
      <system>
        Be brief.
      </system>

      <user>
        <module name="m">
          Hello <param name="p" len="2"/>!
        </module>
        <union>
          <module name="n">
            x
          </module>
        </union>
        Bye.
      </user>
    </schema>
    """
    schema = Schema(
        "s",
        [
            Role("system", "Be brief."),
            Role(
                "user",
                [
                    Module("m", ["Hello ", Parameter("p", 2), "!"]),
                    Union([Module("n", "x")]),
                    "Bye.",
                ],
            ),
        ],
    )
    assert parse_schema(short) == parse_schema(long) == schema
