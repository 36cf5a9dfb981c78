"""Replicas as actors of a Ray on this machine; skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import onestem.replicas.ray as actors
from onestem import LLM, EngineOptions, SamplingParams
from onestem.errors import ConfigError, JobError, RequestError
from onestem.jobs import run_file
from onestem.replicas import Replicas
from onestem_lab.load.flags import flags_of
from tests.batch.fakes import chat, completion, write_lines
from tests.forked import Command

OPTIONS = EngineOptions(
    dtype="float32", kv_memory="2MiB", device="cpu", max_step_tokens=64, threads=1
)
FLAGS = flags_of(OPTIONS)


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'onestem\[ray\]'"):
        Replicas(2, OPTIONS)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"trace": "steps.jsonl"}, "trace is a file of one engine"),
        ({"device": "cuda:1"}, "with replicas say cuda,"),
        ({"device": "cpu:0"}, "with replicas say cpu,"),
        ({"tensor_parallel_size": 3}, r"does not divide over 3 .* can be 1, 2, 4"),
    ],
)
def test_options_of_one_engine_are_refused_before_ray_starts(monkeypatch, fields, error):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=error):
        Replicas(2, OPTIONS.replace(**fields))


def test_more_processes_than_memory_holds_are_refused():
    class Ray:
        def is_initialized(self):
            return False

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(actors, "_import", Ray)
        patched.setattr(actors, "ram_bytes", lambda: 3 << 30)
        with pytest.raises(ConfigError, match=r"is 4 of 2 each, .* has 3\.0 GiB, lower it"):
            Replicas(4, OPTIONS.replace(tensor_parallel_size=2))


def test_replicas_share_a_machines_memory(monkeypatch):
    monkeypatch.setattr(actors, "ram_bytes", lambda: 16 << 30)
    for replicas, gib in ((1, 4), (2, 4), (8, 1)):
        options = actors.fitting_here(OPTIONS.replace(kv_memory="auto"), replicas)
        assert options.kv_memory <= gib << 30
        given = actors.fitting_here(OPTIONS, replicas)
        assert given.kv_memory == OPTIONS.kv_memory


@pytest.mark.parametrize("event", ["nothing", "a failure"])
def test_the_end_of_its_own_node_ends_the_job(monkeypatch, event):
    """Ray starts no more actors then, and would wait for ever."""
    nodes = [{"NodeID": "own", "Alive": True}, {"NodeID": "other", "Alive": False}]

    class RayError(Exception):
        pass

    def get(ref):
        raise RayError("the actor died")

    def wait(waiting, num_returns, timeout):
        return (waiting if event == "a failure" else []), []

    actor = SimpleNamespace(load=SimpleNamespace(remote=lambda: "call"))
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray = SimpleNamespace(
        wait=wait, get=get, exceptions=SimpleNamespace(RayError=RayError), nodes=lambda: nodes,
        get_runtime_context=lambda: context, is_initialized=lambda: True,
        cluster_resources=dict, kill=lambda actor: None,
        remote=lambda **options: lambda worker: SimpleNamespace(remote=lambda options: actor),
    )  # fmt: skip
    monkeypatch.setattr(actors, "_import", lambda: ray)
    crew = actors.RayCrew(OPTIONS, 1, None)
    crew.start(0)
    assert len(crew.wait()) == (event == "a failure")
    crew.start(0)
    nodes[0]["Alive"] = False
    with pytest.raises(JobError, match="Ray's node on this machine has ended"):
        crew.wait()


def test_an_address_without_ray_is_told_at_once(monkeypatch):
    """Ray itself would try for ever."""
    monkeypatch.setattr(actors, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"Ray cannot be reached at {address}: timed out"):
            actors.check_reached(address)

        def answer():
            with silent.accept()[0] as other:  # the one before
                with silent.accept()[0] as end:
                    end.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                    end.recv(100)
                other.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="what answers there is not Ray"):
            actors.check_reached(address)
        thread.join()
    for nobody in (address, "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match=f"Ray cannot be reached at {nobody}: "):
            actors.check_reached(nobody)
    actors.check_reached("auto")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Two workers of pytest may start a cluster each. In a new home both would write its one token.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Ray's workers give way to everything else: beside other tests they would hardly run.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def replicas(cluster, told):
    with Replicas(2, OPTIONS, address=cluster, tell=told.append) as made:
        yield made
    with pytest.raises(ConfigError, match="the replicas of embedded are closed"):
        made.generate(["a"])


@pytest.fixture(scope="module")
def llm():
    with LLM.from_options(OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def job(llm, tmp_path_factory):
    """A job, and the file that one engine writes."""
    folder = tmp_path_factory.mktemp("job")
    lines = []
    for i in range(60):
        document = f"Document {i % 5} says what documents of its kind say. " * 3
        more = {"n": 3, "temperature": 1.0} if i % 7 == 0 else {"temperature": 0}
        lines.append(completion(f"c{i}", f"{document}Question {i}", max_tokens=4 + i % 9, **more))
    lines += [chat("chat", max_tokens=5), completion("long", "x" * 40_000), completion("c1")]
    lines.append(completion("j", max_tokens=9, response_format={"type": "regex", "regex": "(a"}))
    source = write_lines(folder / "in.jsonl", lines)
    before = llm.engine.stats.processed_prompt_tokens
    summary = run_file(llm, source, folder / "whole.jsonl")
    computed = llm.engine.stats.processed_prompt_tokens - before
    assert summary.failed == 3
    return source, (folder / "whole.jsonl").read_bytes(), computed


def test_the_file_is_that_of_one_engine(cluster, replicas, job, tmp_path):
    source, whole, computed = job
    summary = run_file(replicas, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    actors.check_reached(cluster)
    stats = replicas.stats()
    assert stats.output_tokens == summary.num_output_tokens > 0
    # How much is stolen, and so computed twice, depends on the replicas' speeds.
    assert computed <= stats.processed_prompt_tokens < stats.logical_prompt_tokens / 4


@pytest.mark.soak
def test_a_replica_of_two_processes(cluster, replicas):
    """Beside others. The actor is rank 0, and the other is its child."""
    options = OPTIONS.replace(tensor_parallel_size=2)
    prompts = [f"Document {i % 3} says what it says. Question {i}" for i in range(12)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    want = [output.outputs[0].token_ids for output in replicas.generate(prompts, params)]
    with Replicas(1, options, address=cluster) as made:
        found = made.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in found] == want
        (pid,) = (one.pid for one in made.replicas)
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert b"onestem.parallel.follower" in Path(f"/proc/{rank}/cmdline").read_bytes()


def test_generate_answers_as_one_engine_does(llm, replicas):
    prompts = [f"Document {i % 3} says what it says. Question {i}" for i in range(12)]
    params = [SamplingParams(max_tokens=3 + i % 4, temperature=0) for i in range(12)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    found = replicas.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in found] == expected
    assert [output.prompt for output in found] == prompts
    with pytest.raises(RequestError, match="prompt 1: prompt has"):
        replicas.generate(["a", "long " * 20_000])
    with pytest.raises(RequestError, match="replicas give no log-probabilities"):
        replicas.generate(["a"], SamplingParams(logprobs=2))
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        replicas.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match="sampling_params is 'hot', expected SamplingParams"):
        replicas.generate(["a"], "hot")
    with pytest.raises(RequestError, match="prompt 1: prompt is NoneType"):
        replicas.generate(["a", None])

    def asking():
        with pytest.raises(RequestError, match="replicas answer another call"):
            replicas.generate(["a"])
        yield prompts[0]

    (one,) = replicas.generate(asking(), params[0])
    assert one.outputs[0].token_ids == expected[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replicas, "_pid", 1)
        with pytest.raises(ConfigError, match="a fork of the one with the replicas"):
            replicas.generate(["a"])
    one = replicas.generate({"prompt": prompts[0]}, params[0])
    assert one[0].outputs[0].token_ids == expected[0]


def test_killed_replicas_lose_nothing(replicas, told, job, tmp_path):
    """SIGKILL at three points, for both of them at last; each comes again."""
    source, whole, _ = job
    kills, killed = [1, 8, 16], []

    def progress(now):
        alive = [one.pid for one in replicas.replicas if one.pid not in killed]
        if now.last is not None and kills and now.done >= kills[0] and alive:
            kills.pop(0)
            killed.append(alive[-1])
            os.kill(alive[-1], signal.SIGKILL)

    summary = run_file(replicas, source, tmp_path / "out.jsonl", on_progress=progress)
    assert summary.failed == 3
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert not kills
    assert sum("died" in line and "it is started again" in line for line in told) == 3


@pytest.mark.soak
def test_a_killed_driver_is_followed_by_another(replicas, cluster, job, tmp_path):
    """The command had one replica; who goes on has two."""
    source, whole, _ = job
    output = tmp_path / "out.jsonl"
    flags = (*FLAGS, "--replicas", 1, "--ray-address", cluster, "-q")
    command = Command("batch", source, "-o", output, *flags, signal_after=(20, signal.SIGKILL))
    killed = command.wait(180)  # it starts a replica, beside those that are there
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n") == 20
    assert run_file(replicas, source, output).resumed == 20
    assert output.read_bytes() == whole
