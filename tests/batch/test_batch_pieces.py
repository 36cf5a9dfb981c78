"""Pieces of prompts make the prompts that they come from, and stand where an order says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onestem.batch.pieces import joined
from onestem.batch.template_pieces import rendered, sources, template_pieces
from onestem.batch.templates import Recipe
from onestem.batch.text_pieces import TextPieces
from onestem.options import InputOptions

WORDS = st.sampled_from(
    ["{a}", "{b}", "{c}", "{{x}}", "Name: ", "Note 7. ", "\n", "\n\n", " ", "end.", "<d>", "a b: "]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=14).map("".join)
ROW = {"a": "one\ntwo", "b": "Date: 7.", "c": ""}


@settings(max_examples=40)
@given(TEXTS)
def test_pieces_of_a_template_make_its_prompts(text):
    recipe = Recipe.of(InputOptions(text="{a}" + text))
    whole = recipe.fields["text"].value(ROW)
    slots = template_pieces(Recipe.of(InputOptions(prompt="{a}" + text, body="{}")))
    if slots is None:
        return
    pieces = rendered(slots, ROW)
    (made,) = joined(pieces, range(len(pieces[0].pieces)))
    assert made == whole.replace("\\n", "\n")
    (template,) = joined(sources(slots), range(len(pieces[0].pieces)))
    assert Recipe.of(InputOptions(text=template)).fields["text"].value(ROW) == whole


@settings(max_examples=40)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_pieces_of_texts_make_the_texts(texts):
    prompts = [[("system", text), ("user", text + "."), ("user", "")] for text in texts]
    finder = TextPieces(prompts)
    for prompt in prompts:
        messages = finder.of(prompt)
        count = sum(len(message.pieces) for message in messages)
        assert joined(messages, range(count)) == [text for _, text in prompt]
        for message in messages:
            names = [piece.name for piece in message.pieces]
            assert len(set(names)) == len(names)


def moved(template, order):
    return joined(sources(template_pieces(Recipe.of(InputOptions(**template)))), order)


def test_a_field_moves_with_its_label_and_what_ends_its_line():
    text = r"Be brief.\n\nId: {id};\n<doc>\n{doc}\n</doc>\n\nWhen {t} at {u}.\nQ: {q}\nA:"
    assert moved({"prompt": text}, range(7)) == [text.replace(r"\n", "\n")]
    assert moved({"prompt": text}, [0, 2, 1, 3, 4, 5, 6]) == [
        "Be brief.\n\n<doc>\n{doc}\n</doc>\n\nId: {id};\n\nWhen {t} at {u}.\nQ: {q}\nA:"
    ]


def test_a_field_of_the_system_message_moves_to_the_users():
    chat = (
        '[{"role": "system", "content": "At {t}. Be {how}."}, {"role": "user", "content": "{q}"}]'
    )
    assert moved({"messages": chat}, [1, 2, 0]) == ["Be {how}.", "{q}\nAt {t}."]
