"""Grammars that may cost too much are compiled in a process that can be ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from onestem.engine.grammar.compiler import GrammarCompiler, GrammarState
from onestem.engine.grammar.trial import Limits, TooCostlyError
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer

xgrammar = pytest.importorskip("xgrammar")

LIMITS = Limits(cpu_seconds=0.4)
LONG = "[^x]?" * 200
LARGE = "(.{1,900}){1,900}"
AMBIGUOUS = 'root ::= a a a a a a\na ::= b b b b b b | ""\nb ::= c c c c c c | ""\nc ::= [^x] | ""'
MANY_RULES = "root ::= " + " | ".join(f"r{i}" for i in range(500)) + "".join(
    f'\nr{i} ::= "{i}" [a-z]* "."' for i in range(500)
)  # fmt: skip


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


def grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, limits=LIMITS)
    yield compiler
    compiler.close()


def state_of(compiler: GrammarCompiler, response_format: dict[str, Any]) -> GrammarState:
    state = compiler.compile(response_format)
    assert state is not None
    return state


def process_of(compiler: GrammarCompiler) -> subprocess.Popen[bytes]:
    process = compiler._trials[False]._process
    assert process is not None
    return process._process


def has_ended(descriptor: int) -> bool:
    """Waits for the process."""
    return bool(select.select([descriptor], [], [], 30)[0])


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        (regex("[a-z]{1,500}"), "the"),
        (regex("(a|b|ab)*c" * 8), "abc"),
        (grammar(MANY_RULES), "17the."),
        (grammar('root ::= "a" root | "b"'), "aab"),
    ],
    ids=["repeats", "ambiguous", "500 rules", "recursive"],
)
def test_masks_are_those_of_the_plain_compiler(
    tokenizer: Tokenizer, compiler: GrammarCompiler, response_format: dict[str, Any], text: str
) -> None:
    ours = state_of(compiler, response_format)
    plain, _ = compiler._loaded()
    kind = response_format["type"]
    compile_ = {"regex": plain.compile_regex, "grammar": plain.compile_grammar}[kind]
    matcher = xgrammar.GrammarMatcher(compile_(response_format[kind]))
    mask = torch.zeros_like(ours.fill_mask())
    for token in tokenizer.encode(text, add_special_tokens=False):
        matcher.fill_next_token_bitmask(mask.unsqueeze(0))
        assert torch.equal(ours.fill_mask(), mask)
        assert matcher.accept_token(token)
        ours.accept(token)


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        (regex(LONG), r"^regex takes more than 0\.4 s to compile: simplify it"),
        (grammar("root ::= " + "(" * 50_000), "^grammar cannot be used: "),
        (
            {
                "type": "structural_tag",
                "format": {"type": "star", "content": {"type": "regex", "pattern": LONG}},
            },
            r"^response_format\.format takes more than 0\.4 s",
        ),
    ],
    ids=["long", "deep", "in a tag"],
)
def test_what_costs_too_much_is_refused(
    compiler: GrammarCompiler,
    capfd: pytest.CaptureFixture[str],
    response_format: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        compiler.compile(response_format)
    assert "\n" not in str(caught.value)
    state_of(compiler, regex("a+"))  # another process, if that one has ended
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("response_format", "limits", "message"),
    [
        (
            grammar(AMBIGUOUS),  # compiled quickly
            Limits(mask_seconds=0.01),
            r"^grammar takes 0.* s for the mask of a token, limit is 0\.01 s: simplify it",
        ),
        (
            regex(LARGE),
            Limits(memory_bytes=64 << 20),
            r"^regex takes more than 64 MiB of memory to compile: simplify it",
        ),
    ],
    ids=["masks", "memory"],
)
def test_other_limits(
    tokenizer: Tokenizer, response_format: dict[str, Any], limits: Limits, message: str
) -> None:
    compiler = GrammarCompiler(tokenizer, limits=limits)
    with pytest.raises(TooCostlyError, match=message):
        compiler.compile(response_format)
    compiler.close()


def test_a_refusal_is_remembered(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(TooCostlyError):
            compiler.compile(regex(LONG))
    assert compiler._trials[False]._process is None  # the second one was not tried


def test_one_process_serves_all(compiler: GrammarCompiler) -> None:
    state_of(compiler, regex("a+"))
    first = process_of(compiler)
    state_of(compiler, regex("b+"))
    with pytest.raises(RequestError, match=r"cannot be used: .*not defined"):
        compiler.compile(grammar("root ::= b"))
    state_of(compiler, regex("c+"))
    assert process_of(compiler) is first
    compiler.close()
    assert first.returncode is not None


def test_a_process_that_died_while_it_waited_is_no_grammars_fault(
    compiler: GrammarCompiler,
) -> None:
    state_of(compiler, regex("a+"))
    killed = process_of(compiler)
    killed.kill()  # as the kernel does where memory is short
    killed.wait()
    state_of(compiler, regex("d+"))
    assert process_of(compiler) is not killed


def test_after_an_interrupt_the_next_gets_its_own_answer(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of(compiler, regex("a+"))
    interrupted = process_of(compiler)
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "recv_bytes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compiler.compile(regex("b+"))
    for letter in "cb":
        ids = tokenizer.encode(letter, add_special_tokens=False)
        assert compiler.compile(regex(f"{letter}+"), ids) is not None
    assert interrupted.returncode is not None


def test_nobody_else_waits(compiler: GrammarCompiler) -> None:
    """Schemas, tools and plain tags are compiled while the process is busy."""
    let = threading.Event()

    class Busy:
        def compile(self, tag: str, name: str) -> str:
            assert let.wait(60)
            raise TooCostlyError(name)

        def close(self) -> None:
            pass

    compiler._trials = {True: Busy(), False: Busy()}  # type: ignore[dict-item]
    slow = [compiler.prepare(regex("a" * n)) for n in range(1, 9)]
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {}},
           "end": "</f>"}  # fmt: skip
    calls = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    for other in (schema, {"type": "structural_tag", "format": calls},
                  {"type": "choice", "choice": ["a", "b"]}):  # fmt: skip
        prepared = compiler.prepare(other)
        assert prepared is not None
        prepared.result(60)
    assert not any(one is None or one.done() for one in slow)
    let.set()
    assert all(one is not None and one.exception(60) for one in slow)


def test_quick_grammars_do_not_wait_for_slow_ones(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=Limits(cpu_seconds=300, wall_seconds=300))
    slow = [compiler.prepare(regex("[^x]?" * n)) for n in (600, 601)]
    quick = compiler.prepare(regex("a+"))
    assert quick is not None
    quick.result(60)
    assert not any(one is None or one.done() for one in slow)
    compiler.close()


ENGINE = """
import sys
from onestem.engine.grammar.compiler import GrammarCompiler
from onestem.engine.text.tokenizer import Tokenizer
compiler = GrammarCompiler(Tokenizer.from_directory(sys.argv[1]))
compiler.compile({"type": "regex", "regex": "a+"})
print(compiler._trials[False]._process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux's")
def test_it_dies_with_the_engine(directory: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert engine.stdout is not None
    child = os.pidfd_open(int(engine.stdout.readline()))
    engine.send_signal(signal.SIGKILL)
    assert has_ended(child)
    os.close(child)
    engine.communicate()
