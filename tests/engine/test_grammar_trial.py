"""Grammars that may cost too much are compiled in a process that can be ended."""

from __future__ import annotations

import fcntl
import gc
import os
import platform
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from onestem.children import Process
from onestem.engine.grammar.compiler import MOST_TRIES, GrammarCompiler
from onestem.engine.grammar.state import GrammarState
from onestem.engine.grammar.trial import (
    Compilable,
    CostlyGrammarError,
    GrammarLimits,
    Trial,
    Trials,
)
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import RequestError, UnsupportedError
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer

xgrammar = pytest.importorskip("xgrammar")

LIMITS = GrammarLimits(cpu_seconds=0.4)
PACE = LIMITS.paces[0][0]
LONG = "[^x]?" * 200
LARGE = "(.{1,900}){1,900}"
AMBIGUOUS = 'root ::= a a a a a a\na ::= b b b b b b | ""\nb ::= c c c c c c | ""\nc ::= [^x] | ""'
MANY_RULES = "root ::= " + " | ".join(f"r{i}" for i in range(500)) + "".join(
    f'\nr{i} ::= "{i}" [a-z]* "."' for i in range(500)
)  # fmt: skip


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


def schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


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


def process_of(compiler: GrammarCompiler) -> Process:
    return compiler.loaded()[0].process


def kill(process: Process) -> None:
    """As the kernel does where memory is short."""
    until = time.monotonic() + 60
    while not process.has_ended:
        assert time.monotonic() < until
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)


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
    plain = xgrammar.GrammarCompiler(compiler.loaded()[1], cache_enabled=False)
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
            GrammarLimits(mask_seconds=0.01),
            r"^grammar takes 0.* s for the mask of a token, limit is 0\.01 s: simplify it",
        ),
        (
            regex(LARGE),
            GrammarLimits(memory_bytes=16 << 20),
            r"^regex takes more than 16 MiB of memory to compile: simplify it",
        ),
        (
            schema({"type": "string", "maxLength": 9}),
            GrammarLimits(kept_bytes=512),
            r"schema takes .* MiB when compiled, limit is 0\.000488 MiB: simplify it",
        ),
    ],
    ids=["masks", "memory", "kept"],
)
def test_other_limits(
    tokenizer: Tokenizer, response_format: dict[str, Any], limits: GrammarLimits, message: str
) -> None:
    compiler = GrammarCompiler(tokenizer, limits=limits)
    with pytest.raises(CostlyGrammarError, match=message):
        compiler.compile(response_format)
    compiler.close()


def test_a_refusal_is_remembered(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CostlyGrammarError):
        compiler.compile(regex(LONG))
    monkeypatch.setattr(Trials, "start", Mock(side_effect=AssertionError("tried again")))
    with pytest.raises(CostlyGrammarError, match="to compile"):
        compiler.compile(regex(LONG))


def test_one_process_serves_all(compiler: GrammarCompiler) -> None:
    state_of(compiler, regex("a+"))
    first = process_of(compiler)
    state_of(compiler, regex("b+"))
    with pytest.raises(RequestError, match=r"cannot be used: .*not defined"):
        compiler.compile(grammar("root ::= b"))
    state_of(compiler, regex("c+"))
    assert process_of(compiler) is first
    compiler.close()
    assert first.has_ended


def test_a_process_that_died_while_it_waited_is_no_grammars_fault(
    compiler: GrammarCompiler,
) -> None:
    state_of(compiler, regex("a+"))
    killed = process_of(compiler)
    kill(killed)
    state_of(compiler, regex("d+"))
    assert process_of(compiler) is not killed


def test_what_died_with_its_parent_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of(compiler, regex("a+"))
    killed, answer = process_of(compiler), Trial.answer

    def dying(trial: Trial) -> Compilable:
        kill(killed)
        return answer(trial)

    monkeypatch.setattr(Trial, "answer", dying)
    state_of(compiler, schema({"type": "string", "pattern": "(a|b|ab)*c" * 8}))
    assert process_of(compiler) is not killed


def test_quick_grammars_do_not_wait_for_slow_ones(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=GrammarLimits(cpu_seconds=300, wall_seconds=300))
    slow = [compiler.prepare(regex("[^x]?" * n)) for n in (600, 601)]
    quick = compiler.prepare(regex("a+"))
    assert quick is not None
    quick.result(60)
    assert not any(one is None or one.done() for one in slow)
    compiler.close()


