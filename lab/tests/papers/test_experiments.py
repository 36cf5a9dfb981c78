"""Every table and figure runs at the smallest scale, and what it says comes from the engine alone.

The server and the accuracy run are cut to one mode each: a start of a server, and 25 libraries of
questions, take most of a minute.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onestem.bench import BatchCase
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.models.find import find_model
from onestem.options import EMBEDDED, EngineOptions
from onestem.request import SamplingParams
from onestem_lab.cases import batch_of, prompts_of
from onestem_lab.lengths import Poisson, Uniform
from onestem_lab.papers.accuracy import Accuracy
from onestem_lab.papers.attention import relay_speedup
from onestem_lab.papers.bench import Bench
from onestem_lab.papers.experiment import Cell, Experiment, points
from onestem_lab.papers.jobs import (
    PlanSavings,
    Setting,
    computed_with_lru,
    job,
    planned_prompts,
    scaled_job,
)
from onestem_lab.papers.needles import Needles, is_right
from onestem_lab.papers.registry import EXPERIMENTS
from onestem_lab.papers.report import html_of, picture_of
from onestem_lab.papers.run import run_experiment
from onestem_lab.papers.serve import SustainableRates
from onestem_lab.papers.table import table_of, text_of
from tests.parallel.teams import forked
from tests.soak import soaked

SCALE = 0.01
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
SHORT = {"systems": (64,), "modes": ("full",), "seconds": 0.05, "reach": 2}  # of relay-fig8
OWN_MODEL = ("cache-fig6", "cache-fig7", "cache-fig8", "cache-table3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def options(share: str, **more: object) -> EngineOptions:
    return EngineOptions(
        device="cpu", dtype="float32", kv_memory="32MiB", threads=1, share=share, **more
    )


def bench_of(tiny: Path, share: str) -> Bench:
    return Bench(options(share, model=tiny, random_weights=True), scale=SCALE)


@pytest.fixture(scope="module")
def bench(tiny: Path):
    with bench_of(tiny, "full") as made:
        yield made


@pytest.fixture(scope="module")
def unshared(tiny: Path):
    with bench_of(tiny, "off") as made:
        yield made


@pytest.fixture(scope="module")
def untold():
    """Without a model told: shapes of the papers, or the embedded model."""
    with Bench(options("full"), scale=SCALE) as made:
        yield made


def cut(experiment: Experiment) -> Experiment:
    if isinstance(experiment.measure, SustainableRates):
        least = replace(experiment.measure, **SHORT, limit=1e9)
        return replace(experiment, measure=least)
    if isinstance(experiment.measure, Accuracy):
        return replace(experiment, measure=Accuracy(isolations=("anchored",)))
    return experiment


def one_of_each_kind() -> Iterator[object]:
    """All experiments; those after the first of a kind of measure are left to `make soak`. Rates
    have a test of their own."""
    known = {SustainableRates}
    for name, experiment in EXPERIMENTS.items():
        kind = type(experiment.measure)
        yield soaked(name) if kind in known else name
        known.add(kind)


@pytest.mark.parametrize("name", list(one_of_each_kind()))
def test_each_runs(name, bench, untold):
    experiment = cut(EXPERIMENTS[name])
    result = run_experiment(experiment, untold if name in OWN_MODEL else bench, "command")
    assert_is_shown(experiment, result)


def assert_is_shown(experiment: Experiment, result: dict) -> None:
    assert json.loads(json.dumps(result)) == result
    values = [cell["value"] for cell in result["cells"] if cell["value"] is not None]
    assert values
    assert all(math.isfinite(value) and value >= 0 for value in values)
    table = table_of(experiment, result)
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.header)}
    ElementTree.fromstring(picture_of(experiment, result))
    assert experiment.name in html_of([(experiment, result)])


@pytest.mark.soak
def test_medians_of_turns_count(tiny):
    told = options("full", model=tiny, random_weights=True)
    with Bench(told, scale=SCALE, repeat=3) as bench:
        result = run_experiment(EXPERIMENTS["batch-table1"], bench, "command")
    cells = [cell for cell in result["cells"] if " : " not in cell["series"]]
    assert {cell["series"] for cell in cells} == {"planned", "input order", "off"}
    assert all(sorted(cell["turns"])[1] == cell["value"] for cell in cells)
    assert result["repeat"] == 3
    assert result["discarded"] == 1


@pytest.mark.soak
def test_no_rate_holds_below_an_impossible_limit(bench):
    (cell,) = rates(bench, limit=1e-9)["cells"]
    assert cell["value"] is None
    assert cell["note"] == "even the lowest rate was too high"
    assert cell["ran"]["tried"] == [[400, False], [200, False]]


@pytest.mark.soak
def test_a_rate_is_searched_from_where_another_search_ended(bench):
    result = rates(bench, limit=1e9, systems=(64, 128))
    assert_is_shown(EXPERIMENTS["relay-fig8"], result)
    first, second = result["cells"]
    assert first["ran"]["tried"] == [[400, True], [800, True]]
    assert [rate for rate, _ in second["ran"]["tried"]] == [800, 1000, 1250, 1562.5, 1600]
    for cell, rate in ((first, 800), (second, 1600)):
        assert cell["value"] == rate
        assert cell["note"] == "even the highest rate that was tried holds"
        assert cell["ran"]["requests"] == 20


def rates(bench: Bench, **changes: object) -> dict:
    """A short relay-fig8."""
    experiment = EXPERIMENTS["relay-fig8"]
    measure = replace(experiment.measure, **SHORT | changes)
    return run_experiment(replace(experiment, measure=measure), bench, "command")


def test_devices_hold_a_model_together(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_key_value_heads": 2}))
    together = options("full", model=tmp_path, random_weights=True, tensor_parallel_size=2)
    with forked(), Bench(together, scale=SCALE) as bench:
        result = run_experiment(EXPERIMENTS["hydragen-fig4"], bench, "command")
        with pytest.raises(ConfigError, match="relay-fig6 runs no model: leave tensor_parallel"):
            run_experiment(EXPERIMENTS["relay-fig6"], bench, "command")
    assert result["device"].startswith("2 x ")
    assert {cell["series"] for cell in result["cells"] if cell["value"]} >= {"full", "storage"}


def test_each_row_of_a_table_with_holes_is_left():
    settings = EXPERIMENTS["batch-fig7"].measure.settings
    with Bench(options("full"), scale=SCALE) as bench:
        left = [setting.at for setting in bench.thin_table(settings, attrgetter("at"))]
    assert [(at["degree"], at["prefix"]) for at in left] == [(2, 2000), (16, 1000), (16, 16000)]


@pytest.mark.parametrize("name", ["hydragen-fig4", soaked("relay-table4")])
def test_shapes_of_the_papers_are_scaled(name, untold):
    result = run_experiment(EXPERIMENTS[name], untold, "command")
    assert result["model"] is None
    assert any(cell["value"] for cell in result["cells"])


@pytest.mark.parametrize(("scale", "part"), [(1, 1), (0.5, 1), (0.1, 1), (1, 0.1), (0.01, 1)])
def test_jobs_that_are_compared_have_the_same_size(scale, part):
    with Bench(options("full"), scale=scale, part=part) as bench:
        settings = EXPERIMENTS["hydragen-fig7"].measure.settings
        jobs = [scaled_job(setting.job, bench) for setting in settings]
    one, two = (made.groups * math.prod(made.degrees) for made in jobs)
    assert one == pytest.approx(120 * 128 * scale * part, rel=0.01)
    assert two == pytest.approx(one, rel=0.01)
    if scale == 1:
        assert len({batch_of(made, 200_000, shared=1) for made in jobs}) == 1


def test_the_equal_batch_is_that_of_the_baseline(tmp_path):
    """Hydragen's table 1, with KV memory of 480 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    small = options("full", model=tmp_path, random_weights=True).replace(kv_memory="60KiB")
    own = job(1, (24, 2), (20, 30), 1, 49)  # 100 tokens a request
    measure = replace(
        EXPERIMENTS["hydragen-table1"].measure,
        settings=(Setting({"model": "m"}, own, "llama2-7b"),),
    )
    with Bench(small) as bench:
        assert bench.llm("llama2-7b", 100).kv_tokens == 480
        result = run_experiment(replace(EXPERIMENTS["hydragen-table1"], measure=measure), bench, "")
    found = {cell["series"]: cell["ran"].get("max_num_seqs") for cell in result["cells"]}
    assert found["full, equal batch"] == found["off"] == 4
    assert found["full"] is None


