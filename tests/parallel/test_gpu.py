"""Two GPUs hold a model together: NCCL, inside CUDA graphs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.errors import RankError
from tests.parallel.teams import pids_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are not there")

OPTIONS = {"device": "cuda", "dtype": "float32", "kv_memory": "64MiB", "seed": 3}
DOCUMENT = "The river rises in the hills, and runs through the town to the sea. " * 8
SECONDS = 10.0


def told(outputs) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def has_peers(llm: LLM) -> bool:
    """Whether its GPUs write to each other's memory, if they can."""
    reach = torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)
    return (llm.team.ranks.peers is not None) == reach


def answers(llm: LLM) -> list:
    """Shared prefixes, several answers, chunks, and a grammar; then the same from the cache."""
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=30, n=3, seed=7),
        SamplingParams(max_tokens=20, temperature=0, logprobs=2),
        SamplingParams(choices=["a river", "a road"], seed=5),
    ]
    prompts = [DOCUMENT + f"Question {i}: what is it?" for i in range(len(params))]
    found = [told(llm.generate(prompts, params)) for _ in range(2)]
    scores = llm.score([DOCUMENT], [[" north", " to the sea"]])
    return [*found, [[round(one.logprob, 2) for one in some] for some in scores]]


@pytest.fixture(scope="module")
def alone():
    with LLM(**OPTIONS) as llm:
        return answers(llm)


def test_answers_are_those_of_one_gpu(alone):
    with LLM(**OPTIONS, tensor_parallel_size=2) as llm:
        assert has_peers(llm)
        assert answers(llm) == alone
        llm.sleep(1)
        llm.wake_up()
        llm.reset_prefix_cache()
        assert answers(llm) == alone


@pytest.mark.steps_fail
@pytest.mark.parametrize("step", [3, 60])
def test_a_killed_rank_is_named(step):
    """And copies to host memory that wait for its steps are not waited for."""
    with LLM(**OPTIONS, host_kv="64MiB", tensor_parallel_size=2) as llm:
        assert has_peers(llm)  # of each team that a process makes
        (pid,), engine, at = pids_of(llm.team), llm.engine, []
        run = engine.launcher.runner.run

        def counted(inputs, prepared, ids):
            if engine.stats.steps == step:
                at.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
            return run(inputs, prepared, ids)

        engine.launcher.runner.run = counted
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {pid}\) ended by signal 9"):
            llm.generate([DOCUMENT], SamplingParams(max_tokens=120, ignore_eos=True))
        assert time.monotonic() - at[0] < SECONDS
