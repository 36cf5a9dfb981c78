"""Prompts to segments: what is in use, where arguments and new text stand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from onestem.errors import ConfigError
from onestem.pml import (
    ISOLATIONS,
    CompiledPrompt,
    Encoding,
    Import,
    Module,
    Parameter,
    Prompt,
    Schema,
    bind,
    compile_prompt,
    find_schema,
    lay_out,
    parse_prompt,
    parse_schema,
)
from onestem.pml.place import PmlError
from tests.pml.characters import Characters, text_of

# A token is a character; "." ends each text, so that no separator is needed to count them.
#   0  <bos>Go.    5  Plan[days: 8].    18  Miami. | Rome.[food: Pasta.]    29  Tips.    34  Now.
CITIES = parse_schema(
    """
<schema name="cities" separator="">
  Go.
  <module name="plan">Plan<param name="days" length="8"/>.</module>
  <union>
    <module name="miami">Miami.</module>
    <module name="rome">Rome.<module name="food">Pasta.</module></module>
  </union>
  <module name="tips">Tips.</module>
  Now.
</schema>
"""
)
# A module that ends with its parameter.
LAST = Schema("s", [Module("m", ["M", Parameter("p", 3)])], separator="")
LAYOUT = lay_out(CITIES, Characters(), max_positions=60)


def compiled(body: str, isolation="anchored", layout=LAYOUT) -> CompiledPrompt:
    prompt = parse_prompt(f'<prompt schema="{layout.schema.name}">{body}</prompt>')
    return compile_prompt(layout, prompt, isolation)


def shown(prompt: CompiledPrompt) -> list[tuple[str, int, str]]:
    return [(s.kind, s.position, text_of(s.token_ids[: s.in_use])) for s in prompt.segments]


def computed(body: str, **options) -> list[tuple[int, str]]:
    """Positions and texts of what is computed for a prompt."""
    return [
        (s.position, text_of(s.token_ids))
        for s in compiled(body, **options).segments
        if not s.is_encoded
    ]


def refusal(body: str, layout=LAYOUT) -> str:
    with pytest.raises(PmlError) as caught:
        compiled(body, layout=layout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- imports and arguments -----------------------------------------------------------------------


def test_imports_arguments_and_new_text():
    prompt = compiled('<plan days="3 days"/><miami/>Surf!')
    assert shown(prompt) == [
        ("cached", 0, "<bos>Go."),
        ("cached", 4, "Plan"),
        ("cached", 16, "."),
        ("cached", 17, "Miami."),
        ("cached", 33, "Now."),
        ("argument", 8, "3 days"),
        ("text", 37, "Surf!"),
    ]
    assert prompt.next_position == 42
    assert prompt.num_cached_tokens == 19
    assert prompt.num_computed_tokens == 11
    assert prompt.num_tokens == 30
    assert text_of(prompt.token_ids) == "<bos>Go.Plan.Miami.Now.3 daysSurf!"
    assert prompt.positions.tolist() == [
        *range(8), 16, *range(17, 23), *range(33, 37), *range(8, 14), *range(37, 42),
    ]  # fmt: skip
    assert prompt.token_ids.dtype == prompt.positions.dtype == np.int32


def test_off_computes_the_same_tokens_at_the_same_positions():
    for body in ('<plan days="3 days"/><rome><food/></rome>Eat!', "<tips/>", "x"):
        off = compiled(body, "off")
        assert all(segment.kind in ("text", "argument") for segment in off.segments)
        anchored = compiled(body)
        order = np.argsort(anchored.positions, kind="stable")
        assert off.token_ids.tolist() == anchored.token_ids[order].tolist()
        assert off.positions.tolist() == anchored.positions[order].tolist()
        assert off.next_position == anchored.next_position
        assert off.num_cached_tokens == 0


def test_isolated_has_placeholders_where_text_of_the_module_follows():
    prompt = compiled('<plan days="x"/>y', "isolated")
    assert shown(prompt)[:4] == [
        ("cached", 0, "<bos>Go."),
        ("cached", 4, "Plan"),
        ("placeholder", 8, "????????"),
        ("cached", 16, "."),
    ]
    assert prompt.num_cached_tokens == 13
    prompt = compile_prompt(
        lay_out(LAST, Characters()), Prompt("s", [Import("m", {"p": "abc"})]), "isolated"
    )
    assert shown(prompt) == [("cached", 0, "<bos>"), ("cached", 1, "M"), ("argument", 2, "abc")]


def test_isolated_needs_a_placeholder_token():
    layout = lay_out(CITIES, Characters(placeholder=None))
    with pytest.raises(ConfigError, match="no unknown and no padding token: use anchored"):
        compiled("<tips/>", "isolated", layout)
    compiled("<tips/>", "anchored", layout)


def test_defaults_and_empty_arguments():
    schema = parse_schema(
        '<schema name="s" separator=""><module name="m"><param name="p" len="3" default="no"/>!'
        "</module></schema>"
    )
    layout = lay_out(schema, Characters())
    assert computed("<m/>x", layout=layout) == [(1, "no"), (5, "x")]
    assert computed('<m p="yes"/>x', layout=layout) == [(1, "yes"), (5, "x")]
    assert computed('<m p=""/>x', layout=layout) == [(5, "x")]


def test_a_parameter_counts_with_its_whole_length():
    schema = parse_schema(
        '<schema name="s"><module name="m">M<param name="p" len="9"/></module></schema>'
    )
    layout = lay_out(schema, Characters())
    # The separator behind the parameter stands at 11.
    assert computed('<m p="abc"/>x', layout=layout) == [(2, "abc"), (12, "x")]


def test_uncached_modules_are_computed_at_their_places():
    schema = parse_schema(
        '<schema name="s" separator="">A<module name="m" cache="false">M<module name="n">N</module>'
        "</module>B</schema>"
    )
    layout = lay_out(schema, Characters())
    assert computed("<m><n/></m>x", layout=layout) == [(2, "M"), (5, "x")]
    prompt = compiled("<m><n/></m>x", "isolated", layout)
    assert shown(prompt) == [
        ("cached", 0, "<bos>A"),
        ("cached", 3, "N"),
        ("cached", 4, "B"),
        ("text", 2, "M"),
        ("text", 5, "x"),
    ]


# --- new text --------------------------------------------------------------------------------


def test_text_follows_the_import_before_it():
    # plan is left out: 4-16 are free. Behind rome, food's 22-27 are; behind tips nothing is.
    assert computed("Hi.<rome/>x") == [(4, "Hi."), (37, "x")]
    assert computed("<rome/>Eat.<tips/>x") == [(22, "Eat."), (37, "x")]
    assert computed("<miami/>Surf.<tips/>x") == [(23, "Surf."), (37, "x")]
    assert computed('<plan days="2"/><rome>Well.</rome><tips/>')[1:] == [(22, "Well."), (36, ".")]
    assert computed("<rome>One.</rome>Tw<tips/>x") == [(22, "One."), (26, "Tw"), (37, "x")]


def test_text_in_an_import_before_the_first_of_it():
    schema = parse_schema(
        '<schema name="s" separator=""><module name="m">M<module name="a">12345</module>'
        '<module name="b">B</module></module><module name="n">N</module></schema>'
    )
    layout = lay_out(schema, Characters())
    assert computed("<m>old<b/></m><n/>x", layout=layout) == [(2, "old"), (9, "x")]
    # Behind the last import inside the import, and behind the import itself.
    assert computed("<m><a/>q</m><n/>x", layout=layout) == [(7, "q"), (9, "x")]
    assert computed("<m><a/></m>q<n/>x", layout=layout) == [(7, "q"), (9, "x")]
    assert refusal("<m><a/>q</m>r<n/>x", layout).startswith(
        "<text>:1:32: text 'r' needs 1 positions after module m, the gap has 0, 1 too few"
    )


def test_text_never_falls_on_text_placed_before():
    """Modules without own text begin where others end: their places are taken one by one."""
    schema = parse_schema(
        '<schema name="s" separator="">A<module name="e"><module name="f">12345</module></module>'
        '<module name="g">G</module></schema>'
    )
    layout = lay_out(schema, Characters())
    prompt = compiled("ab<e/>cd<g/>x", layout=layout)
    assert [(p, t) for k, p, t in shown(prompt) if k == "text"] == [(2, "ab"), (4, "cd"), (8, "x")]


def test_text_among_imports_in_another_order():
    """It follows the import before it in the prompt, wherever the next one stands."""
    assert computed('<rome/>Eat.<plan days="2"/>x') == [(8, "2"), (22, "Eat."), (37, "x")]
    assert computed("Hi.<tips/><rome/>x") == [(22, "Hi."), (37, "x")]
    # Both take their places behind rome.
    assert computed('Hi.<tips/><rome/>Yo<plan days=""/>x') == [(22, "Hi."), (25, "Yo"), (37, "x")]
    assert "after module tips, the gap has 0, 3 too few" in refusal("<tips/>Hi.<rome/>x")


def test_text_behind_the_highest_module_has_room():
    schema = parse_schema(
        '<schema name="s">A<module name="m">M</module><module name="n">N</module></schema>'
    )
    layout = lay_out(schema, Characters())
    assert computed("<n/>12345<m/>y", layout=layout) == [(7, "12345\n"), (13, "y")]
    assert computed("<n/>x<m/>", layout=layout) == [(7, "x\n")]


def test_gaps_that_are_too_small():
    assert computed("<rome/>123456<tips/>x")[0] == (22, "123456")
    assert refusal("<rome/>\n1234567<tips/>x").startswith(
        "<text>:2:1: text '1234567' needs 7 positions after module rome, the gap has 6, 1 too few"
    )
    assert "before module plan, the gap has 0, 2 too few" in refusal('Hi<plan days="1"/>')
    assert "after module plan, the gap has 0, 1 too few" in refusal('<plan days="1"/>x<miami/>')
    assert "in module rome, the gap has 6, 1 too few" in refusal("<rome>1234567</rome><tips/>")


def test_separators_of_new_text():
    schema = parse_schema(
        '<schema name="s">A<module name="m">M</module><module name="n">12345</module>'
        '<module name="o">O</module>B</schema>'
    )
    layout = lay_out(schema, Characters())
    # "B" ends in no whitespace; what follows the module does not need any.
    assert computed("<m/>x<o/>y", layout=layout) == [(5, "x\n"), (14, "\ny")]
    assert computed("<m/>x&#32;<o/>y", layout=layout) == [(5, "x "), (14, "\ny")]
    inner = parse_schema('<schema name="s">A<module name="m">M</module></schema>')
    assert computed("<m/>x", layout=lay_out(inner, Characters())) == [(5, "x")]
    nested = parse_schema(
        '<schema name="s"><module name="m">M<module name="n">N</module></module></schema>'
    )
    layout = lay_out(nested, Characters())
    assert computed("<m><n/>x</m>y", layout=layout) == [(5, "x\ny")]


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("body", "last"),
    [("<tips/>", (36, ".")), ("", (36, ".")), ('<plan days="3"/><miami/>', (36, "."))],
)
def test_without_text_of_its_own_the_last_token_is_computed(body, last, isolation):
    prompt = compiled(body, isolation)
    assert prompt.next_position == 37
    assert (prompt.positions[-1], text_of(prompt.token_ids[-1:])) == last
    assert not prompt.segments[-1].is_encoded
    if isolation != "off":
        whole = next(s for s in compiled("x", isolation).segments if s.position == 33)
        cut = next(s for s in prompt.segments if s.position == 33)
        assert cut.key == whole.key
        assert cut.token_ids.tolist() == whole.token_ids.tolist()
        assert (cut.in_use, cut.end) == (3, 36)


def test_a_last_segment_of_one_token_is_computed_whole():
    layout = lay_out(parse_schema('<schema name="s"/>'), Characters())
    prompt = compiled("", layout=layout)
    assert shown(prompt) == [("text", 0, "<bos>")]
    empty = lay_out(parse_schema('<schema name="s"/>'), Characters(begin=()))
    assert "no token at all" in refusal("", empty)


def test_a_last_argument_is_computed_anyway():
    layout = lay_out(LAST, Characters())
    prompt = compiled('<m p="a"/>', layout=layout)
    assert shown(prompt) == [("cached", 0, "<bos>"), ("cached", 1, "M"), ("argument", 2, "a")]
    assert prompt.next_position == 5
    assert shown(compiled('<m p=""/>', layout=layout)) == [("cached", 0, "<bos>"), ("text", 1, "M")]


# --- conversations -----------------------------------------------------------------------------

CHAT = parse_schema(
    """