def test_a_schema_is_checked_where_it_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of a large one takes time that steps would wait for."""
    monkeypatch.setattr(
        "onestem.engine.grammar.compiler.check_schema", Mock(side_effect=AssertionError)
    )
    bad = compiler.prepare(schema({"type": "objekt"}))
    unenforced = compiler.prepare(schema({"not": {"type": "object"}}))
    good = compiler.prepare(schema({"enum": ["a"]}))
    assert bad is not None
    assert unenforced is not None
    assert good is not None
    with pytest.raises(RequestError, match="'objekt'"):
        bad.result(60)
    with pytest.raises(UnsupportedError, match="'not'"):
        unenforced.result(60)
    good.result(60)
    compiler.check(schema({"enum": ["a"]}))  # it is known


@pytest.mark.skipif(sys.platform != "linux", reason="idle processes are Linux's")
def test_without_idle_time_a_grammar_is_tried_all_the_same(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped stands for one on a machine whose cores all have work."""
    state_of(compiler, regex("b+"))
    while children_of(process_of(compiler)):
        time.sleep(0.01)
    tried, answer = [], Trial.answer

    def starved(trial: Trial) -> Compilable:
        tried.append(trial.pace)
        if trial.pace.nice is None:
            while not (running := children_of(process_of(compiler))):
                time.sleep(0.01)  # it is told to fork
            os.kill(running[0], signal.SIGSTOP)
        return answer(trial)

    monkeypatch.setattr(Trial, "answer", starved)
    state_of(compiler, regex("[^x]?" * 30))
    assert tried[:2] == compiler.limits.paces[0]


# A filter (seccomp, BPF) that refuses a system call of this number, as sandboxes do, and no other.
REFUSES = """
import ctypes, struct
def refuse(number):
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(steps))
    control = ctypes.CDLL(None, use_errno=True).prctl
    assert control(38, 1, 0, 0, 0) == 0
    assert control(22, 2, program) == 0, ctypes.get_errno()
"""
SCHED_SETSCHEDULER = {"x86_64": 144, "aarch64": 119}


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SCHED_SETSCHEDULER,
    reason="numbers of system calls are known of these alone",
)
def test_where_no_process_may_be_idle_it_is_nice() -> None:
    program = f"""
refuse({SCHED_SETSCHEDULER[platform.machine()]})
import os
from onestem.engine.grammar.trial_process import yield_to_others
yield_to_others(None)
print(os.sched_getscheduler(0) == os.SCHED_OTHER, os.nice(0))
"""
    done = subprocess.run([sys.executable, "-c", REFUSES + program], capture_output=True, text=True)
    assert done.stdout == f"True {min(19, os.nice(0) + 19)}\n", done.stderr


def test_tries_take_longer_and_longer() -> None:
    paces = GrammarLimits().paces
    assert [one[-1].cpu_seconds for one in paces] == [0.05, 0.5, 5.0]
    assert [[pace.nice is None for pace in one] for one in paces] == [[True, False]] * 3


def test_a_known_failure_keeps_nothing_of_who_hears_it(compiler: GrammarCompiler) -> None:
    for _ in range(3):
        with pytest.raises(CostlyGrammarError):
            compiler.compile(regex(LONG))
    (known,) = compiler.kept.failures.values()
    assert known.__traceback__ is None


def test_what_a_busy_machine_had_no_time_for_is_tried_again(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=GrammarLimits(cpu_seconds=300, wall_seconds=0.2))
    trials, _ = compiler.loaded()
    start = Mock(side_effect=trials.start)
    trials.start = start
    with pytest.raises(
        CostlyGrammarError, match=r"not compiled within 0\.2 s, because .* busy: ask a"
    ):
        compiler.compile(regex("[^x]?" * 600))
    last = [pace for _, _, pace in (call.args for call in start.call_args_list) if pace.nice]
    assert MOST_TRIES - 1 <= len(last) <= MOST_TRIES + 1
    assert not compiler.kept.failures
    compiler.close()


def test_where_no_process_can_be_started(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(11, "none is left")))
        with pytest.raises(
            CostlyGrammarError, match=r"cannot be compiled now: .*none is left"
        ) as caught:
            compiler.compile(regex("a+"))
    assert not caught.value.lasts
    state_of(compiler, regex("a+"))


def stopped(tokenizer: Tokenizer, limits: GrammarLimits) -> Trials:
    """Whose process does not go on to load the compiler."""
    trials, _ = GrammarCompiler(tokenizer, limits=limits).loaded()
    os.kill(trials.process.pid, signal.SIGSTOP)
    return trials