# One of each kind of measure.
COUNTED = ("relay-fig6", "relay-fig7", "hydragen-fig4", "cache-fig5")


@pytest.mark.parametrize("name", [*COUNTED, *map(soaked, ("batch-fig7", "batch-table1"))])
def test_unshared_nothing_is_gained(name, unshared):
    """By what the engine counts, what is shared otherwise is as `off` under --share off."""
    experiment = EXPERIMENTS[name]
    result = run_experiment(experiment, unshared, "command")
    own = counts_of(result, "device" if name == "cache-fig5" else experiment.ratio[0])
    assert own
    notes = text_of(table_of(experiment, result))
    assert "with --share off" in notes
    if result["model"] is not None:
        assert f"Ours ran {result['model']} in place of" in notes
    others = counts_of(result, "off") or counts_of(result, "unshared")
    for where, counts in own.items():
        if "logical_prompt_tokens" in counts:
            assert counts["shared_read_tokens"] == 0
            assert counts["processed_prompt_tokens"] == counts["logical_prompt_tokens"]
        for what in {"keys_read", "computed_tokens", "processed_prompt_tokens"} & set(counts):
            assert not others or others[where][what] == counts[what]


def counts_of(result: dict, series: str) -> dict:
    cells = [cell for cell in result["cells"] if cell["series"] == series]
    return {json.dumps(cell["at"]): cell["counts"] for cell in cells}


