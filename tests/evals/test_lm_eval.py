"""lm-eval's own machinery with Onestem and with its `hf` model: the same scores and numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import ConfigError, RequestError
from onestem.llm import LLM
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny

tasks = pytest.importorskip("lm_eval.tasks", reason="lm-eval is not installed (onestem[eval])")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own, and its libraries'

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "Q: {{q}}\nA:", "doc_to_target": "a"}
TASKS = {
    "words": {**CHOICE, "doc_to_choice": ["yes", "yes sir", "no", "not at all"]},
    "shots": {**CHOICE, "doc_to_choice": ["A", "B", "C", "D"], "num_fewshot": 3,
              "fewshot_config": {"sampler": "first_n"}},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]},
    "free": {"output_type": "generate_until", "doc_to_text": "Q: {{q}}\nA:", "doc_to_target": "x",
             "metric_list": [{"metric": "exact_match"}],
             "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = make_tiny("llama", tmp_path_factory.mktemp("lm-eval") / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tasks in files."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {"q": f"what is {i}{' or more' * (i % 3)}?", "a": i % 4, "text": f"Text {i}: " + "ab " * i}
        for i in range(6)
    ]
    docs[3]["text"] *= 30  # longer than the model
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, fields in TASKS.items():
        task = {
            "task": f"tiny_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "fewshot_split": "test",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def ours(model):
    from onestem.evals.lm_eval import OnestemLM

    with LLM(model, dtype="float32", kv_memory="8MiB", device="cpu", max_model_len=256) as llm:
        yield OnestemLM(llm=llm)


@pytest.fixture(scope="module")
def theirs(model):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        str(model), device="cpu", dtype="float32", batch_size=4, max_length=256, backend="causal"
    )


def evaluate(lm, folder: Path, names: Iterable[str], **options):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        lm,
        tasks=[f"tiny_{name}" for name in names],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )


def alike(ours, theirs, folder: Path, names: Iterable[str], **options) -> None:
    # Together: lm-eval takes seconds for each call and task, whatever is in it.
    found, want = (evaluate(lm, folder, names, **options) for lm in (ours, theirs))
    for name in names:
        alike_in(f"tiny_{name}", found, want)


def alike_in(task: str, found: dict, want: dict) -> None:
    samples = zip(found["samples"][task], want["samples"][task], strict=True)
    for one, other in samples:
        assert one["arguments"] == other["arguments"]
        for got, wanted in zip(one["resps"], other["resps"], strict=True):
            (got,), (wanted,) = got, wanted
            if isinstance(wanted, tuple):
                assert got[0] == pytest.approx(wanted[0], abs=1e-4)
                assert bool(got[1]) == bool(wanted[1])
            elif isinstance(wanted, float):
                assert got == pytest.approx(wanted, abs=1e-4, rel=1e-6)
            else:
                assert got == wanted
    for metric, value in want["results"][task].items():
        if isinstance(value, float):
            assert found["results"][task][metric] == pytest.approx(value, rel=1e-5), metric


def test_the_same_as_transformers(ours, theirs, folder):
    alike(ours, theirs, folder, TASKS)
    ours.llm.engine.check()


def test_chats_are_the_same(ours, theirs, folder):
    alike(
        ours,
        theirs,
        folder,
        ["shots", "free"],
        apply_chat_template=True,
        fewshot_as_multiturn=False,
    )


def test_shots_are_computed_once(ours, folder):
    ours.llm.engine.reset_stats()
    ours.llm.engine.cache.clear()
    found = evaluate(ours, folder, ["shots"], limit=6)
    contexts = {args[0] for s in found["samples"]["tiny_shots"] for args in s["arguments"]}
    encoded = [tuple(ours.tok_encode(context)) for context in contexts]
    distinct = {ids[:i] for ids in encoded for i in range(1, len(ids) + 1)}
    # Options of one token are read off the prompt's last row; those of two take a row more.
    most = len(distinct) + 4 * len(contexts)
    assert ours.llm.engine.stats.processed_prompt_tokens <= most


def test_refusals(ours, model):
    from onestem.evals.lm_eval import OnestemLM

    with pytest.raises(ConfigError, match="one of pretrained and llm"):
        OnestemLM()
    with pytest.raises(ConfigError, match="kv_memory cannot be changed"):
        OnestemLM(llm=ours.llm, kv_memory="1GiB")
    with pytest.raises(RequestError, match="gen_kwargs has num_beams"):
        ours.generate_until([SimpleNamespace(args=("a", {"num_beams": 4}))])
    with pytest.raises(RequestError, match="a continuation has 300 tokens, limit is 256"):
        ours._loglikelihood_tokens([(("", ""), [5], [6] * 300)])


def test_the_command(model, folder, tmp_path, monkeypatch):
    # lm-eval's own tasks are thousands of files.
    few = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", few)
    command = [
        "eval", "tiny_words", "--model", str(model), "--include-path", str(folder),
        "--limit", "3", "--kv-memory", "8MiB", "--device", "cpu", "--dtype", "float32",
        "--output", str(tmp_path / "results.json"),
    ]  # fmt: skip
    # Not in a process of its own: that imports lm-eval for half a minute.
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "tiny_words" in done.stdout
    written = json.loads((tmp_path / "results.json").read_text())
    assert "acc,none" in written["results"]["tiny_words"]
