"""Documents of a chat: the prompt is the template's own, and apart, a text's tokens are its own."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from tests.engine.tiny_tokenizers import (
    LLAMA_3_TEMPLATE,
    make_byte_fallback_tokenizer,
    make_byte_level_tokenizer,
)

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[assistant]"
# As Granite has them: a turn each, with a field of their own.
GRANITE = (
    "{% for d in documents %}<|start_header_id|>document {{ d['doc_id'] }}<|end_header_id|>\n"
    "{{ d['text'] | trim }}<|eot_id|>{% endfor %}" + TURNS
)
# As Command R has them: all fields, in their order.
COMMAND = (
    "{% if documents %}<results>{% for d in documents %}\nDocument: {{ loop.index0 }}"
    "{% for key, value in d.items() %}\n{{ key }}: {{ value }}{% endfor %}\n{% endfor %}</results>"
    "{% endif %}" + TURNS
)
JSON = '{% if documents %}{"documents": {{ documents | tojson }}}{% endif %}' + TURNS
TITLED = (
    "{% for d in documents %}{{ 'Title: ' + d['title'] + '\n' }}{{ d.text }}{% endfor %}" + TURNS
)
BOS = "{{ bos_token }}"
TEMPLATES = {
    "granite": BOS + GRANITE,
    "command": BOS + COMMAND,
    "json": BOS + JSON,
    "titled": BOS + TITLED,
}

# What they write between a title that is before its text, and this; Granite's have no title.
BETWEEN = {"command": "text: ", "json": '", "text": "', "titled": "\n", "none": "\n"}

DOCUMENTS = [
    {"title": "Penguins", "text": "The emperor is the tallest.\nIt is 1.2 m tall."},
    {"text": ' "Adélie" penguins <b>nest</b>\n', "title": "Nests"},
    {"title": "Names", "text": "They write <|eot_id|> or </s> here."},
]
PLAIN = (
    "Document: Penguins\nThe emperor is the tallest.\nIt is 1.2 m tall.\n\n"
    'Document: Nests\n "Adélie" penguins <b>nest</b>\n\n\n'
    "Document: Names\nThey write <|eot_id|> or </s> here.\n\n"
)
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Who is tall?"},
]
KINDS = {"level": make_byte_level_tokenizer, "fallback": make_byte_fallback_tokenizer}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("documents")
    return {kind: make(root / kind) for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


def tokenizer_of(path: Path, template: Any = None) -> Tokenizer:
    found = Tokenizer.from_directory(path, template)
    assert found is not None
    return found


def rendered(path: Path, template: str, documents: list[dict[str, str]]) -> list[int]:
    return AutoTokenizer.from_pretrained(path).apply_chat_template(
        CHAT, documents=documents, chat_template=template, add_generation_prompt=True,
        return_dict=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_whole_ids_are_those_of_transformers(path: Path, name: str) -> None:
    template, documents = TEMPLATES[name], DOCUMENTS[:2]
    chat = tokenizer_of(path, template).chat(CHAT, documents=documents)
    assert chat == (rendered(path, template, documents), None)


@pytest.mark.parametrize("name", [*TEMPLATES, "none"])
def test_apart_a_texts_tokens_are_the_same_at_any_place(path: Path, name: str) -> None:
    tokenizer = tokenizer_of(path, TEMPLATES.get(name, LLAMA_3_TEMPLATE))
    found: dict[str, set[tuple[int, ...]]] = {}
    for count in (1, 2, 3):
        for documents in permutations(DOCUMENTS, count):
            ids, where = tokenizer.chat(CHAT, documents=documents, repair=0.25)
            whole, nothing = tokenizer.chat(CHAT, documents=documents)
            assert where is not None
            assert nothing is None
            assert where.repair == 0.25
            read = [tokenizer.decode(each, skip_special_tokens=False) for each in (ids, whole)]
            assert read[0] == read[1]
            assert [token in tokenizer.special_ids for token in ids].count(True) == [
                token in tokenizer.special_ids for token in whole
            ].count(True)
            for document, (start, end) in zip(documents, where.spans, strict=True):
                found.setdefault(document["title"], set()).add(tuple(ids[start:end]))
    assert {len(each) for each in found.values()} == {1}
    for document in DOCUMENTS:
        title, text = document["title"], document["text"].rstrip()
        text = json.dumps(text, ensure_ascii=False)[1:-1] if name == "json" else text
        in_front = name in BETWEEN and (
            name in ("titled", "none") or next(iter(document)) == "title"
        )
        said = title + BETWEEN[name] + text if in_front else text.lstrip()
        (ids,) = found[title]
        assert tokenizer.decode(list(ids)).strip() == said


@pytest.mark.parametrize("name", [*TEMPLATES, "none"])
def test_a_lead_in_is_written_as_the_documents_before_are(path: Path, name: str) -> None:
    tokenizer = tokenizer_of(path, TEMPLATES.get(name, LLAMA_3_TEMPLATE))
    ids, where = tokenizer.chat(CHAT, documents=DOCUMENTS[::2], repair=0.0, lead_in=DOCUMENTS[0])
    assert where is not None
    (first, _), (second, _) = where.spans
    assert where.lead_in == tuple(ids[first:second])
    prose = tokenizer.chat(CHAT, documents=DOCUMENTS, repair=0.0).documents
    assert prose is not None
    assert tokenizer.decode(list(prose.lead_in)).startswith("The harbour of Vell")


def test_before_the_last_question_where_a_template_has_none(path: Path) -> None:
    tokenizer = tokenizer_of(path)
    asked = [*CHAT[:2], {"role": "user", "content": PLAIN + CHAT[2]["content"]}]
    assert tokenizer.chat(CHAT, documents=DOCUMENTS) == tokenizer.chat(asked)
    told = tokenizer.chat(CHAT, documents=[{"text": "It is tall."}])
    asked[2] = {"role": "user", "content": "Document:\nIt is tall.\n\nWho is tall?"}
    assert told == tokenizer.chat(asked)
    tools = {"tools": [{"type": "function", "function": {"name": "f", "description": "d"}}]}
    both = tokenizer.chat(CHAT, documents=DOCUMENTS, fields=tools)
    asked[2] = {"role": "user", "content": PLAIN + "Who is tall?"}
    assert both == tokenizer.chat(asked, fields=tools)


def test_the_template_for_documents_of_several(path: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(path)
    loaded.chat_template = {"default": TURNS, "rag": TEMPLATES["command"]}
    expected = loaded.apply_chat_template(
        CHAT, documents=DOCUMENTS[:2], chat_template="rag", return_dict=False
    )
    tokenizer = Tokenizer(loaded)
    assert tokenizer.chat(CHAT, documents=DOCUMENTS[:2]).ids == expected
    assert tokenizer.chat(CHAT).ids == tokenizer_of(path, TURNS).chat(CHAT).ids


def test_what_goes_on(path: Path) -> None:
    tokenizer = tokenizer_of(path)
    begun = [*CHAT, {"role": "assistant", "content": "The emp"}]
    ids, where = tokenizer.chat(
        begun, False, continue_final_message=True, documents=DOCUMENTS, repair=0.0
    )
    assert tokenizer.decode(ids).endswith("The emp")
    assert where is not None
    assert len(where.spans) == 3


@pytest.mark.parametrize(
    ("template", "messages", "documents", "repair", "reason"),
    [
        (TITLED, CHAT, [DOCUMENTS[0], {"text": "a"}], 1, r"documents\[1\] has no title, which the"),
        (TURNS, CHAT[1:2], DOCUMENTS, 1, "documents stand before the last message of role user"),
        (TURNS, CHAT, [{"text": "a", "doc_id": 1}], 1, r"documents\[0\] has 'doc_id', and the mod"),
        ("{{ documents[0].text }}" + TURNS, CHAT, DOCUMENTS, 1, "leaves some of documents out"),
        (GRANITE + "{{ documents[0].text }}", CHAT, DOCUMENTS, 0.5, "not write each of documents"),
        ("{{ raise_exception(documents[0].title) }}", CHAT, DOCUMENTS, 1, "messages: Penguins"),
    ],
)  # fmt: skip
def test_what_is_refused(
    path: Path, template: str, messages: Any, documents: Any, repair: float, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        tokenizer_of(path, template).chat(messages, documents=documents, repair=repair)
    assert "\n" not in str(caught.value)