def test_a_process_that_does_not_start(tokenizer: Tokenizer) -> None:
    trials = stopped(tokenizer, GrammarLimits(start_seconds=0.2))
    process = trials.process
    with pytest.raises(
        CostlyGrammarError,
        match=r"regex cannot be compiled now: its process does not answer within 0\.2 s$",
    ):
        trials.start({}, "regex", PACE)
    assert process.has_ended
    assert trials.process is not process
    trials.close()


def test_a_process_that_does_not_start_holds_up_no_close(tokenizer: Tokenizer) -> None:
    trials = stopped(tokenizer, GrammarLimits(start_seconds=1e6))
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(trials.start, {}, "regex", PACE)
        process = trials.process
        while not process.writing.locked():
            time.sleep(0.01)  # it begins to wait
        trials.close()
        with pytest.raises(UnsupportedError, match="the engine is closed"):
            trial.result(60)


def test_a_process_that_does_not_answer(compiler: GrammarCompiler) -> None:
    state_of(compiler, regex("a+"))
    trials, _ = compiler.loaded()
    trials.limits = GrammarLimits(wall_seconds=0.1, start_seconds=0.1)
    process = trials.process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EOFError):
        trials.start({}, "regex", PACE).answer()
    assert process.has_ended


def test_where_many_files_are_open(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("so many files cannot be open")
    pair = socket.socketpair

    def high() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        with theirs:
            moved = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)
            return ours, socket.socket(fileno=moved)

    monkeypatch.setattr(socket, "socketpair", high)
    state_of(compiler, regex("a+"))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux's")
def test_threads_keep_no_compiler(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    state_of(compiler, regex("a+"))
    process = os.pidfd_open(process_of(compiler).pid)
    del compiler
    gc.collect()
    assert has_ended(process)  # the last thread may just be leaving it
    os.close(process)


def children_of(process: Process) -> list[int]:
    return list(
        map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    )


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd_open is Linux's")
def test_what_nobody_waits_for_any_more_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, limits=GrammarLimits(cpu_seconds=300, wall_seconds=300))
    state_of(compiler, regex("a+"))
    begun, answer = threading.Event(), Trial.answer

    def noted(trial: Trial) -> Compilable:
        if trial.pace.nice is None and trial.pace.cpu_seconds > 1:
            begun.set()
        return answer(trial)

    monkeypatch.setattr(Trial, "answer", noted)
    first, second = (compiler.prepare(regex("[^x]?" * 600)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert begun.wait(60)
    while not (running := children_of(process_of(compiler))):
        time.sleep(0.01)  # it is told to fork
    child = os.pidfd_open(running[0])
    first.cancel()
    assert not select.select([child], [], [], 0)[0]  # the other still waits
    assert len(compiler.tasks) == 1
    second.cancel()
    assert has_ended(child)
    os.close(child)
    assert not compiler.tasks
    state_of(compiler, regex("b+"))
    compiler.close()


def test_what_took_long_comes_compiled(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}}})
    again = state_of(compiler, given)
    sent = GrammarCompiler(tokenizer, limits=GrammarLimits(again_seconds=0))
    monkeypatch.setattr(xgrammar, "GrammarCompiler", Mock(side_effect=AssertionError("compiled")))
    other = state_of(sent, given)
    for token in tokenizer.encode('{"a": "the the"}', add_special_tokens=False):
        assert torch.equal(again.fill_mask(), other.fill_mask())
        again.accept(token)
        other.accept(token)
    sent.close()


def test_what_is_large_serialised_is_compiled_again(tokenizer: Tokenizer) -> None:
    """Each rule comes with all states: 85 MB for this one."""
    many = {f"p{number}": {"type": "string"} for number in range(500)}
    compiler = GrammarCompiler(tokenizer, limits=GrammarLimits(again_seconds=0))
    state = state_of(compiler, schema({"type": "object", "properties": many}))
    for token in tokenizer.encode('{"p0": "the the"}', add_special_tokens=False):
        state.accept(token)
    assert state.is_finished
    compiler.close()


ENGINE = """
import sys
from onestem.engine.grammar.compiler import MOST_TRIES, GrammarCompiler
from onestem.engine.text.tokenizer import Tokenizer
compiler = GrammarCompiler(Tokenizer.from_directory(sys.argv[1]))
compiler.compile({"type": "regex", "regex": "a+"})
print(compiler.loaded()[0].process.pid, flush=True)
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
