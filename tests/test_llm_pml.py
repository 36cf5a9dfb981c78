"""Prompts of modules through `LLM` and the command line, on the embedded model and the examples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onestem import LLM, SamplingParams
from onestem.cli.app import app
from onestem.cli.pml_questions import summary
from onestem.errors import OnestemError
from onestem.pml import Import, Module, PmlError, Prompt, Schema, read_schema, to_markup

EXAMPLES = Path(__file__).parent.parent / "examples" / "pml"
PROMPTS = sorted(p for p in EXAMPLES.glob("*/*.xml") if p.name != "schema.xml")
GREEDY = SamplingParams(max_tokens=6, temperature=0)
OPTIONS = {"dtype": "float32", "kv_memory": "64MiB"}


@pytest.fixture(scope="module")
def llm():
    return LLM(**OPTIONS)


def test_there_are_three_examples():
    assert {path.parent.name for path in PROMPTS} == {"code", "travel", "tutor"}


@pytest.mark.parametrize("path", PROMPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_example_runs(llm, path):
    layout = llm.add_schema(path.parent / "schema.xml")
    assert layout.schema == read_schema(path.parent / "schema.xml")
    first, again = (llm.generate_pml(path, GREEDY)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.metrics.num_computed_tokens == 1
    assert first.metrics.num_cached_tokens + first.metrics.num_computed_tokens == len(
        first.prompt_token_ids
    )
    off = llm.generate_pml(path, GREEDY, isolation="off")[0]
    assert off.prompt_token_ids == first.prompt_token_ids


SCHEMA = Schema("s", ["You know:\n", Module("a", ["Anna is 12. "]), Module("b", ["Ben is 9. "])])


def test_markup_files_and_nodes_are_one(llm, tmp_path):
    markup = '<prompt schema="s"><a/>Who is 12?</prompt>'
    (tmp_path / "p.xml").write_text(markup)
    llm.add_schema(SCHEMA)
    prompts = [markup, tmp_path / "p.xml", Prompt("s", [Import("a"), "Who is 12?"])]
    outputs = llm.generate_pml(prompts, [GREEDY, GREEDY.replace(max_tokens=3), GREEDY])
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] == ids[2]
    assert ids[0][:3] == ids[1]
    assert llm.generate_pml(markup, GREEDY)[0].prompt == markup


def test_choices(llm):
    """One module alone sees itself alone, anchored or not: the scores are the same."""
    llm.add_schema('<schema name="one"><module name="a">Anna lives in Ostby.</module></schema>')
    markup = '<prompt schema="one"><a/>Where does Anna live?</prompt>'
    params = SamplingParams(choices=["Ostby", "Westby", "Nordby"], logprobs=0)
    found = [
        llm.generate_pml(markup, params, isolation=isolation)[0].outputs[0]
        for isolation in ("anchored", "off")
    ]
    assert found[0].text == found[1].text
    assert found[0].cumulative_logprob == pytest.approx(found[1].cumulative_logprob, abs=1e-4)


def test_an_unknown_schema_is_not_encoded(llm):
    with pytest.raises(PmlError, match=r"schema 'travle' is unknown"):
        list(llm.encode_schema("travle"))


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_an_encoded_schema_is_not_computed_again(isolation):
    llm = LLM(**OPTIONS)
    llm.add_schema(EXAMPLES / "travel" / "schema.xml")
    for output in llm.encode_schema("travel", isolation):
        assert output.finished
    computed = [
        output.metrics.num_computed_tokens
        for output in llm.generate_pml(
            [p for p in PROMPTS if p.parent.name == "travel"], GREEDY, isolation=isolation
        )
    ]
    own = [
        llm.schemas.compile(path, isolation).num_computed_tokens
        for path in PROMPTS
        if path.parent.name == "travel"
    ]
    assert computed == own


def test_a_name_means_one_schema(llm):
    llm.add_schema(SCHEMA)
    llm.add_schema('<schema name="other">Text.</schema>')
    with pytest.raises(PmlError, match="another schema is named 'other'"):
        llm.add_schema('<schema name="other">Other text.</schema>')
    with pytest.raises(PmlError, match="schema"):
        llm.generate_pml('<prompt schema="nowhere">Text.</prompt>')
    with pytest.raises(PmlError, match="no file"):
        llm.generate_pml(Path("nowhere.xml"))


@pytest.fixture(autouse=True)
def _no_modules_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str):
    result = CliRunner().invoke(app, ["pml", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_run_answers_and_says_what_it_cost(llm):
    llm.add_schema(EXAMPLES / "travel" / "schema.xml")
    path = EXAMPLES / "travel" / "prompt.xml"
    options = ["--max-tokens", "6", "--temperature", "0", "--dtype", "float32"]
    result = run("run", str(path), *options)
    want = llm.generate_pml(path, GREEDY)[0]
    assert result.stdout == want.outputs[0].text + "\n"
    assert f"{len(want.prompt_token_ids)} prompt tokens: 0 cached" in result.stderr
    facts = json.loads(run("run", str(path), "--json", *options).stdout)
    assert facts["texts"] == [want.outputs[0].text]
    assert facts["num_computed_tokens"] == facts["num_prompt_tokens"]
    assert facts["time_to_first_token"] > 0


def test_compare_shows_both_ways_of_each_prompt(llm):
    paths = [EXAMPLES / name / "prompt.xml" for name in ("travel", "tutor")]
    options = ["--max-tokens", "6", "--dtype", "float32", "--repeat", "1"]
    shown = run("compare", *map(str, paths), "--json", *options).stdout.splitlines()
    for path, line in zip(paths, shown, strict=True):
        facts = json.loads(line)
        assert facts["prompt"] == str(path)
        llm.add_schema(path.parent / "schema.xml")
        compiled = llm.schemas.compile(path)
        for way, isolation, cached in (
            ("cached", "anchored", compiled.num_cached_tokens),
            ("whole", "off", 0),
        ):
            want = llm.generate_pml(path, GREEDY, isolation=isolation)[0]
            assert facts[way]["texts"] == [want.outputs[0].text]
            assert facts[way]["num_cached_tokens"] == cached
            assert facts[way]["num_computed_tokens"] == compiled.num_tokens - cached
            assert len(facts[way]["times_to_first_token"]) == 1
    table = run("compare", str(paths[1]), *options).stdout
    assert "modules cached" in table
    assert facts["whole"]["texts"][0].split()[0] in table


def test_compare_needs_something_cached(tmp_path):
    prompt = str(EXAMPLES / "tutor" / "prompt.xml")
    for option, reason in (
        (["--isolation", "off"], "isolation is off, which is compared anyway"),
        (["--share", "off"], "share is off"),
        (
            ["--dtype", "float32", "--kv-memory", "10MiB", "--max-model-len", "600"],
            "too few for the prompt's modules",
        ),
    ):
        result = CliRunner().invoke(app, ["pml", "compare", prompt, *option])
        assert reason in str(result.exception)


LIBRARY = Schema(
    "library",
    [
        "You know:\n",
        Module("anna", ["Anna lives in Ostby, and her dog is called Max.\n"]),
        Module("ben", ["Ben lives in Westby, and his cat is called Tom.\n"]),
    ],
)
ASKED = [
    ("<anna/>Where does Anna live?", "Ostby"),
    ("<ben/>Where does Ben live?", "WESTBY"),
    ("<anna/><ben/>Whose dog is called Max?", None),
    ("<anna/>Where does Ben live?", "no such text"),
]


@pytest.fixture
def questions(tmp_path):
    """A file of questions beside its schema."""
    (tmp_path / "library.xml").write_text(to_markup(LIBRARY))
    path = tmp_path / "asked.jsonl"
    lines = [
        {"pml": f'<prompt schema="library">{text}</prompt>'} | ({"answer": a} if a else {})
        for text, a in ASKED
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_questions_are_answered_in_every_isolation(llm, questions):
    options = ["--max-tokens", "12", "--dtype", "float32"]
    *each, told = map(
        json.loads, run("compare", str(questions), "--json", *options).stdout.splitlines()
    )
    llm.add_schema(LIBRARY)
    prompts = [json.loads(line)["pml"] for line in questions.read_text().splitlines()]
    params = GREEDY.replace(max_tokens=12)
    answers = {
        isolation: [
            o.outputs[0].text for o in llm.generate_pml(prompts, params, isolation=isolation)
        ]
        for isolation in ("off", "anchored", "isolated")
    }
    assert list(told["modes"]) == list(answers)
    for number, (one, (_, answer)) in enumerate(zip(each, ASKED, strict=True)):
        assert one["prompt"] == f"{questions}:{number + 1}"
        assert one["texts"] == {name: texts[number] for name, texts in answers.items()}
        if answer is None:
            assert "right" not in one
        else:
            assert one["right"] == {
                name: answer.lower() in texts[number].lower() for name, texts in answers.items()
            }
    assert (told["questions"], told["with_answers"]) == (4, 3)
    for name, counts in told["modes"].items():
        right = [one["right"][name] for one in each if "right" in one]
        assert counts["right"] == sum(right)
        equal = [a == b for a, b in zip(answers[name], answers["off"], strict=True)]
        assert counts["equal_to_off"] == sum(equal)
    # The model finds what it is told, and nothing finds what is in no document.
    assert told["modes"]["off"]["right"] == 2
    isolated = ["--isolation", "isolated"]
    *shown, verdict = run("compare", str(questions), *options, *isolated).stdout.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["off", "isolated"]
    counts = told["modes"]["isolated"]
    assert f"{counts['right']} right, {counts['equal_to_off']} with the text of off" in shown[2]
    assert verdict.startswith("use ")


def counted(isolation, off, right, known=True):
    """Facts of questions whose answers are right as these marks say, with different texts."""
    return [
        {
            "answer": "a" if known else None,
            "texts": {"off": "x", isolation: "x" if one == other else "y"},
            "computed_tokens": {"off": 9, isolation: 1},
            "right": {"off": one, isolation: other},
        }
        for one, other in zip(off, right, strict=True)
    ]


def test_the_verdict_is_by_a_sign_test():
    # 8 lost of 9 that one alone has right: 10 of 512 at equal odds. 7 of 9: 46 of 512.
    for lost, chance, begins in (
        (8, 10 / 512, "use off: anchored loses 8"),
        (7, 46 / 512, "use a"),
    ):
        off = [True] * lost + [False] * (9 - lost) + [True] * 31
        told = summary(counted("anchored", off, [not one for one in off[:9]] + [True] * 31))
        assert told["modes"]["anchored"]["chance"] == chance
        assert told["verdict"].startswith(begins)
        assert "large losses alone" not in told["verdict"]
    none = summary(counted("anchored", [False] * 40, [False] * 40))["verdict"]
    assert none == "no verdict: off has none of 40 right; ask what the model can answer"
    few = summary(counted("isolated", [True], [True]))["verdict"]
    assert few.startswith("use isolated: 1 of 1 right, off 1")
    assert few.endswith("; 1 right answers show large losses alone, ask for 30 or more")


def test_without_answers_the_verdict_is_by_equal_texts():
    same, other = [True] * 3, [True, True, False]
    assert summary(counted("anchored", same, same, known=False))["verdict"] == (
        "use anchored: all 3 answers are those of off"
    )
    assert summary(counted("anchored", same, other, known=False))["verdict"].startswith(
        "use off, unless other answers are as good: anchored has off's text in 2 of 3"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "q.jsonl:1 is not JSON"),
        ('{"pml": "<prompt/>", "right": "x"}', "unknown field in .*q.jsonl:1: 'right'"),
        ('{"pml": "<prompt", "answer": "x"}', "q.jsonl:1:1:"),
        ("", "q.jsonl holds no question"),
    ],
)
def test_a_bad_question_is_named_before_a_model_is_loaded(tmp_path, line, reason):
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    result = CliRunner().invoke(app, ["pml", "compare", "--model", "nowhere", str(path)])
    assert isinstance(result.exception, OnestemError)
    assert re.search(reason, str(result.exception)), result.exception


def test_questions_have_no_times(questions):
    result = CliRunner().invoke(app, ["pml", "compare", str(questions), "--repeat", "2"])
    assert "--repeat is of a prompt's times" in str(result.exception)


def test_run_names_what_it_does_not_find(tmp_path):
    prompt = tmp_path / "p.xml"
    prompt.write_text('<prompt schema="s">x</prompt>')
    (tmp_path / "broken.xml").write_text("<schema")
    result = CliRunner().invoke(app, ["pml", "run", str(prompt)])
    assert "no *.xml beside" in str(result.exception)


def test_encode_fills_the_disk_and_run_reads_it(tmp_path):
    folder = EXAMPLES / "travel"
    options = ["--dtype", "float32"]
    first = json.loads(run("encode", str(folder / "schema.xml"), "--json", *options).stdout)
    assert first["num_computed_tokens"] == first["num_tokens"] > 500
    assert first["folder"] == str(tmp_path / "cache" / "onestem" / "modules")
    assert len(list(Path(first["folder"]).iterdir())) == first["num_segments"]
    again = run("encode", str(folder / "schema.xml"), "-q", *options)
    assert f"{first['num_tokens']} tokens, 0 of them computed now" in again.stdout
    greedy = ["--max-tokens", "6", "--temperature", "0", "--json"]
    cached = json.loads(run("run", str(folder / "prompt.xml"), *options, *greedy).stdout)
    assert 0 < cached["num_computed_tokens"] < cached["num_prompt_tokens"] / 2
    fresh = ["--disk-kv", str(tmp_path / "other")]
    alone = json.loads(run("run", str(folder / "prompt.xml"), *options, *greedy, *fresh).stdout)
    assert alone["num_cached_tokens"] == 0
    assert alone["texts"] == cached["texts"]


def test_encode_says_what_had_no_room(tmp_path):
    schema = tmp_path / "schema.xml"
    schema.write_text(f'<schema name="s"><module name="a">{"word " * 900}</module></schema>')
    arguments = ["--disk-kv", str(tmp_path / "kv"), "--disk-kv-size", "8MiB"]
    options = ["--dtype", "float32", "-q"]  # in which 512 tokens take 8 MiB
    result = CliRunner().invoke(app, ["pml", "encode", str(schema), *arguments, *options])
    assert "could not be written" in str(result.exception)


def bench(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "pml", "--json", "--dtype", "float32", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--case", "library", "--tier", "host"], "--tier is of --case first-token: leave it out"),
        (["--case", "library", "--cached", "9"], "--cached is of --case first-token: leave it out"),
        (["--prompts", "2"], "--prompts is of --case library: leave it out"),
        (["--case", "both"], "case is 'both', expected first-token or library"),
    ],
)
def test_bench_refuses_options_of_the_other_case(arguments, line):
    result = CliRunner().invoke(app, ["bench", "pml", *arguments])
    assert str(result.exception) == line


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_bench_first_token(tier):
    small = ["--cached", "200", "--modules", "3", "--new", "5", "--repeat", "2"]
    facts = bench("--tier", tier, *small, "--kv-memory", "32MiB")
    assert facts["speedup"] == facts["off_first_token_seconds"] / facts["first_token_seconds"]
    assert facts["off_tokens_per_s"] > 0
    assert facts["linear_tokens_per_s"] > 0
    copied = facts["tiers"] or {}
    assert copied.get("from_host_tokens", 0) == (400 if tier == "host" else 0)
    assert copied.get("from_disk_tokens", 0) == (400 if tier == "disk" else 0)


def test_bench_library_answers_alike_in_all_modes():
    small = ["--prompts", "6", "--library", "4", "--module-tokens", "40", "--imports", "2"]
    runs = [
        bench("--case", "library", *small, "--output", "4", "--new", "6", "--share", share)
        for share in ("full", "storage")
    ]
    assert runs[0]["tokens_sha256"] == runs[1]["tokens_sha256"]
    assert runs[0]["combinations"] > 1
    assert runs[0]["processed_prompt_tokens"] == 6 * 6  # modules were there
