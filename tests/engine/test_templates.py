"""A chat template may do anything: it costs the request that it renders, within limits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from onestem.children import Child, Limits, TooCostlyError
from onestem.engine.text import templates
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.soak import soaked

USER = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "loops inside loops": LOOP * 4 + "{{ i }}" + "{% endfor %}" * 4,
    "loops without output": LOOP * 4 + "{% endfor %}" * 4,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a number without end": "{{ 7 ** (10 ** 9) }}",
}
LARGE = {
    "a repeated text": "{{ 'x' * 10 ** 12 }}",
    "a centred text": "{{ 'x' | center(10 ** 12) }}",
    "a method": "{{ 'x'.rjust(10 ** 12) }}",
    "a format": "{{ '%1000000000000d' % 1 }}",
    "a text that doubles": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}"
    ),
    "a list": "{{ [0] * 10 ** 12 }}",
}


def limit(monkeypatch: pytest.MonkeyPatch, memory_bytes: int, cpu_seconds: float) -> None:
    limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=60, memory_bytes=memory_bytes)
    child = Child("onestem.engine.text.template_process", limits)
    monkeypatch.setattr(templates, "_answer", child.ask)


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server has it."""
    monkeypatch.setattr(templates, "_answer", None)
    templates.isolate()


@pytest.fixture(params=[False, True])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in one of its own."""
    monkeypatch.setattr(templates, "_answer", None)
    if request.param:
        templates.isolate()


@pytest.fixture
def limited_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB, which no template here takes long to ask for."""
    limit(monkeypatch, 256 << 20, 5)


@pytest.fixture
def limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second, in which no template here writes 2 GiB. A template is tried in nine ways
    before it is used."""
    limit(monkeypatch, 2 << 30, 0.1)


def chat(path: Path, template: str, messages: list[dict[str, Any]] = USER) -> str:
    tokenizer = Tokenizer.from_directory(make_byte_level_tokenizer(path, template=template))
    assert tokenizer is not None
    return tokenizer.render_chat(messages)


def is_well() -> bool:
    return templates.render("{{ messages[0].content }}!", USER) == "hi!"


@pytest.mark.usefixtures("limited_in_time")
@pytest.mark.parametrize(
    "name",
    [
        "loops without output",
        "a number without end",
        soaked("loops inside loops"),
        soaked("a macro that calls itself twice"),
    ],
)
def test_time_is_bounded(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(tmp_path, ENDLESS[name])
    assert str(error.value) == (
        "the chat template takes more than 0.1 s for these messages: send fewer, or correct the "
        "template in the model's directory"
    )
    assert is_well()


@pytest.mark.usefixtures("limited_in_memory")
@pytest.mark.parametrize("name", LARGE)
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="takes more than 256 MiB of memory for these messages"):
        chat(tmp_path, LARGE[name])
    assert is_well()


@pytest.mark.usefixtures("anywhere")
def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(templates, "MOST_CHARACTERS", 1000)
    with pytest.raises(RequestError, match="the rendered chat has 1001 characters, limit is 1000"):
        chat(tmp_path, "{{ 'x' * 1001 }}")
    assert chat(tmp_path / "less", "{{ 'x' * 1000 }}") == "x" * 1000


@pytest.mark.usefixtures("anywhere")
def test_a_range_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="refuses the messages: OverflowError: Range too big"):
        chat(tmp_path, "{% for i in range(10 ** 9) %}{% endfor %}")


@pytest.mark.usefixtures("isolated")
def test_the_process_is_kept(tmp_path: Path) -> None:
    """And a forked process has its own: two that share one would take each other's answers."""
    ask = "{{ messages[0].content }}!"
    assert templates.render(ask, USER) == "hi!"
    process = templates.CHILD.pid
    assert process is not None
    templates.render(ask, USER)
    assert templates.CHILD.pid == process
    forked = os.fork()
    if forked == 0:
        answered = templates.render(ask, [{"role": "user", "content": "forked"}])
        os._exit(0 if answered == "forked!" and templates.CHILD.pid != process else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert templates.render(ask, USER) == "hi!"
    assert templates.CHILD.pid == process


@pytest.mark.usefixtures("isolated")
def test_the_process_imports_little() -> None:
    """It starts in a fraction of a second."""
    assert is_well()
    assert templates.CHILD.pid is not None
    mapped = Path(f"/proc/{templates.CHILD.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "tokenizers" not in mapped


@pytest.mark.usefixtures("anywhere")
def test_variables_that_are_no_json() -> None:
    seen = "{{ one }} {{ two[0] }} {{ three }}"
    assert templates.render(seen, USER, one=object(), two=(1, 2), three=None) == "<object> 1 None"
    with pytest.raises(RequestError, match="chat_template_kwargs cannot be written as JSON"):
        templates.render(seen, USER, one={(1, 2): 3})
    assert is_well()


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ["template", "longest"])
def test_variables_of_any_name(tmp_path: Path, name: str) -> None:
    path = make_byte_level_tokenizer(tmp_path, template=f"{{{{ {name} }}}}")
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template(USER, fields={name: "mine"})
    assert tokenizer.decode(ids) == "mine"


def test_what_a_process_ended_with() -> None:
    """Its channel closes before it has ended."""
    child = Child(
        "a_module_that_is_not_there", Limits(cpu_seconds=1, wall_seconds=9, memory_bytes=0)
    )
    with pytest.raises(TooCostlyError, match=r"ends its process \(status 1\)"):
        child.ask(b"")


def test_a_process_that_does_not_answer() -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=0.1, memory_bytes=0, start_seconds=0.1)
    child = Child("onestem.engine.text.template_process", limits)
    child.start()
    process = child.pid
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(TooCostlyError, match=r"has no answer within 0\.2 s$"):
        child.ask(b"")
    assert child.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
