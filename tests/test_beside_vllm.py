"""Who comes from vLLM or Ollama is told what a name is here, or the way out."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys

import pytest

from onestem import LLM, AsyncLLM
from onestem.beside_vllm import (
    ARGUMENTS,
    ENGINE,
    FIELDS,
    METHODS,
    ROUTES,
    SAMPLING,
    SERVE,
    Beside,
)
from onestem.cli.hints import VERBS
from onestem.errors import ConfigError, RequestError, UnsupportedError
from onestem.openai.read import read_body
from onestem.openai.schema import NEUTRAL, ChatBody, CompletionBody
from onestem.options import Defaults, EngineOptions
from onestem.replicas import Replicas
from onestem.request import SamplingParams
from onestem.server.api.adapted import adapted
from onestem.server.api.control import control_routes
from onestem.server.api.routes import api, open_routes, tokens
from onestem.server.settings import Settings
from tests.docs.blocks import DOCS
from tests.forked import onestem

BODIES = {"chat": ChatBody, "completion": CompletionBody}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("table", "declared"),
    [
        (SAMPLING, [SamplingParams.model_fields]),
        (ENGINE, [EngineOptions.model_fields]),
        (SERVE, [Settings.model_fields]),
        (FIELDS, [body.model_fields.keys() - NEUTRAL[one].keys() for one, body in BODIES.items()]),
        (ARGUMENTS, [inspect.signature(one).parameters for one in (LLM.generate, LLM.chat)]),
        (METHODS, [vars(LLM), vars(AsyncLLM)]),
        (ROUTES, [[
            f"{method} {route.path}"
            for router in (api, adapted, tokens, open_routes, control_routes)
            for route in router.routes
            for method in route.methods
            if not (route.endpoint.__doc__ or "").startswith("Refused")
        ]]),
    ],
    ids=["sampling", "engine", "serve", "fields", "arguments", "methods", "routes"],
)  # fmt: skip
def test_names_beside_vllms_are_declared(table, declared):
    there = {name for names in declared for name in names}
    for name, told in table.items():
        assert told.ours in there if told.ours else (name not in there and told.note), name


@pytest.mark.parametrize("name", [name for name, told in ENGINE.items() if told.ours != name])
def test_engine_arguments_of_vllm_are_refused_with_the_way_out(name):
    (ours, note), flag = ENGINE[name], f"--{name.replace('_', '-')}"
    for make in (LLM, AsyncLLM, EngineOptions):
        with pytest.raises(ConfigError, match=rf"{name}' \(vLLM's\): ") as refused:
            make(**{name: 1})
        assert (ours or re.sub("`", "", note).split(":")[0]) in str(refused.value)
    with pytest.raises(SystemExit):
        typed("serve", flag)


def typed(*args):
    """The command, as its entry point; what is refused ends it."""
    from onestem.cli.app import main

    before, sys.argv = sys.argv, ["onestem", *args]
    try:
        main()
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("serve", "--gpu-memory-utilization", "0.9"), "(vLLM's): give --kv-memory a size"),
        (("batch", "i", "-o", "o", "--gpu-memory-utilization=0.9"), "(vLLM's): give --kv-memory"),
        (("serve", "--block-size", "8"), "here it is --page-size; any number"),
        (("serve", "--attention-backend", "x"), "here it is --attention; auto"),
        (("bench", "serve", "--no-enable-prefix-caching"), "here it is --share; full"),
        (("serve", "--tool-call-parser", "hermes"), "leave it out: the form of calls"),
        (("serve", "-tp", "2"), "there is no option -tp: give --tensor-parallel-size"),
        (("run", "m"), "there is no verb run: `onestem chat"),
        (("list",), "there is no verb list: `onestem models`"),
        (("run-batch",), "`onestem batch"),
    ],
)  # fmt: skip
def test_a_command_line_of_another_engine_is_told_the_way_out(args, told, capsys):
    with pytest.raises(SystemExit) as ended:
        typed(*args)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in said
    assert said.startswith("onestem: ")
    assert said.count("\n") == 1


def test_what_nobody_has_is_left_to_the_parser(capsys):
    for args in (("serve", "--wonder"), ("wonder",)):
        with pytest.raises(SystemExit) as ended:
            typed(*args)
        assert ended.value.code == 2
        assert "No such" in capsys.readouterr().err


def test_verbs_that_are_hinted_at_are_there():
    verbs = set(
        re.findall(r"^  +(?:│ )?([a-z]+) ", onestem("--help").stdout.replace("│", " "), re.M)
    )
    for name, hint in VERBS.items():
        assert name not in verbs
        assert set(re.findall(r"`onestem ([a-z]+)", hint)) <= verbs, name


def test_h_is_help():
    for verb in ((), ("serve",), ("bench", "batch"), ("pml",)):
        assert onestem(*verb, "-h").stdout == onestem(*verb, "--help").stdout


def test_files_of_options_are_told_too(tmp_path):
    for text, kind, told in (
        ("gpu-memory-utilization = 0.9", EngineOptions, "(vLLM's): give kv_memory a size"),
        ("attention_backend = 'x'", EngineOptions, "(vLLM's): here it is attention"),
        ("[serve]\nreasoning-parser = 'x'", Settings, "read off the model's chat template"),
    ):
        (file := tmp_path / "onestem.toml").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(told)):
            Defaults(file, {}).options(kind)


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat, LLM.stream, AsyncLLM.generate,
                                    Replicas.generate])  # fmt: skip
def test_arguments_of_vllms_methods_are_refused(method):
    for name, told in ARGUMENTS.items():
        if told.ours is None:
            with pytest.raises(UnsupportedError, match=rf"generate|chat|stream.*{name}.*vLLM's"):
                method(None, "a", **{name: 1})


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_methods_of_vllm_are_refused(kind):
    llm = kind.__new__(kind)
    for name, told in METHODS.items():
        if told.ours is None:
            assert not hasattr(llm, name)
            with pytest.raises(UnsupportedError, match=rf"no attribute '{name}' \(vLLM's\): "):
                getattr(llm, name)
    with pytest.raises(AttributeError, match=f"^{kind.__name__} has no attribute 'wonder'$"):
        llm.wonder  # noqa: B018


def test_an_attribute_that_a_property_misses_is_named():
    class One(Beside):
        @property
        def engine(self):
            return self.missing

    with pytest.raises(AttributeError, match=r"^One has no attribute 'missing'$"):
        _ = One().engine


def test_fields_of_bodies_are_told_the_way_out():
    for kind, body in (("chat", CHAT), ("completion", {"prompt": "a"})):
        for name, told in FIELDS.items():
            if told.ours is None:
                with pytest.raises(RequestError, match=name) as refused:
                    read_body(kind, body | {name: "x"})
                note = told.note.replace("`", "")
                assert str(refused.value).endswith(note), refused.value
    with pytest.raises(RequestError, match=r"'best_of'.*give n and logprobs"):
        SamplingParams(best_of=2)


def test_the_page_is_made_of_the_same_tables():
    spec = importlib.util.spec_from_file_location("reference", DOCS / "site" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.vllm_table(ENGINE).splitlines()
    (row,) = (row for row in table if "`gpu_memory_utilization`" in row)
    assert row.split(" | ")[1] == "refused"
    page = (DOCS / "from-vllm.md").read_text()
    names = ("sampling", "engine", "methods", "arguments", "serve", "routes", "fields")
    assert re.findall(r"reference/vllm-(\w+)\.md", page) == list(names)
