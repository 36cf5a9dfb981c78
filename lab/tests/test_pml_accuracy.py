"""Documents as modules: the prompts are those that the embedded model was trained on."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as PlainTokenizer

from onestem.engine.text.tokenizer import Tokenizer
from onestem.models.find import find_model
from onestem.options import EMBEDDED
from onestem.pml import Import, Role, compile_prompt, lay_out
from onestem_lab import pml_accuracy
from onestem_lab.pml_accuracy import MODULES, Asked, ask_all, differences, make_library, tally


def test_tokens_are_those_of_training() -> None:
    """Header, modules and question, each encoded by itself."""
    documents = pml_accuracy.documents
    path = find_model(EMBEDDED)
    library = make_library(3)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    layout = lay_out(library.schema, tokenizer)
    plain = PlainTokenizer.from_file(str(path / "tokenizer.json"))
    system = library.schema.body[0]
    assert isinstance(system, Role)
    text = system.body[0].text  # type: ignore[union-attr]
    for one in list(ask_all(3, library, 4))[::5]:
        imports = [node for node in one.prompt.body if isinstance(node, Import)]
        question = one.prompt.body[-1].text  # type: ignore[union-attr]
        numbers = [int(node.name.removeprefix("document-")) - 1 for node in imports]
        pieces = [
            f"{documents.BOS}{documents.SYSTEM}{text}{documents.END}{documents.USER}",
            *(library.documents[number].text for number in numbers),
            f"{question}{documents.END}{documents.ASSISTANT}",
        ]
        expected = [
            i for piece in pieces for i in plain.encode(piece, add_special_tokens=False).ids
        ]
        compiled = compile_prompt(layout, one.prompt, "anchored")
        assert compiled.ordered_token_ids.tolist() == expected


def test_questions() -> None:
    library = make_library(1)
    assert library == make_library(1)
    assert len({name for one in library.documents for _, name in one.names}) == sum(
        len(one.names) for one in library.documents
    )
    asked = list(ask_all(1, library, 8))
    counts = [one.modules for one in asked]
    assert counts == [n for n in range(1, MODULES + 1) for _ in range(8)]
    assert 0 < sum(one.held_out for one in asked) < len(asked) / 2
    for one in asked:
        imported = [node.name for node in one.prompt.body if isinstance(node, Import)]
        assert len(imported) == one.modules
        texts = [library.documents[int(name[9:]) - 1].text for name in imported]
        assert any(one.answer in text for text in texts)


def test_figures() -> None:
    prompt = make_library(1).schema.name
    asked = [Asked(prompt, "", n, n == 1) for n in range(1, MODULES + 1) for _ in (0, 1)]  # type: ignore[arg-type]
    right = [n != 3 for n in range(1, MODULES + 1) for _ in (0, 1)]

    def rows(marks: list[bool]) -> dict:
        each = range(1, MODULES + 1)
        parts = {
            f"{n} modules": tally(asked, marks, lambda one, n=n: one.modules == n) for n in each
        }
        return {"all": tally(asked, marks), **parts}

    assert rows(right)["all"] == {"questions": 16, "right": 14, "percent": 87.5}
    below = differences({"anchored": rows(right), "off": rows([True] * 16)})["anchored"]
    assert below["all"] == pytest.approx(12.5)
    assert (below["3 modules"], below["4 modules"]) == (100.0, 0.0)
