"""A process that dies ends the engine with one line that names it, wherever it dies."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import onestem.parallel.team as teams
from onestem import LLM, SamplingParams
from onestem.batch.interface import EngineDiedError
from onestem.errors import RankError
from onestem.jobs import run_file
from onestem.models.find import find_model
from onestem.parallel import Team
from onestem.parallel.messages import call
from tests.batch.fakes import completion, write_lines
from tests.engine.harness import answer, requests_for
from tests.parallel.teams import CPU, engine_of, pids_of
from tests.server.test_process import is_gone, served
from tests.soak import seeds

OPTIONS = {"device": "cpu", "dtype": "float32", "kv_memory": "2MiB", "tensor_parallel_size": 2}
SECONDS = 10.0  # within which the line comes
IMPORTS = 60.0  # within which a process on a busy machine has imported all
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

pytestmark = [pytest.mark.steps_fail, pytest.mark.usefixtures("forked_teams")]


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_at_step(engine, step: int, pid: int, number: int = signal.SIGKILL) -> list[float]:
    """Send a signal when so many steps were launched; when that was."""
    run, at = engine.launcher.runner.run, []

    def counted(inputs, prepared, ids):
        if engine.stats.steps == step:
            at.append(time.monotonic())
            os.kill(pid, number)
        return run(inputs, prepared, ids)

    engine.launcher.runner.run = counted
    return at


def line_of(rank: int, size: int, pid: int, number: int = 9) -> str:
    return (
        f"rank {rank} of {size} \\(process {pid}\\) ended by signal {number} \\(.*\\): "
        "start the engine again$"
    )


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_at_a_random_step(seed, tmp_path):
    """Then the same object refuses calls with that line, and no process is left."""
    step = random.Random(seed).randrange(100)
    with LLM(**OPTIONS, host_kv="1MiB", disk_kv=tmp_path) as llm:
        (pid,), engine = pids_of(llm.team), llm.engine
        at = kill_at_step(engine, step, pid)
        with pytest.raises(RankError, match=line_of(1, 2, pid)):
            llm.generate(["a", "b", "ab"], LONG)
        assert time.monotonic() - at[0] < SECONDS
        assert engine.stats.steps in (step, step + 1)
        for again in (
            lambda: llm.generate("a"),
            lambda: llm.score(["a"]),
            lambda: llm.sleep(1),
            lambda: next(llm.stream("a")),
            llm.reset_prefix_cache,
        ):
            with pytest.raises(RankError, match=line_of(1, 2, pid)):
                again()
        engine.check()
    assert not is_running(pid)


def test_while_nobody_asks():
    with LLM(**OPTIONS) as llm:
        (pid,) = pids_of(llm.team)
        told: list[str] = []
        llm.team.on_death(told.append)
        os.kill(pid, signal.SIGTERM)  # which they leave to rank 0
        llm.generate("a", SamplingParams(max_tokens=2))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: told)
        with pytest.raises(RankError, match=line_of(1, 2, pid)) as error:
            llm.generate("a")
        assert told == [str(error.value)]


def stopped_line(rank: int, size: int, pid: int) -> str:
    name = f"rank {rank} of {size} \\(process {pid}\\)"
    return f"{name} was stopped by a signal: start the engine again$"


@pytest.mark.parametrize("step", [0, 7])
def test_a_rank_that_is_stopped(step, monkeypatch, caplog):
    """It is ended, whatever rank 0 waits for; before that a line says how it goes on."""
    monkeypatch.setattr(teams, "LOOK_SECONDS", 0.01)
    with LLM(**OPTIONS) as llm:
        (pid,) = pids_of(llm.team)
        kill_at_step(llm.engine, step, pid, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(RankError, match=stopped_line(1, 2, pid)):
                llm.generate(["a", "b"], LONG)
        assert f"(process {pid}) is stopped: kill -CONT {pid}" in caplog.text
    assert not is_running(pid)


def test_a_rank_that_is_stopped_while_nobody_asks(monkeypatch):
    monkeypatch.setattr(teams, "LOOK_SECONDS", 0.01)
    with LLM(**OPTIONS) as llm:
        (pid,), told = pids_of(llm.team), []
        llm.team.on_death(told.append)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: told)
        assert re.fullmatch(stopped_line(1, 2, pid), told[0])


def test_a_rank_that_is_stopped_while_they_meet(monkeypatch):
    monkeypatch.setattr(teams, "LOOK_SECONDS", 0.01)
    start = teams.start_rank

    def started(number):
        member = start(number)
        os.kill(member.process.pid, signal.SIGSTOP)
        return member

    monkeypatch.setattr(teams, "start_rank", started)
    with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) was stopped by a signal"):
        Team(2, CPU)


@pytest.mark.soak
def test_a_rank_that_goes_on_is_not_ended(monkeypatch):
    """Stopped for fewer looks than are too many, again and again."""
    seen: list[int] = []

    def is_stopped(pid: int) -> bool:
        seen.append(pid)
        return len(seen) % teams.STOPPED_LOOKS != 0

    monkeypatch.setattr(teams, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(teams, "is_stopped", is_stopped)
    with LLM(**OPTIONS) as llm:
        wait_until(lambda: len(seen) > 20 * teams.STOPPED_LOOKS)
        assert len(llm.generate("a", LONG)[0].outputs[0].token_ids) == 200


def test_a_job_goes_on(tmp_path):
    """As after any death of its engine."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [completion(f"c{i}", max_tokens=20) for i in range(3)])
    options = {**OPTIONS, "max_model_len": 64}
    with LLM(**options) as llm:
        (pid,) = pids_of(llm.team)
        kill_at_step(llm.engine, 5, pid)
        with pytest.raises(EngineDiedError, match=f"{line_of(1, 2, pid)[:-1]}: the same command"):
            run_file(llm, source, out)
    with LLM(**{**options, "tensor_parallel_size": 1}) as llm:
        assert run_file(llm, source, out).failed == 0


