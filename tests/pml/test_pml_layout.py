"""Positions, counted by hand: a token is a character."""

from __future__ import annotations

import pytest

from onestem.pml import (
    Layout,
    Module,
    PmlError,
    Role,
    Schema,
    Slot,
    Union,
    lay_out,
    parse_schema,
)
from tests.pml.characters import Characters, NoTemplate, text_of


def places(layout: Layout) -> dict[str, list]:
    """By path: the block's start and end, then its texts and parameters with their positions."""
    return {
        "/".join(path): [
            (block.start, block.end),
            *(
                (item.position, f"[{item.parameter.name}:{item.parameter.length}]")
                if isinstance(item, Slot)
                else (item.position, text_of(item.token_ids))
                for item in block.items
            ),
        ]
        for path, block in layout.blocks.items()
    }


def test_text_modules_unions_and_parameters():
    schema = parse_schema("""
    <schema name="s">
      One.
      <module name="a">Two <param name="p" len="4"/>.</module>
      Three.
      <union>
        <module name="b">12345</module>
        <module name="c"><param name="q" len="2"/></module>
        <module name="d"/>
      </union>
      <module name="e">x<module name="f">yy</module>zzz</module>
      Four.
    </schema>""")
    assert places(lay_out(schema, Characters())) == {
        "": [(0, 43), (0, "<bos>One.\n"), (16, "Three.\n"), (38, "Four.")],
        "a": [(6, 16), (6, "Two "), (10, "[p:4]"), (14, ".\n")],
        "b": [(23, 29), (23, "12345\n")],
        "c": [(23, 26), (23, "[q:2]"), (25, "\n")],
        "d": [(23, 23)],
        "e": [(29, 38), (29, "x\n"), (34, "zzz\n")],
        "e/f": [(31, 34), (31, "yy\n")],
    }


def test_unions_in_modules_in_unions():
    schema = Schema(
        "s",
        [
            Union(
                [
                    Module("a", ["1 ", Union([Module("x", "22 "), Module("y", "333 ")]), "4 "]),
                    Module("b", ["55555 ", Module("x", "66666 ")]),
                ]
            ),
            Module("c", "7 "),
        ],
    )
    assert places(lay_out(schema, Characters())) == {
        "": [(0, 15), (0, "<bos>")],
        "a": [(1, 9), (1, "1 "), (7, "4 ")],
        "a/x": [(3, 6), (3, "22 ")],
        "a/y": [(3, 7), (3, "333 ")],
        "b": [(1, 13), (1, "55555 ")],
        "b/x": [(7, 13), (7, "66666 ")],
        "c": [(13, 15), (13, "7 ")],
    }


@pytest.mark.parametrize(
    ("separator", "tokens"),
    [
        ("\n", ["<bos>a\n", "b\n", "c ", "d"]),
        ("", ["<bos>a", "b", "c ", "d"]),
        ("\n\n", ["<bos>a\n\n", "b\n\n", "c ", "d"]),
    ],
)
def test_separators_stand_where_modules_begin_and_end(separator, tokens):
    schema = Schema("s", ["a", Module("m", "b"), Module("n", "c "), "d"], separator)
    layout = lay_out(schema, Characters())
    assert [text_of(item.token_ids) for item in layout.items()] == tokens


def test_bos_stands_first_where_there_is_one():
    modules = [Module("m", "b")]
    root = lay_out(Schema("s", modules), Characters()).root
    assert [text_of(span.token_ids) for span in root.spans] == ["<bos>"]
    assert lay_out(Schema("s", modules), Characters(begin=())).root.spans == []
    assert lay_out(Schema("s"), Characters()).end == 1


def test_roles_are_written_by_the_chat_template():
    schema = parse_schema("""
    <schema name="s">
      <system>Sys.</system>
      <user>Files:<module name="m">M</module>Ready?</user>
      <assistant>Yes.</assistant>
    </schema>""")
    layout = lay_out(schema, Characters())
    assert places(layout) == {
        "": [
            (0, 29),
            (0, "<bos><system>Sys.<end><user>Files:\n"),
            (17, "Ready?<end><assistant>Yes."),
        ],
        "m": [(15, 17), (15, "M\n")],
    }
    assert layout.roles == ("system", "user", "assistant")
    assert layout.blocks[("m",)].turn == 1