PLANNED = [name for name, each in EXPERIMENTS.items() if isinstance(each.measure, PlanSavings)]


@pytest.mark.parametrize("name", PLANNED)
def test_an_unshared_plan_saves_nothing(name, unshared):
    result = run_experiment(EXPERIMENTS[name], unshared, "command")
    for cell in result["cells"]:
        assert cell["counts"]["computed_tokens"] == cell["ran"]["prompt_tokens"]


def test_savings_are_those_of_the_prompts():
    """Equation 1 of BatchLLM: tokens that the prompt before it in sorted order does not have."""
    measure = EXPERIMENTS["batch-table3"].measure
    with Bench(options("full"), scale=0.05) as bench:
        result = run_experiment(EXPERIMENTS["batch-table3"], bench, "command")
        for setting, job in measure.settings:
            prompts = sorted(ids for ids, _ in planned_prompts(bench, job))
            computed = sum(map(own_tokens, [[], *prompts], prompts))
            found = {c["series"]: c for c in result["cells"] if c["at"] == setting}
            assert found["all"]["counts"]["computed_tokens"] == computed
            assert found["all"]["value"] >= found["one"]["value"] > found["heuristic"]["value"]
            assert found["none"]["value"] == 0


def own_tokens(before: list[int], prompt: list[int]) -> int:
    shared = 0
    while shared < min(len(before), len(prompt)) and before[shared] == prompt[shared]:
        shared += 1
    return len(prompt) - shared


@pytest.mark.parametrize(("degree", "seed"), [(3, 0), (Poisson(2.05), 1)])
def test_a_batch_is_counted_by_what_is_not_shared(degree, seed):
    made = BatchCase(
        2, (3, degree), (7, Uniform(5, 20)), Uniform(1, 9), Uniform(1, 30), "sorted", seed
    )
    requests = made.requests(10**9)
    total = sum(len(ids) + output for ids, output in requests)
    assert batch_of(made, 5000, shared=0) == int(5000 / (total / len(requests)))
    assert batch_of(made, 5000, shared=1) == int((5000 - 14) / (total / len(requests) - 7))
    assert batch_of(made, 1, shared=0) == 1


def test_a_drawn_number_of_branches_makes_that_many_requests():
    made = BatchCase(1, (40, Poisson(2.05)), (5, 20), 3, 1, "sorted", 0)
    prompts = [tuple(ids) for ids in prompts_of(made, 10**9)]
    assert len({ids[:5] for ids in prompts}) == 1
    degrees = Counter(ids[:25] for ids in prompts).values()
    assert len(degrees) == 40
    assert len(set(degrees)) > 2
    by_turns = prompts_of(replace(made, input_order="round-robin"), 10**9)
    assert sorted(map(tuple, by_turns)) == sorted(prompts)


# --------------------------------------------------------------------- Hydragen's other baselines


