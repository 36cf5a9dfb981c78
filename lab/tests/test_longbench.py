"""LongBench's metrics by hand and against a published package, its loader, and a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from onestem.errors import ConfigError, RequestError
from onestem.llm import LLM
from onestem.pml import Module, Role
from onestem_lab.longbench.__main__ import main
from onestem_lab.longbench.load import find_files, passages, read_examples
from onestem_lab.longbench.metrics import (
    count_share,
    label_score,
    paragraph_share,
    rouge_l,
    word_f1,
)
from onestem_lab.longbench.run import fitted, prompt_of
from onestem_lab.longbench.tasks import TASKS, score

EXAMPLE: dict[str, Any] = {
    "input": "What is the population of Varn?",
    "context": "Passage 1:\nThe population of Varn is 4,512.\nPassage 2:\nOlda has 9,033 people.\n",
    "answers": ["4,512"],
    "length": 20,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}


def write(file: Path, *examples: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps({**EXAMPLE, **one}) + "\n" for one in examples))
    return file


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("a red house", "The house is red", 2 * 2 / (2 + 3)),
        ("yes yes no", "yes no no", 2 * 2 / (3 + 3)),  # yes once, no once
        ("4512", "4,512", 1.0),
        ("", "something", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_word_f1(prediction: str, answer: str, expected: float) -> None:
    assert word_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("police killed the gunman", "the gunman killed police", 2 * 2 / (4 + 4)),
        # Lin 2004: w1 w2 with one sentence and w1 w3 w5 with the other: four of five words.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / (8 + 5)),
        ("one two", "three", 0.0),
        ("", "three", 0.0),
        ("...", "three", 0.0),
    ],
)
def test_rouge_l(prediction: str, answer: str, expected: float) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(expected)


def test_rouge_l_is_that_of_the_package() -> None:
    rouge = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    rng = random.Random(5)

    def text() -> str:
        sentences = [
            " ".join(rng.choice("abcdefg") for _ in range(rng.randint(1, 12)))
            for _ in range(rng.randint(1, 4))
        ]
        return ". ".join(sentences) + rng.choice(("", "."))

    for _ in range(200):
        prediction, answer = text(), text()
        expected = rouge.get_scores(prediction, answer)[0]["rouge-l"]["f"]
        assert rouge_l(prediction, answer) == pytest.approx(expected, abs=1e-7)


def test_accuracies() -> None:
    labels = ["Country", "City", "Capital City", "State"]
    assert label_score("Type: City", "City", labels) == 1.0
    assert label_score("City or State", "City", labels) == 0.5
    assert label_score("Capital City", "Capital City", labels) == 1.0  # City is a part of it
    assert label_score("State", "City", labels) == 0.0
    assert label_score("", "City", labels) == 0.0
    assert paragraph_share("Paragraph 7", "Paragraph 7") == 1.0
    assert paragraph_share("Paragraph 7 or 17", "Paragraph 7") == 0.5
    assert paragraph_share("the seventh", "Paragraph 7") == 0.0
    assert count_share("There are 12.", "12") == 1.0
    assert count_share("12 of 30, so 12", "12") == pytest.approx(2 / 3)


def test_scores_of_tasks() -> None:
    assert score("hotpotqa", "no", ["yes", "no"], ()) == 1.0
    assert score("trec", "\nCity\nQuestion: and so on: State", ["City"], ["City", "State"]) == 1.0
    assert score("triviaqa", "Paris\nPassage: of Lyon", ["Paris"], ()) == 1.0
    assert score("hotpotqa", "Paris\nof Lyon", ["Paris"], ()) == 2 * 1 / (3 + 1)
    assert score("gov_report", "a b", ["a c", "a b"], ()) == 1.0
    assert score("passage_retrieval_en", "Paragraph 3", ["Paragraph 3"], ()) == 1.0
    assert score("passage_count", "5", ["6"], ()) == 0.0
    assert {task.metric for task in TASKS.values()} == {"F1", "ROUGE-L", "accuracy"}


def test_files(tmp_path: Path) -> None:
    short = write(tmp_path / "hotpotqa_e.jsonl", {"dataset": "hotpotqa_e"}, {}, {})
    write(tmp_path / "lcc.jsonl", {"dataset": "lcc"})
    assert find_files([tmp_path]) == [short]
    examples = read_examples(short, 2)
    assert [one.name for one in examples] == ["hotpotqa_e-1", "hotpotqa_e-2"]
    assert examples[0].task == "hotpotqa"
    assert (examples[0].answers, examples[0].labels) == (("4,512",), ())
    parts = list(passages(examples[0].context))
    assert "".join(parts) == examples[0].context
    assert [part.split(":")[0] for part in parts] == ["Passage 1", "Passage 2"]
    assert list(passages("no marks: Passage 1 is a word\n")) == ["no marks: Passage 1 is a word\n"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": "dureader"}, ["dataset", "dureader", "known", "hotpotqa"]),
        ({"context": None}, ["context", "None", "text"]),
        ({"answers": "4,512"}, ["answers", "list of texts"]),
        ({"answers": []}, ["answers", "empty"]),
        ({"all_classes": [1]}, ["all_classes", "[1]"]),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = write(tmp_path / "x.jsonl", {}, changes)
    with pytest.raises(ConfigError) as error:
        read_examples(file)
    for word in [*words, "x.jsonl, line 2"]:
        assert word in str(error.value)


def test_no_files_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no file like"):
        find_files([tmp_path])
    with pytest.raises(ConfigError, match="does not exist"):
        find_files([tmp_path / "nowhere"])
    file = tmp_path / "hotpotqa.jsonl"
    file.write_text("{\n")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        read_examples(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no examples"):
        read_examples(file)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model answers from passages; two files, all three ways."""
    data = tmp_path / "data"
    data.mkdir()
    sheet = "# Notes on Varn\n## Varn\nPopulation: 4,512\nMayor: Ida Brom\nFounded: 1612\n"
    other = "# Notes on Olda\n## Olda\nPopulation: 9,033\nMayor: Tom Kell\nFounded: 1780\n"
    context = f"Passage 1:\n{sheet}Passage 2:\n{other}"
    asked = [
        ("What is the population of Varn?", "4,512"),
        ("Who is the mayor of Olda?", "Tom Kell"),
    ]
    write(
        data / "hotpotqa.jsonl",
        *({"context": context, "input": text, "answers": [answer]} for text, answer in asked),
    )
    few_shot = "Question: Where is Varn?\nType: Place\n\n"
    labels = {"all_classes": ["Place", "Person"], "answers": ["Person"]}
    trec = {"dataset": "trec", "context": few_shot, "input": "Question: Who is Ida Brom?\nType:"}
    write(data / "trec.jsonl", {**trec, **labels})
    out, answers = tmp_path / "out.json", tmp_path / "answers.jsonl"
    options = ["--dtype", "float32", "--max-tokens", "8", "--kv-memory", "64MiB"]
    main([str(data), "--model", "embedded", *options, "--out", str(out), "--answers", str(answers)])
    tasks = json.loads(out.read_text())["tasks"]
    assert set(tasks) == {"hotpotqa", "trec"}
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(written) == 9
    for isolation in ("anchored", "isolated", "off"):
        row = tasks["hotpotqa"][isolation]
        assert (row["metric"], row["examples"]) == ("F1", 2)
        own = [one["score"] for one in written if one["isolation"] == isolation]
        assert row["score"] == pytest.approx(50 * sum(own[:2]))
        assert row["seconds_to_first_token"]["median"] > 0
    assert tasks["hotpotqa"]["off"]["score"] == 100
    assert tasks["hotpotqa"]["anchored"]["score"] == 100
    assert tasks["hotpotqa"]["anchored"]["cached_share"] > 0.5
    assert tasks["trec"]["isolated"]["cached_share"] > 0.3
    assert "hotpotqa, F1, anchored" in capsys.readouterr().out


def test_what_cannot_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--model", "embedded"])
    assert capsys.readouterr().err.count("\n") == 1


def test_long_contexts_lose_their_middle(tmp_path: Path) -> None:
    llm = LLM(dtype="float32", kv_memory="64MiB", max_model_len=400)
    numbers = " ".join(f"{i}" for i in range(600))
    file = write(tmp_path / "qasper.jsonl", {"dataset": "qasper", "context": numbers}, {})
    long, short = read_examples(file)
    schema, prompt = prompt_of(llm, long, 8)
    (turn,) = schema.body
    assert isinstance(turn, Role)
    module = turn.body[-1]
    assert isinstance(module, Module)
    text = module.body[0].text  # type: ignore[union-attr]
    assert text.startswith("0 1 2 3")
    assert text.endswith("598 599")
    llm.add_schema(schema)
    assert 300 < len(llm.schemas.compile(prompt, "off").token_ids) <= 400 - 8
    assert fitted(llm, short, "", 8) == EXAMPLE["context"]
    with pytest.raises(RequestError, match="qasper-1: instructions"):
        prompt_of(llm, long, 380)
