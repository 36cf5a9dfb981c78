"""The embedded model and what makes it: documents, splits, phrasings, the shipped folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "onestem" / "embedded" / "model"
for folder in ("training", "examples"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

import documents  # noqa: E402
import facts as tables  # noqa: E402
import packing  # noqa: E402

MAX_BYTES = 16_000_000


def training_prompts(count: int, seed: int = 0, facts: int = 30) -> list[documents.Prompt]:
    rng = random.Random(f"a test {seed}")
    return [documents.training_prompt(rng, "train", facts, 16) for _ in range(count)]


def test_same_seed_gives_same_prompts():
    assert training_prompts(20) == training_prompts(20)
    assert training_prompts(20) != training_prompts(20, seed=1)


@pytest.mark.parametrize("split", documents.SPLITS)
def test_every_name_and_value_is_of_its_split(split):
    namer = documents.Namer(random.Random(split), split)
    for _ in range(20):
        document = documents.make_document(namer, 25)
        texts = [name for _, name in document.names] + [fact.value for fact in document.facts]
        assert {documents.split_of(text) for text in texts} == {split}


def test_training_and_test_share_no_name_or_value():
    def drawn(split: str) -> set[str]:
        namer = documents.Namer(random.Random(split), split)
        made = [documents.make_document(namer, 30) for _ in range(30)]
        names = {name for document in made for _, name in document.names}
        return names | {fact.value for document in made for fact in document.facts}

    assert not drawn("train") & drawn("test")


def test_documents_state_at_least_twenty_facts_among_distractors():
    namer = documents.Namer(random.Random(4), "test")
    for _ in range(20):
        document = documents.make_document(namer, 20)
        assert len(document.facts) >= 20
        assert all(fact.value in document.text for fact in document.facts)
        asked = [fact.attribute for fact in document.facts]
        assert len(set(asked)) < len(asked)  # some attribute is stated of several things


def test_swapped_document_keeps_all_but_the_values():
    namer = documents.Namer(random.Random(5), "test")
    first = documents.make_document(namer, 30)
    second = first.swapped(random.Random(6))
    for one, other in zip(first.facts, second.facts, strict=True):
        assert (one.name, one.attribute) == (other.name, other.attribute)
        assert one.value != other.value


@pytest.mark.parametrize("attribute", tables.ATTRIBUTES, ids=lambda attribute: attribute.key)
def test_two_phrasings_of_every_attribute_are_held_out(attribute):
    seen, held = documents.phrasings(attribute)
    assert len(set(held)) == 2
    assert len(seen) >= 8
    assert not set(seen) & set(held)


def fillings(attribute: tables.Attribute, template: str, name: str) -> set[str]:
    """Every question that a template can give about `name`."""
    article = f"the {name}" if attribute.kind in tables.WITH_ARTICLE else name
    texts = set()
    for noun in attribute.nouns:
        text = template.replace("{a}", noun).replace("{t}", article).replace("{n}", name)
        texts.add(text[0].upper() + text[1:])
    return texts


def test_training_never_asks_in_a_held_out_phrasing():
    by_key = {attribute.key: attribute for attribute in tables.ATTRIBUTES}
    rng = random.Random(7)
    namer = documents.Namer(rng, "train")
    for _ in range(60):
        for fact in documents.make_document(namer, 20).facts:
            question = documents.ask(rng, fact)
            held = documents.phrasings(by_key[question.attribute])[1]
            for template in held:
                assert question.text not in fillings(fact.attribute, template, fact.name)
    assert not any(q.held for prompt in training_prompts(50) for q in prompt.questions)


def test_masks_show_what_their_definition_says():
    import torch

    trunk, first, second = packing.TRUNK, 2, 3
    question, other = packing.FIRST_QUESTION, packing.FIRST_QUESTION + 1
    codes = torch.tensor([trunk, first, second, question, other])
    seen = packing.visible(codes[:, None], codes[None, :]).tolist()
    assert seen == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [True, True, True, True, False],
        [True, True, True, False, True],
    ]
    elsewhere = codes + (1 << packing.SAMPLE_SHIFT)
    assert not packing.visible(codes[:, None], elsewhere[None, :]).any()


def test_shipped_folder_is_small_and_complete():
    names = {path.name for path in MODEL.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert needed | {"tokenizer_config.json"} <= names
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_BYTES


def test_tokenizer_round_trips_any_text_and_keeps_names_whole_anywhere():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for text in ("Velmora 12,480 kilometres\n\n# née Ünder 東京 🙂\ttab", "  two  spaces ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    alone = tokenizer.encode("Velmora", add_special_tokens=False).ids
    for text in ("in Velmora.", "(Velmora)", "\nVelmora: 12"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_chat_template_has_one_bos_and_asks_for_the_answer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be exact.<|end|><|user|>Hi<|end|><|assistant|>"


def test_shipped_model_reads_unseen_documents():
    import torch
    from evaluate import Reader

    reader = Reader(MODEL, "cpu", torch.float32)
    right = asked = 0
    for mask in documents.MASKS:
        exam = packing.Exam(mask=mask, facts=20, modules=1 if mask == "causal" else 2)
        prompt = packing.exam_prompt(exam, f"unit {mask}", 6)
        answers = reader.answers(prompt, None)
        asked += len(answers)
        right += sum(a == q.answer for a, q in zip(answers, prompt.questions, strict=True))
    assert asked == 18
    assert right >= 17


def test_example_job_is_what_its_script_writes():
    import make_facts

    lines, answers = make_facts.job(0)
    text = (ROOT / "examples/facts.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    assert written == lines
    assert json.loads((ROOT / "examples/facts.answers.json").read_text()) == answers
    assert {line["custom_id"] for line in lines} == set(answers)
