"""Chat templates and sampling defaults that options give, in place of the model's own."""

from __future__ import annotations

import pytest

from onestem import LLM, EngineOptions, SamplingParams
from onestem.errors import ConfigError

ASK = [{"role": "user", "content": "Hello"}]
OPTIONS = {"dtype": "float32", "kv_memory": "16MiB", "device": "cpu"}


@pytest.fixture
def template(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]")
    return file


def test_a_template_and_defaults_of_the_options(template):
    with LLM(**OPTIONS, chat_template=template, default_temperature=0.0) as llm:
        one, two = llm.chat([ASK, ASK], SamplingParams(max_tokens=8))
        told = llm.tokenizer.decode(one.prompt_token_ids)
        assert told.strip() == "[user] Hello [answer]"
        assert one.outputs[0].token_ids == two.outputs[0].token_ids  # greedy, without a seed
        assert llm.options.identity()["default_temperature"] == 0.0
        assert len(llm.options.identity()["chat_template"]) == 64


def test_a_template_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"chat_template .*none\.jinja cannot be read"):
        LLM(**OPTIONS, chat_template=tmp_path / "none.jinja")


def test_jobs_without_them_are_the_same_jobs():
    names = {"chat_template", "default_temperature", "default_top_p"}
    assert not names & EngineOptions().identity().keys()
