"""`LLM.stream_chat`, and conversations at a terminal."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from onestem import LLM, SamplingParams
from onestem.cli.app import app
from onestem.cli.chat import Conversation, talk
from onestem.errors import UnsupportedError
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.forked import onestem
from tests.models.tiny import VOCAB_SIZE, make_tiny

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", kv_memory="64MiB") as llm:
        yield llm


def said_by(llm, *texts, system=None):
    """The answers of a conversation, each computed from the whole of it."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        (answer,) = llm.chat(messages, PARAMS, use_tqdm=False)
        answers.append(answer.outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("output_kind", ["cumulative", "delta"])
def test_streamed_chats_are_those_that_come_whole(llm, output_kind):
    many = [[{"role": "user", "content": text}] for text in ("One?", "The museum opens at nine.")]
    options = {"add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}
    texts = ["", ""]
    for answer in llm.stream_chat(many, PARAMS, output_kind=output_kind, **options):
        piece = answer.outputs[0].text
        texts[answer.index] = piece if output_kind == "cumulative" else texts[answer.index] + piece
    whole = llm.chat(many, PARAMS, **options)
    assert texts == [answer.outputs[0].text for answer in whole]


def test_arguments_that_are_not_there_are_refused(llm):
    with pytest.raises(TypeError, match="no argument 'wonder'"):
        llm.stream_chat([{"role": "user", "content": "x"}], PARAMS, wonder=1)
    with pytest.raises(UnsupportedError, match="lora_request"):
        llm.stream_chat([{"role": "user", "content": "x"}], PARAMS, lora_request=1)


def test_a_conversation_has_what_was_said_before(llm, capsys):
    lines = ["One?", "/stats", "Two?", "/stats", "/reset", "/system Be short.", "One?", "/system"]
    talk(Conversation(llm, PARAMS, None), iter(lines))
    out, err = capsys.readouterr()
    expected = said_by(llm, "One?", "Two?") + said_by(llm, "One?", system="Be short.")
    assert out == "".join(f"{text}\n" for text in expected)
    first, second, shown = err.splitlines()
    assert shown == "Be short."
    costs = [[int(n) for n in re.findall(r"\d+", one)[:3]] for one in (first, second)]
    assert all(prompt == shared + computed for prompt, shared, computed in costs)
    assert costs[1][1] >= costs[0][0]  # the first turn was not computed again


def test_an_interrupt_ends_the_answer_alone(llm):
    conversation = Conversation(llm, PARAMS, None)
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    conversation.answer("The museum opens at nine. When does it open?", write)
    assert pieces[-1] == " [ended]"
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces[:-1])}
    assert not llm.engine.has_unfinished()
    conversation.answer("And then?", pieces.append)
    assert len(conversation.messages) == 4


def test_a_message_that_is_refused_is_not_kept(llm, capsys):
    conversation = Conversation(llm, PARAMS, None)
    assert talk(conversation, iter(["word " * 100_000, "/what", "", "/bye", "never read"])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "/reset begins again" in err
    assert "there is no command /what" in err
    assert conversation.messages == []
    assert conversation.stats() == "nothing was answered yet"


@pytest.mark.parametrize("line", ["/reset now", "/bye then", "/stats x", "/help me"])
def test_commands_ignore_no_text(llm, capsys, line):
    conversation = Conversation(llm, PARAMS, None)
    conversation.messages.append({"role": "user", "content": "kept"})
    talk(conversation, iter([line, "/what"]))
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"{line.split()[0]} takes no text")
    assert told[1].startswith("there is no command /what")
    assert conversation.messages == [{"role": "user", "content": "kept"}]


def test_lines_of_the_input_are_messages(llm):
    arguments = ["chat", "embedded", "--max-tokens", "12", "--temperature", "0"]
    arguments += ["--kv-memory", "64MiB", "--dtype", "float32", "--system", "Be short."]
    done = CliRunner().invoke(app, arguments, input="One?\n/help\n")
    assert done.stdout == said_by(llm, "One?", system="Be short.")[0] + "\n"
    assert "/system TEXT" in done.stderr
    assert done.exit_code == 0
    refused = CliRunner().invoke(app, arguments, input="One?\n/what\n")
    assert (refused.stdout, refused.exit_code) == (done.stdout, 1)


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    model = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(model, vocab_size=VOCAB_SIZE)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in onestem("chat", model, code=2).stderr
    for more in (("--chat",), ("--system", "Be short.")):
        assert (
            "has no chat template"
            in onestem("generate", "x", "--model", model, *more, code=2).stderr
        )


def test_generate_uses_the_template_where_there_is_one(llm):
    common = ("generate", "One?", "--max-tokens", 12, "--temperature", 0, "--dtype", "float32")
    (raw,) = llm.generate("One?", PARAMS, use_tqdm=False)
    assert onestem(*common).stdout == said_by(llm, "One?")[0] + "\n"
    assert onestem(*common, "--raw").stdout == raw.outputs[0].text + "\n"
    assert onestem(*common, "--system", "Be short.").stdout == (
        said_by(llm, "One?", system="Be short.")[0] + "\n"
    )