def killed_while(team: Team, rank: int, patched: str, monkeypatch) -> None:
    """Something that takes long is not waited for."""
    done = getattr(teams, patched)

    def dying(*arguments, **options):
        os.kill(pids_of(team)[rank - 1], signal.SIGKILL)
        time.sleep(60)
        return done(*arguments, **options)

    monkeypatch.setattr(teams, patched, dying)


def test_while_they_load(tiny, monkeypatch):
    path = tiny("llama")
    team = Team(2, CPU)
    (pid,) = pids_of(team)
    killed_while(team, 1, "load_decoder", monkeypatch)
    began = time.monotonic()
    with pytest.raises(RankError, match=line_of(1, 2, pid)):
        engine_of(team, path)
    assert time.monotonic() - began < SECONDS
    team.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_while_they_meet(rank, monkeypatch):
    """Before it joins the others, or before it says anything."""
    start = teams.start_rank

    def started(number):
        member = start(number)
        if rank == number - 1:
            os.kill(member.process.pid, signal.SIGKILL)
        return member

    monkeypatch.setattr(teams, "start_rank", started)
    began = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {rank + 1} of 3 \(process \d+\) ended by signal 9"):
        Team(3, CPU)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("seed", range(3))
def test_who_of_four_is_named(tiny, seed):
    """The others fail because one has died: that one is named, and all end."""
    rng = random.Random(seed)
    rank, step = rng.randrange(1, 4), rng.randrange(12)
    team = Team(4, CPU)
    pids = pids_of(team)
    engine = engine_of(team, tiny("llama"))
    at = kill_at_step(engine, step, pids[rank - 1])
    with pytest.raises(RankError, match=line_of(rank, 4, pids[rank - 1])):
        answer(engine, requests_for([[1, 2, 3], [1, 2, 4]], max_tokens=20))
    assert time.monotonic() - at[0] < SECONDS
    wait_until(lambda: not any(map(is_running, pids)))
    team.close()


def test_an_error_of_another_rank():
    """It says so itself, and rank 0 waits for it no longer."""
    with LLM(**OPTIONS) as llm:
        (pid,) = pids_of(llm.team)
        llm.team.send(call("nothing"))
        line = rf"rank 1 of 2 \(process {pid}\) failed: AttributeError: .* 'nothing': start the"
        with pytest.raises(RankError, match=line):
            llm.generate("a")


def test_interrupts_cost_the_call_alone():
    """Ctrl-C at any moment: all ranks are in the same step after it."""
    with LLM(**OPTIONS) as llm:
        short = SamplingParams(max_tokens=9, temperature=0, logprobs=1)
        before = llm.generate(["a", "b"], short)
        for i in range(12):
            signal.setitimer(signal.ITIMER_REAL, 0.005 + 0.013 * i)
            with pytest.raises(KeyboardInterrupt), interrupted_by(signal.SIGALRM):
                generate_on(llm)
        after = llm.generate(["a", "b"], short)
        assert [a.outputs[0].token_ids for a in after] == [b.outputs[0].token_ids for b in before]