<schema name="chat" separator=" ">
  <system>Sys.</system>
  <user>Read:<module name="m">M</module><module name="n">N</module></user>
</schema>
"""
)
#   0  <bos><system>Sys.<end><user>Read:_    14  M_    16  N_


def chat(body: str, schema=CHAT, tokenizer=None) -> list[tuple[int, str]]:
    return computed(body, layout=lay_out(schema, tokenizer or Characters()))


def test_a_turn_is_opened_in_the_schema_and_continued_by_the_prompt():
    expected = [(18, "Hi.<end><assistant>")]
    assert chat("<m/><n/>Hi.") == expected
    assert chat("<m/><n/><user>Hi.</user>") == expected
    assert chat("<m/><user><n/>Hi.</user>") == expected
    assert chat("<user><m/><n/>Hi.</user>") == expected
    assert chat("<m/><user>Hi.</user>there") == [(16, "Hi. there<end><assistant>")]
    assert chat("<m/>") == [(16, "<end><assistant>")]


def test_a_turn_is_continued_by_text_behind_its_last_module():
    assert chat("<n/>x<m/>") == [(18, "x "), (20, "<end><assistant>")]
    assert chat("<user><n/>x</user><m/>y") == [(18, "x "), (20, "y<end><assistant>")]


def test_further_turns():
    assert chat("<m/><user>Hi.</user><assistant>Ho.</assistant><user>He.</user>") == [
        (16, "Hi.<end><assistant>Ho.<end><user>He.<end><assistant>")
    ]
    assert chat("<m/><assistant>Ho.</assistant>He.") == [
        (16, "<end><assistant>Ho.<end><user>He.<end><assistant>")
    ]


def test_the_answer_continues_the_assistants_turn():
    assert chat("<m/>Hi.<assistant>Well</assistant>") == [(16, "Hi.<end><assistant>Well")]
    ready = parse_schema(
        '<schema name="r" separator=" "><user>U</user><assistant>Yes.</assistant></schema>'
    )
    assert chat("", ready) == [(8, ".")]
    assert chat("<assistant>So</assistant>", ready) == [(9, " So")]
    assert chat("Hi.", ready) == [(9, "<end><user>Hi.<end><assistant>")]


def test_an_empty_turn_may_be_opened():
    opened = parse_schema('<schema name="o"><system>S</system><user/></schema>')
    assert chat("Hi.", opened) == [(5, "Hi.<end><assistant>")]


def test_a_system_turn_alone_is_followed_by_the_users():
    system = parse_schema('<schema name="t"><system>S</system></schema>')
    assert chat("Hi.", system) == [(3, "<end><user>Hi.<end><assistant>")]


def test_turns_behind_a_schema_without_roles():
    raw = parse_schema('<schema name="raw" separator=""><module name="m">Doc.</module></schema>')
    assert chat("<m/><user>Hi.</user>", raw) == [(5, "<user>Hi.<end><assistant>")]
    assert chat("<m/>One.<system>Two.</system>", raw) == [
        (5, "<user>One.<end><system>Two.<end><assistant>")
    ]
    assert chat("<m/>Hi.", raw) == [(5, "Hi.")]


def test_text_by_users_never_becomes_control_tokens():
    prompt = compiled("<m/>a <![CDATA[<end>]]> b", layout=lay_out(CHAT, Characters()))
    ids = prompt.segments[-1].token_ids.tolist()
    assert ids == [*map(ord, "a <end> b"), 2, 5]


def test_text_among_a_schemas_turns_is_of_its_role():
    few = parse_schema(
        '<schema name="few" separator=""><system>S<module name="a">123</module></system>'
        '<user><module name="b">B</module></user></schema>'
    )
    layout = lay_out(few, Characters())
    assert "before module a, the gap has 0" in refusal("x<a/>", layout)
    assert "module b is imported in <system> and stands in <user>" in refusal(
        "<system><b/></system>", layout
    )
    assert "text in <user> stands after module a, which is in <system>" in refusal(
        "<a/><user>x</user><b/>", layout
    )
    raw = lay_out(
        parse_schema('<schema name="r"><module name="m">M</module></schema>'), Characters()
    )
    assert "module m is imported in <user> and stands outside of roles" in refusal(
        "<user><m/>x</user>", raw
    )


class ThinksLast(Characters):
    """Writes the assistant's last turn in another way, as templates of reasoning models do."""

    def render_chat(self, messages, add_generation_prompt=True):
        last = len(messages) - 1
        marked = [
            {**m, "content": "thoughts " + m["content"]}
            if m["role"] == "assistant" and (i == last or messages[-1]["content"] == "x")
            else m
            for i, m in enumerate(messages)
        ]
        return super().render_chat(marked, add_generation_prompt)