@pytest.mark.parametrize("name", ["hydragen-fig5", *map(soaked, ("hydragen-fig8", "relay-fig1"))])
def test_copies_are_read_as_often_and_stored_as_often(name, bench):
    result = run_experiment(EXPERIMENTS[name], bench, "command")
    copies, full = (counts_of(result, each) for each in ("copies", "full"))
    assert copies.keys() == full.keys()
    sizes = {json.dumps(c["at"]): c["ran"] for c in result["cells"] if c["series"] == "copies"}
    for at, counts in copies.items():
        rows = sizes[at]["groups"] * sizes[at]["degree"]
        assert counts["keys_read"] == rows * (sizes[at]["prefix"] + sizes[at]["own"])
        assert counts["keys_stored"] == counts["keys_read"]
        assert full[at]["keys_stored"] == counts["keys_stored"] - (rows - 1) * sizes[at]["prefix"]


def test_copies_that_do_not_fit_are_left_out(bench, monkeypatch):
    monkeypatch.setattr("onestem_lab.papers.attention.memory_bytes", lambda device: 0)
    result = run_experiment(EXPERIMENTS["hydragen-fig5"], bench, "command")
    left_out = [cell for cell in result["cells"] if cell["series"] == "copies"]
    assert left_out
    assert all(cell["value"] is None for cell in left_out)
    assert all(cell["note"].startswith("copies of the prefix take 0 GiB") for cell in left_out)


PAINT = Needles(
    fact="{name} Bridge is painted {color}.",
    question="What colour is {name} Bridge painted?",
    facts=5,
    shots=3,
)  # of a form that the embedded model knows


def test_right_answers_of_a_model_with_weights_are_counted():
    """As many as where each question is asked in a call for itself."""
    fig6 = EXPERIMENTS["hydragen-fig6"]
    measure = replace(fig6.measure, batches=(6,), prefixes=(300,), new=6, needles=PAINT)
    with Bench(options("full", model=EMBEDDED).replace(kv_memory="64MiB")) as bench:
        result = run_experiment(replace(fig6, measure=measure), bench, "command")
        llm = bench.llm("yi-6b-200k", 1000)
        asked = PAINT.asked(llm.tokenizer, 6, 300, 5)
        params = SamplingParams(temperature=0, max_tokens=6)
        outputs = [llm.generate([prompt], params)[0].outputs[0] for prompt in asked.prompts]
        right = sum(
            is_right(llm.tokenizer, output.token_ids, color)
            for output, color in zip(outputs, asked.right, strict=True)
        )
    assert right > 0
    found = {cell["series"]: cell for cell in result["cells"]}
    for mode in ("full", "off"):
        assert found[mode]["counts"]["questions"] == 6
        assert found[mode]["counts"]["right_answers"] == right
        assert found[mode]["note"] == f"{right} of 6 answers are right"
    assert "right_answers" not in found["no-attention"]["counts"]
    assert found["full"]["ran"]["prefix"] == asked.prefix >= 300


def test_random_weights_answer_nothing(bench):
    result = run_experiment(EXPERIMENTS["hydragen-fig6"], bench, "command")
    answering = [c for c in result["cells"] if c["value"] and c["series"] in ("full", "off")]
    assert answering
    for cell in answering:
        assert cell["note"].startswith("no answers were counted: weights are random")
        assert "right_answers" not in cell["counts"]


def test_needles_stand_in_one_document():
    tokenizer = Tokenizer.from_directory(find_model(EMBEDDED))
    asked = Needles().asked(tokenizer, 20, 900, 12)
    assert {tuple(ids[: asked.prefix]) for ids in asked.prompts} == {
        tuple(asked.prompts[0][: asked.prefix])
    }
    assert 900 <= asked.prefix < 950
    text = tokenizer.decode(asked.prompts[0][: asked.prefix])
    for ids, color in zip(asked.prompts, asked.right, strict=True):
        question = tokenizer.decode(ids[asked.prefix :])
        name = re.fullmatch(
            r"Question: What color is the fur of the dog named (\w+)\?\nAnswer:", question
        )
        assert text.count(f"The dog named {name[1]} has fur that is {color}.") == 1
    assert text.count("The dog named") == 12 + 5
    assert text.count("Answer:") == 5
    assert asked.prompts[12:] == asked.prompts[:8]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" white\nQuestion: black", True),
        ("The fur of Bado is white.", True),
        (" black", False),
        (" black or white", False),
        ("", False),
    ],
)
def test_the_first_line_of_an_answer_counts(answer, right):
    tokenizer = Tokenizer.from_directory(find_model(EMBEDDED))
    ids = tokenizer.encode(answer, add_special_tokens=False)
    assert is_right(tokenizer, ids, "white") is right
    end = [tokenizer.eos_token_id, *tokenizer.encode("red")]
    assert is_right(tokenizer, ids + end, "white") is right