def generate_on(llm: LLM) -> None:
    while True:
        llm.generate(["b", "a", "ab"], LONG)


@contextlib.contextmanager
def interrupted_by(number: int) -> Iterator[None]:
    """What comes as that signal is sent on as Ctrl-C."""
    before = signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(number, before)


def test_an_error_of_rank_0_inside_a_step(monkeypatch):
    """Other ranks wait in the same step: it cannot be computed again."""
    with LLM(**OPTIONS) as llm:
        pids = pids_of(llm.team)

        def failing(*arguments):
            raise MemoryError("no more")

        monkeypatch.setattr(llm.decoder, "forward", failing)
        line = "rank 0 of 2 failed: MemoryError: no more: start the engine again"
        for _ in range(2):
            with pytest.raises(RankError, match=line):
                llm.generate("a")
    assert not any(map(is_running, pids))


SCRIPT = """
import os, sys
from onestem import LLM, SamplingParams
llm = LLM(device="cpu", dtype="float32", kv_memory="2MiB", tensor_parallel_size=2)
print(llm.team.members[0].process.pid, flush=True)
(answer,) = llm.generate("a", SamplingParams(max_tokens=4, temperature=0))
print(answer.outputs[0].token_ids, flush=True)
fork = os.fork()
if fork == 0:
    sys.exit()
print("a fork ends with", os.waitpid(fork, 0)[1])
print("waiting", flush=True)
input()
"""


def temporary_files(folder: Path) -> dict[str, str]:
    """Variables that put ours into the folder, and torch's elsewhere."""
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "torchinductor")}


def test_a_plain_script(tmp_path):
    """No guard is needed; the other process ends where it is killed, and leaves nothing behind."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, **temporary_files(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    ) as script:  # fmt: skip
        pid, ids = int(script.stdout.readline()), script.stdout.readline()
        assert len(ids.split(",")) == 4
        assert script.stdout.readline() == "a fork ends with 0\n"
        assert script.stdout.readline() == "waiting\n"
        assert is_running(pid)
        script.kill()
    wait_until(lambda: not is_running(pid))
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_script_that_is_killed_while_its_ranks_start(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, **temporary_files(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=environment, start_new_session=True
    ) as script:
        wait_until(lambda: children_of(script.pid), IMPORTS)
        os.killpg(script.pid, signal.SIGKILL)  # so none can remove anything
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_fork_that_lives_on_holds_up_no_end():
    """It has all sockets of the ranks open."""
    llm = LLM(**OPTIONS)
    (member,) = llm.team.members
    end, other_end = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(other_end)
        signal.alarm(60)
        os.read(end, 1)
        os._exit(0)
    llm.close()
    assert member.process.wait() == 0
    os.close(other_end)
    os.close(end)
    assert os.waitpid(fork, 0)[1] == 0


def test_an_llm_that_is_forgotten():
    llm = LLM(**OPTIONS)
    (pid,), threads = pids_of(llm.team), threading.active_count()
    del llm
    gc.collect()
    assert not is_running(pid)
    assert threading.active_count() < threads


@pytest.mark.soak
def test_a_server_starts_all_again(tmp_path, tiny):
    """When a rank dies, also while nobody asks for anything; an engine that dies takes its ranks
    along."""
    model = shutil.copytree(Path(find_model("embedded")), tmp_path / "model")
    more = ("--tensor-parallel-size", 2, "--kv-memory", "16MiB")
    with served(tmp_path / "state", model, *more) as server:
        body = {"prompt": "a", "max_tokens": 8, "temperature": 0}

        def answer_of() -> str:
            reply = server.http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["text"]

        first, before = answer_of(), server.engine_pid()
        (rank,) = children_of(before)
        os.kill(rank, signal.SIGKILL)
        server.engine_ready(2)
        assert answer_of() == first
        (down,) = server.events("engine_down")
        assert re.fullmatch(line_of(1, 2, rank), down["error"])
        assert is_gone(before)
        engine = server.engine_pid()
        (rank,) = children_of(engine)
        os.kill(engine, signal.SIGKILL)
        assert is_gone(rank)


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
