"""Options are declared once: what derives from the declaration, and which source goes first."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.cli.options import Only, with_options
from onestem.errors import ConfigError
from onestem.llm import LLM
from onestem.options import Defaults, EngineOptions
from onestem.server.settings import Settings
from onestem_lab.load.flags import flags_of
from tests.models.tiny import make_tiny

PACKAGE = Path(__file__).parent.parent / "onestem"
VERBS = (
    ("generate",), ("batch",), ("serve",), ("bench", "job"), ("bench", "batch"), ("bench", "pml"),
    ("bench", "serve"), ("pml", "run"), ("pml", "encode"),
)  # fmt: skip

runner = CliRunner()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_with_an_engine_offers_each_of_its_options(verb):
    command = typer.main.get_command(app)
    for word in verb:
        command = command.get_command(typer.Context(command), word)
    offered = {flag for one in command.params for flag in one.opts}
    assert {f"--{flag}" for flag in EngineOptions.offered().values()} <= offered
    assert "--config" in offered


def test_llm_has_the_declared_arguments():
    parameters = inspect.signature(LLM).parameters
    assert list(parameters) == list(EngineOptions.model_fields)
    assert parameters["page_size"].default == 16


@pytest.mark.parametrize("kind", [EngineOptions, Settings])
def test_every_option_has_a_help_text(kind):
    assert all(kind.model_fields[name].description for name in kind.offered())


def test_options_are_named_where_they_are_declared_and_used():
    """Whoever adds an option touches its declaration and the place that uses it."""
    naming = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "disk_kv_size" in path.read_text()
    ]
    assert naming == ["build.py", "options.py"]


def defaults(tmp_path, text: str = "", **environment: str) -> Defaults:
    file = tmp_path / "onestem.toml"
    file.write_text(text)
    return Defaults(file if text else None, environment)


def test_given_goes_before_variables_and_they_before_the_file(tmp_path):
    text = 'page-size = 8\nkv_memory = "1GiB"\nshare = "off"\n[serve]\nport = 1\n'
    found = defaults(tmp_path, text, ONESTEM_PAGE_SIZE="32", ONESTEM_SHARE="", ONESTEM_SEED="7")
    made, origins = found.options(EngineOptions, {"seed": 9})
    assert (made.page_size, made.kv_memory, made.share, made.seed) == (32, "1GiB", "off", 9)
    file = str(tmp_path / "onestem.toml")
    assert origins == {
        "page_size": "ONESTEM_PAGE_SIZE", "kv_memory": file, "share": file, "seed": "given",
    }  # fmt: skip
    assert found.options(Settings)[0].port == 1


def test_variables_are_read_as_the_type_of_their_option(tmp_path):
    found = defaults(
        tmp_path,
        ONESTEM_RANDOM_WEIGHTS="1", ONESTEM_MAX_STEP_MS="2.5", ONESTEM_THREADS="2",
        ONESTEM_DISK_KV="/m", ONESTEM_ATTENTION="torch", ONESTEM_SERVE_APP="a=1,b=2",
        ONESTEM_SERVE_PORT="81", ONESTEM_SERVE_LOG_FORMAT="json", ONESTEM_HOME="x",
    )  # fmt: skip
    made = found.options(EngineOptions)[0]
    assert (made.random_weights, made.max_step_ms, made.threads) == (True, 2.5, 2)
    assert (made.disk_kv, made.impl) == ("/m", "torch")
    server = found.options(Settings)[0]
    assert (server.apps, server.port, server.log_format) == (("a=1", "b=2"), 81, "json")
    assert found.unknown(EngineOptions, Settings) == ["ONESTEM_HOME"]


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("pagesize = 8", {}, "there is no option 'pagesize': did you mean page_size?"),
        ("[serve]\nprot = 8", {}, "there is no option 'prot': did you mean port?"),
        ("[server]\nport = 8", {}, "there is no option 'server': did you mean serve?"),
        ("serve = 8", {}, "serve is 8, expected a table"),
        ("page_size = 0", {}, "onestem.toml: page_size is 0, expected an integer of at least 1"),
        ("page_size = ", {}, "is no TOML"),
        ("", {"ONESTEM_KV_MEMORY": "9" * 400 + "GiB"}, "expected bytes, or text like 512MiB"),
        ("", {"ONESTEM_THREADS": "9" * 30}, "expected an integer from 1 to 4096"),
        (
            "page_size = 8\npage-size = 8",
            {},
            "onestem.toml: page-size stands twice, with _ and with",
        ),
        ("", {"ONESTEM_PAGE_SIZE": "x"}, "ONESTEM_PAGE_SIZE is 'x', expected an integer"),
        ("", {"ONESTEM_PAGE_SIZE": "0"}, "ONESTEM_PAGE_SIZE: page_size is 0, expected an integer"),
        ("", {"ONESTEM_RANDOM_WEIGHTS": "x"}, "ONESTEM_RANDOM_WEIGHTS is 'x', expected true or"),
        ("", {"ONESTEM_SERVE_PORT": "99999"}, "port is 99999, expected an integer from 0 to 65535"),
        ("", {"ONESTEM_CONFIG": "/no/such"}, "cannot read /no/such"),
    ],
)
def test_what_cannot_be_says_where_it_stands(tmp_path, text, environment, message):
    def read() -> None:
        found = defaults(tmp_path, text, **environment)
        for kind in (EngineOptions, Settings):
            found.options(kind)

    with pytest.raises(ConfigError) as told:
        read()
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_the_command_line_and_python_read_the_same(tmp_path, monkeypatch):
    model = make_tiny("llama", tmp_path / "tiny")
    monkeypatch.setenv("ONESTEM_KV_MEMORY", "1MiB")
    monkeypatch.setenv("ONESTEM_PAGE_SIZE", "8")
    monkeypatch.setenv("ONESTEM_DEVICE", "cpu")
    with LLM(model) as llm:
        assert (llm.options.page_size, llm.engine.cache.pool.page_size) == (8, 8)
        assert llm.options.kv_memory == llm.kv_tokens * llm.decoder.kv_bytes_per_token <= 1 << 20
        identity = {"device", "dtype", "logprobs_mode", "max_model_len", "quantization"}
        identity |= {"deterministic", "random_weights"}
        assert set(llm.options.identity()) == identity
    with LLM(model, page_size=4) as llm:
        assert llm.options.page_size == 4
    with LLM.from_options(EngineOptions(model=model, kv_memory="1MiB")) as llm:
        assert llm.options.page_size == 16
    shown = json.loads(runner.invoke(app, ["env", "--json"]).stdout)
    assert shown["options"]["page_size"] == {"value": 8, "from": "ONESTEM_PAGE_SIZE"}
    assert shown["options"]["share"] == {"value": "full", "from": "default"}


@pytest.mark.parametrize("made_of", [LLM, EngineOptions])
def test_the_models_name_alone_may_be_left_out(made_of):
    with pytest.raises(TypeError, match="2 arguments without a name"):
        made_of("m", "cpu")
    with pytest.raises(TypeError, match="model is given twice"):
        made_of("embedded", model="m")
    assert EngineOptions("m", seed=1) == EngineOptions(model="m", seed=1)


def test_a_verbs_own_parameter_stands_in_for_the_field():
    seen = {}

    def verb(engine: EngineOptions, seed: int = 3) -> None:
        seen.update(seed=seed, engine=engine.seed, page=engine.page_size)

    made = typer.Typer()
    made.command()(with_options(verb))
    assert runner.invoke(made, ["--page-size", "4"]).exit_code == 0
    assert seen == {"seed": 3, "engine": 3, "page": 4}
    assert runner.invoke(made, ["--seed", "5"]).exit_code == 0
    assert seen == {"seed": 5, "engine": 5, "page": 16}


def test_serves_argument_goes_before_a_variable(monkeypatch):
    served = []

    async def serve(settings: Settings) -> None:
        served.append(settings.engine.model)

    monkeypatch.setattr("onestem.server.run.serve", serve)
    monkeypatch.setenv("ONESTEM_MODEL", "/other")
    for arguments in (["/mine"], ["/mine", "--model", "/mine"], ["--model", "/mine"], []):
        done = runner.invoke(app, ["serve", *arguments])
        assert done.exit_code == 0, done.output
    assert served == ["/mine", "/mine", "/mine", "/other"]
    refused = runner.invoke(app, ["serve", "/mine", "--model", "embedded"])
    assert "the model is '/mine', and --model is 'embedded'" in str(refused.exception)


def test_flags_say_again_what_was_told():
    told = {"page_size": 16, "random_weights": False, "kv_memory": "1GiB", "threads": None}
    flags = flags_of(EngineOptions(**told))
    assert set(flags) == {"--page-size=16", "--no-random-weights", "--kv-memory=1GiB"}


def test_only_some_are_offered():
    command = typer.main.get_command(app).commands["plan"]
    offered = {flag for one in command.params for flag in one.opts}
    assert "--kv-memory" in offered
    assert "--page-size" not in offered
    assert Only("a").names == ("a",)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.toml").write_text('disk_kv = "~/modules"\n[serve]\nschema = ["~/s.pml"]\n')
    found = Defaults(environment={"ONESTEM_CONFIG": "~/a.toml", "ONESTEM_MODEL": "~/model"})
    made = found.options(EngineOptions)[0]
    assert (made.model, made.disk_kv) == (f"{tmp_path}/model", f"{tmp_path}/modules")
    assert found.options(Settings)[0].schemas == (f"{tmp_path}/s.pml",)


def test_a_torch_dtype_is_its_name():
    torch = pytest.importorskip("torch")
    assert EngineOptions(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attention", "'attention': did you mean impl?"),
        ("max_numseqs", "'max_numseqs': did you mean max_num_seqs?"),
        ("zzz", "'zzz'"),
    ],
)
def test_an_argument_that_is_no_option_is_told_the_nearest(name, hint):
    with pytest.raises(ConfigError) as caught:
        LLM("embedded", **{name: "auto"})
    assert str(caught.value) == f"there is no option {hint}"
