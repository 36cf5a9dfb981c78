"""Every table and figure runs at the smallest scale, and what it says comes from the engine alone.

The server and the accuracy run are cut to one mode each: a start of a server, and 25 libraries of
questions, take most of a minute.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onestem.errors import ConfigError
from onestem.options import EngineOptions
from onestem.paper.accuracy import Accuracy
from onestem.paper.attention import relay_speedup
from onestem.paper.bench import Bench
from onestem.paper.experiment import Cell, Experiment, points
from onestem.paper.jobs import PlanSavings, planned_prompts, scaled_job
from onestem.paper.registry import EXPERIMENTS
from onestem.paper.report import html_of, picture_of
from onestem.paper.run import run_experiment
from onestem.paper.serve import SustainableRates
from onestem.paper.table import table_of, text_of

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
        least = replace(experiment.measure, systems=(64,), modes=("full",))
        return replace(experiment, measure=least)
    if isinstance(experiment.measure, Accuracy):
        return replace(experiment, measure=Accuracy(isolations=("anchored",)))
    return experiment


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_runs(name, bench, untold):
    experiment = cut(EXPERIMENTS[name])
    result = run_experiment(experiment, untold if name in OWN_MODEL else bench, "command")
    assert json.loads(json.dumps(result)) == result
    values = [cell["value"] for cell in result["cells"] if cell["value"] is not None]
    assert values
    assert all(math.isfinite(value) and value >= 0 for value in values)
    table = table_of(experiment, result)
    assert table.rows
    assert {len(row) for row in table.rows} == {len(table.header)}
    ElementTree.fromstring(picture_of(experiment, result))
    assert name in html_of([(experiment, result)])


def test_medians_of_turns_count(tiny):
    told = options("full", model=tiny, random_weights=True)
    with Bench(told, scale=SCALE, repeat=3) as bench:
        result = run_experiment(EXPERIMENTS["batch-table1"], bench, "command")
    cells = [cell for cell in result["cells"] if " : " not in cell["series"]]
    assert {cell["series"] for cell in cells} == {"planned", "input order", "off"}
    assert all(sorted(cell["turns"])[1] == cell["value"] for cell in cells)
    assert result["repeat"] == 3
    assert result["discarded"] == 1


def test_no_rate_holds_below_an_impossible_limit(bench):
    experiment = EXPERIMENTS["relay-fig8"]
    least = replace(experiment.measure, systems=(64,), modes=("full",), limit=1e-9)
    result = run_experiment(replace(experiment, measure=least), bench, "command")
    (cell,) = result["cells"]
    assert cell["value"] is None
    assert cell["note"] == "even the lowest rate was too high"


def test_devices_hold_a_model_together(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_key_value_heads": 2}))
    together = options("full", model=tmp_path, random_weights=True, tensor_parallel_size=2)
    with Bench(together, scale=SCALE) as bench:
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


@pytest.mark.parametrize("name", ["relay-table4", "hydragen-fig4"])
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


# One of each kind of measure.
COUNTED = ("relay-fig6", "relay-fig7", "hydragen-fig4", "batch-fig7", "batch-table1", "cache-fig5")


@pytest.mark.parametrize("name", COUNTED)
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