# ------------------------------------------------------------------ BatchLLM's 70B in 4 bits


@pytest.mark.soak
def test_a_shape_in_4_bits_on_two_devices(untold, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "onestem_lab.papers.bench.LLM.from_options",
        lambda options, make=LLM.from_options: loaded.append(make(options)) or loaded[-1],
    )
    result = run_experiment(EXPERIMENTS["batch-fig6d"], untold, "command")
    untold.release()
    assert result["device"].startswith("2 x ")
    assert {(llm.options.quantization, llm.options.tensor_parallel_size) for llm in loaded} == {
        ("int4", 2)
    }
    assert {c["series"] for c in result["cells"]} >= {"planned", "input order", "sorted"}
    one = EXPERIMENTS["batch-fig6c"].measure
    assert replace(one, ranks=2) == EXPERIMENTS["batch-fig6d"].measure


def test_the_memory_of_4_bits_is_counted(monkeypatch):
    monkeypatch.setattr("onestem_lab.papers.bench.memory_bytes", lambda device: 80 * 2**30)
    with Bench(EngineOptions(device="cpu", dtype="bfloat16")) as bench:
        bench.engine_options("llama3.1-70b", 100, quantization="int4")
        with pytest.raises(ConfigError, match=r"llama3\.1-70b takes 131 GiB"):
            bench.engine_options("llama3.1-70b", 100)


def test_a_model_that_is_named_keeps_its_format(bench):
    assert bench.engine_options("llama3.1-70b", 100, quantization="int4").quantization is None


# ------------------------------------------------------------------- BatchLLM's industry workload


@pytest.fixture(scope="module")
def industry():
    with Bench(options("full"), scale=0.3) as bench:
        return run_experiment(EXPERIMENTS["batch-industry"], bench, "command")


def test_the_industry_workload_is_the_papers(industry):
    """Figure 8's averages, and the 58.1% that can be saved at best."""
    with Bench(options("full"), scale=0.3) as bench:
        ((_, case),) = EXPERIMENTS["batch-industry"].measure.settings
        prompts = [tuple(ids) for ids, _ in planned_prompts(bench, case)]
    computed = sum(map(own_tokens, [[], *sorted(prompts)], sorted(prompts)))
    total = sum(map(len, prompts))
    assert round(100 * (1 - computed / total)) == 58
    assert len({ids[:12] for ids in prompts}) == 1
    degrees = [n for n in Counter(ids[:200] for ids in prompts).values() if n > 1]
    assert round(sum(degrees) / len(degrees)) == 3
    found = {cell["series"]: cell for cell in industry["cells"]}
    assert found["all"]["counts"]["computed_tokens"] == computed
    assert found["all"]["value"] > found["one"]["value"] > found["lru"]["value"] > 0


def test_least_recently_used_pages_go_first():
    first, second = list(range(8)), list(range(100, 108))

    def computed(*prompts, kv_tokens):
        return computed_with_lru([(ids, 1) for ids in prompts], kv_tokens, 4)

    # A prompt with its answer fills two pages and a bit. The last token is computed always.
    assert computed(first, first, kv_tokens=24) == 8 + 4
    assert computed(first, second, first, kv_tokens=24) == 8 + 8 + 4
    assert computed(first, second, first, kv_tokens=12) == 24
    assert computed(first, [*first, 8, 9], kv_tokens=100) == 8 + 2
    assert computed(first, first, kv_tokens=0) == 16


def test_eq_10():
    assert relay_speedup(2048, 128, 32) == pytest.approx(2178 / 199)
    assert relay_speedup(0, 128, 32) < 1


def test_a_ratio_says_how_many_times_better():
    def ratio(better):
        experiment = Experiment(
            name="x", source="", title="", machine="", unit="", measure=None,
            better=better, ratio=("full", "off"),
        )  # fmt: skip
        cells = points("at", {1: {"full": 2.0, "off": 8.0}})
        return experiment.with_ratios(cells, experiment.ratio)[-1]

    assert ratio("less") == Cell({"at": 1}, "full : off", 4.0)
    assert ratio("more") == Cell({"at": 1}, "full : off", 0.25)