def test_templates_that_look_ahead():
    schema = parse_schema('<schema name="s"><user>U</user><assistant>A</assistant></schema>')
    layout = lay_out(schema, ThinksLast())
    assert text_of(layout.root.spans[0].token_ids) == "<bos><user>U<end><assistant>A"
    assert computed("Hi.", layout=layout) == [(6, "<end><user>Hi.<end><assistant>")]
    assert computed("", layout=layout) == [(5, "A")]


class CountsTurns(Characters):
    def render_chat(self, messages, add_generation_prompt=True):
        text = super().render_chat(messages, add_generation_prompt)
        return text.replace("<bos>", f"<bos>{len(messages)} turns:")


def test_templates_that_write_the_schemas_turns_anew():
    layout = lay_out(CHAT, CountsTurns())
    assert "<end><assistant>" in computed("<m/>Hi.", layout=layout)[0][1]
    assert "writes the schema's turns in another way when others follow" in refusal(
        "<m/>Hi.<assistant>A</assistant>B", layout
    )


class WritesTheDate(Characters):
    today = "Monday"

    def render_chat(self, messages, add_generation_prompt=True):
        text = super().render_chat(messages, add_generation_prompt)
        return text.replace("<bos>", f"<bos>{self.today}:")


def test_templates_that_write_the_date():
    tokenizer = WritesTheDate()
    layout = lay_out(CHAT, tokenizer)
    monday = computed("<m/>Hi.<assistant>A</assistant>", layout=layout)
    tokenizer.today = "Tuesday"
    assert computed("<m/>Hi.<assistant>A</assistant>", layout=layout) == monday