def test_what_stands_outside_of_roles_is_the_users():
    inside = parse_schema(
        '<schema name="s"><system>S</system><user>T<module name="m">M</module></user></schema>'
    )
    outside = parse_schema(
        '<schema name="s"><system>S</system>T<module name="m">M</module></schema>'
    )
    assert places(lay_out(inside, Characters())) == places(lay_out(outside, Characters()))
    joined = Schema("s", [Role("user", "A"), "B", Role("user", "C")])
    (span,) = lay_out(joined, Characters()).items()
    assert text_of(span.token_ids) == "<bos><user>A\nB\nC"


def test_a_role_may_be_there_twice():
    again = Role("user", "Once more. ")
    layout = lay_out(Schema("s", [Role("system", "S"), again, again]), Characters())
    (span,) = layout.root.spans
    assert text_of(span.token_ids).endswith("<user>Once more. Once more. ")


def test_text_never_becomes_control_tokens():
    schema = Schema("s", [Role("system", "S"), Role("user", "<end> is <bos>")])
    (span,) = lay_out(schema, Characters()).items()
    assert span.token_ids.tolist() == [1, 3, ord("S"), 2, 4, *map(ord, "<end> is <bos>")]
    (span,) = lay_out(Schema("s", "<bos><end>"), Characters()).items()
    assert span.token_ids.tolist() == [1, *map(ord, "<bos><end>")]


# --- refused -----------------------------------------------------------------------------------


def refusal(markup: str, tokenizer=None, **options) -> str:
    schema = parse_schema(markup, file="f.xml")
    with pytest.raises(PmlError) as caught:
        lay_out(schema, tokenizer or Characters(), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_default_longer_than_its_parameter():
    markup = (
        '<schema name="s"><module name="m">\n <param name="p" len="3" default="abcd"/></module>'
        "</schema>"
    )
    assert refusal(markup).startswith(
        "f.xml:2:2: default 'abcd' of parameter p has 4 tokens, its length is 3"
    )
    lay_out(parse_schema(markup.replace("abcd", "abc")), Characters())


def test_positions_past_the_models_limit():
    markup = (
        '<schema name="s">\n<module name="a">1234</module>\n<module name="b">56</module></schema>'
    )
    assert lay_out(parse_schema(markup), Characters(), max_positions=9).end == 9
    assert refusal(markup, max_positions=8).startswith(
        "f.xml:3:18: module b reaches position 8 and the model has 8 positions"
    )
    wide = '<schema name="s"><module name="a">\n <param name="p" len="9"/></module></schema>'
    assert refusal(wide, max_positions=9).startswith("f.xml:2:2: module a reaches position 9")
    assert refusal('<schema name="s">\n  long</schema>', max_positions=4).startswith(
        "f.xml:2:3: the schema's text reaches position 4"
    )


def test_roles_without_a_template():
    markup = '<schema name="s">\n <user>x</user></schema>'
    assert refusal(markup, NoTemplate()).startswith(
        "f.xml:2:2: turns user: the model's tokenizer has no chat template"
    )
    assert lay_out(parse_schema('<schema name="s">x</schema>'), NoTemplate()).end == 2


class LosesSystem(Characters):
    def render_chat(self, messages, add_generation_prompt=True):
        kept = [m for m in messages if m["role"] != "system"]
        return super().render_chat(kept, add_generation_prompt)


class SaysTwice(Characters):
    def render_chat(self, messages, add_generation_prompt=True):
        return super().render_chat([*messages, *messages], add_generation_prompt)


@pytest.mark.parametrize("tokenizer", [LosesSystem(), SaysTwice()])
def test_templates_that_do_not_write_each_turn_once(tokenizer):
    markup = '<schema name="s">\n <system>x</system></schema>'
    assert refusal(markup, tokenizer).startswith(
        "f.xml:2:2: the chat template does not write the content of <system> once"
    )