# --- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "column", "message"),
    [
        ("<miam/>", 1, "schema cities has no module miam: did you mean miami?"),
        ("<x/>", 1, "schema cities has no module x, known: plan, miami, rome, tips"),
        ("<food/>", 1, "no module food: it is rome/food, import it <rome><food/>"),
        (
            "<tips><rome/></tips>",
            7,
            "module tips has no module rome: it is rome, import it outside",
        ),
        ("<miami/><rome/>", 9, "modules miami and rome are members of one union: import one"),
        ("<tips/><tips/>", 8, "module tips is imported twice"),
        ("<miami/><miami/>", 9, "module miami is imported twice"),
        ("<plan/>", 1, 'parameter days of module plan has no default: write <plan days="...">'),
        ('<plan day="3"/>', 1, "module plan has no parameter day: did you mean days?"),
        ('<tips x="3"/>', 1, "module tips has no parameter x, known: none"),
        ('<plan days="123456789"/>', 1, "has 9 tokens, its parameter's length is 8"),
        ("<tips/>" + "x" * 24, 8, "reaches position 60 and the model has 60 positions"),
    ],
)
def test_refused(body, column, message):
    found = refusal("\n" + body)
    assert found.startswith(f"<text>:2:{column}: ")
    assert message in found


def test_a_prompt_up_to_the_models_limit():
    assert compiled("<tips/>" + "x" * 23).next_position == 60


def test_unknown_schemas():
    prompt = parse_prompt('\n<prompt schema="citys"/>', file="p.xml")
    for find in (
        lambda: bind(CITIES, prompt),
        lambda: find_schema(prompt, {"cities": CITIES, "other": CITIES}),
    ):
        with pytest.raises(PmlError) as caught:
            find()
        expected = "p.xml:2:1: schema 'citys' is unknown: did you mean cities?"
        assert str(caught.value) == expected
    assert find_schema(parse_prompt('<prompt schema="cities"/>'), {"cities": 1}) == 1


def test_unknown_isolation():
    with pytest.raises(ConfigError, match="isolation is 'none', expected one of anchored"):
        compiled("x", "none")


def test_an_encoding_serves_many_prompts_of_its_layout():
    encoding = Encoding(LAYOUT, "isolated")
    prompt = parse_prompt('<prompt schema="cities"><rome/>x</prompt>')
    one = compile_prompt(LAYOUT, prompt, "isolated", encoding=encoding)
    assert [s.key for s in one.segments] == [
        s.key for s in compiled("<rome/>x", "isolated").segments
    ]
    with pytest.raises(ValueError, match="another layout or isolation"):
        compile_prompt(LAYOUT, prompt, "anchored", encoding=encoding)


def test_prompts_from_code():
    prompt = Prompt("cities", [Import("plan", {"days": "3 days"}), Import("miami"), "Surf!"])
    assert shown(compile_prompt(LAYOUT, prompt)) == shown(
        compiled('<plan days="3 days"/><miami/>Surf!')
    )
    with pytest.raises(PmlError, match=r"^schema cities has no module Miami"):
        compile_prompt(LAYOUT, Prompt("cities", [Import("Miami")]))
