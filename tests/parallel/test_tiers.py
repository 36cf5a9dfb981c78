"""Each rank keeps its part of what leaves KV memory: it comes back on all of them, or on none."""

from __future__ import annotations

import os
import shutil
import sys
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from onestem import LLM, SamplingParams
from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.tiers.copies import copies_of
from onestem.errors import RankError
from onestem.parallel import Team
from onestem.parallel.tiers import PartOfTiers
from tests.engine import test_pml_tiers, test_state_tiers, test_tiers
from tests.engine.harness import answer, make_engine, requests_for
from tests.engine.test_pml_tiers import flip, same, truncate
from tests.engine.test_tiers import few_tokens, long_prompts, run
from tests.parallel.teams import CPU, engine_of, lent_to_llms

__all__ = ["few_tokens"]

MIB = 1 << 20


@pytest.fixture(params=["cpu", "cuda"])
def make(request, monkeypatch):
    """Makes engines of two ranks, with tiers: in place of those of one that other tests make."""
    if request.param == "cpu":
        team = request.getfixturevalue("two")
    elif torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are not there")
    else:
        team = request.getfixturevalue("two_gpus")
        monkeypatch.setattr("onestem.engine.tiers.stores.TierStores.disk_pays", lambda *_: True)
        # Tokens are a CPU's.
        for module in (test_tiers, test_pml_tiers, test_state_tiers, sys.modules[__name__]):
            monkeypatch.setattr(module, "same", lambda first, second: first[0] == second[0])
    monkeypatch.setattr(test_state_tiers, "equal", lambda *two: test_state_tiers.same(*two))
    on_team = partial(with_tiers, team, device=torch.device(request.param))
    for module in (test_tiers, test_pml_tiers):
        monkeypatch.setattr(module, "engine_with", on_team)
    return on_team


@pytest.fixture(scope="module")
def two_gpus():
    team = Team(2, torch.device("cuda"))
    yield team
    team.close()


def with_tiers(
    team, path, folder=None, *, host=64 * MIB, disk=64 * MIB, identity="model", **options
):
    engine = engine_of(team, path, **{"page_size": 16, "num_pages": 24, **options})
    engine.keep_below(
        identity,
        host=HostStore(host // 2) if host else None,
        disk=DiskStore(folder, disk, identity, size=2) if folder is not None else None,
    )
    return engine


HERE = (
    partial(test_tiers.test_what_was_evicted_comes_back, family="llama", page_size=16),
    partial(test_tiers.test_what_was_evicted_comes_back, family="gemma4_image", page_size=1),
    partial(
        test_state_tiers.test_what_was_evicted_comes_back,
        family="qwen3_5",
        options={"num_states": 2, "num_pages": 24},
    ),
    test_tiers.test_an_engine_that_slept,
    test_tiers.test_what_a_module_takes_the_place_of_is_saved_first,
)
OVER_A_FOLDER = (
    partial(test_state_tiers.test_a_restart_finds_what_was_closed, family="qwen3_next", host=0),
    partial(test_state_tiers.test_a_second_job_computes_its_own_tokens, num_states=3),
    partial(test_tiers.test_a_restart_finds_what_was_closed, host=0),
    partial(test_tiers.test_traffic_with_little_of_everything, seed=3),
    test_tiers.test_a_prompt_that_differs_takes_the_beginning,
    test_tiers.test_salts_have_files_of_their_own,
    test_tiers.test_other_weights_forget,
    test_tiers.test_a_pinned_prefix_is_there_after_a_restart,
    partial(
        test_pml_tiers.test_a_restart_finds_modules_on_the_disk,
        isolation="anchored", family="llama", page_size=16,
    ),
)  # fmt: skip


def name_of(test: Callable) -> str:
    return getattr(test, "func", test).__name__


@pytest.mark.parametrize("test", HERE, ids=name_of)
def test_as_one_device_has_it(make, tiny, test):
    test(tiny=tiny)


@pytest.mark.parametrize("test", OVER_A_FOLDER, ids=name_of)
def test_as_one_device_has_it_over_a_folder(make, tiny, tmp_path, test):
    test(tiny=tiny, tmp_path=tmp_path)


def other_rank(path):
    """Another rank's part of the same tokens."""
    first, second = sorted(path.parent.glob(f"{path.name.partition('.')[0]}.*"))
    shutil.copy(second if path == first else first, path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", [flip, truncate, os.unlink, other_rank])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_part_that_is_damaged_is_a_miss_on_all(make, tiny, tmp_path, family, damage, rank):
    prompts = long_prompts(2, head=1)
    first = make(tiny(family), tmp_path)
    answers = run(first, requests_for(prompts))
    first.close()
    parts = [sorted(tmp_path.glob(f"*.{i}-of-2.safetensors")) for i in range(2)]
    assert len(parts[0]) == len(parts[1]) == len(list(tmp_path.iterdir())) / 2 > 0
    for path in parts[rank]:
        damage(path)
    again = make(tiny(family), tmp_path)
    found = run(again, requests_for(prompts))
    assert same(answers, found)
    assert sum(found[2].values()) == 2 * 130 - (family == "llama")  # the first token
    assert (again.tiers.stats.damaged > 0) == (damage is not os.unlink)
    again.close()


def test_another_number_of_ranks_finds_its_own(make, tiny, tmp_path):
    """Over one folder, of which each has a bound."""
    [request] = requests_for(long_prompts(1))
    found = []
    for ranks in (1, 2, 1, 2):
        if ranks == 2:
            engine = make(tiny("llama"), tmp_path)
        else:
            engine = make_engine(tiny("llama"), page_size=16)
            engine.keep_below("model", host=None, disk=DiskStore(tmp_path, 64 * MIB, "model"))
        found.append(run(engine, [request]))
        engine.close()
    assert all(same(found[0], one) for one in found)
    assert [computed["0"] for _, _, computed in found] == [130, 130, 1, 1]


def test_all_parts_count_for_a_folder_s_size(make, tiny, tmp_path):
    engine = make(tiny("llama"), tmp_path, disk=300_000, num_pages=4096)
    run(engine, requests_for(long_prompts(8, head=1)))
    engine.close()
    parts = [path for _, _, path in engine.tiers.stores.disk.files()]
    assert 200_000 < sum(path.stat().st_size for path in parts) <= 300_000


def test_rank_0_knows_what_it_has_dropped(two, tiny):
    engine = with_tiers(two, tiny("llama"), host=200_000)
    copies = engine.tiers.stores.copies
    for prompt in long_prompts(8, head=1):
        run(engine, requests_for([prompt]))
        engine.cache.make_room(engine.cache.pool.num_pages)
        engine.tiers.prefixes.save_evicted()
        assert len(copies.number_of) == len(engine.tiers.stores.host)
    assert max(copies.number_of.values()) > 2 * len(copies.number_of)
    assert len(copies.gone) < 8


def test_others_drop_what_rank_0_has_dropped():
    copies, kept = copies_of([(torch.zeros(4, 8, 2, 4), torch.zeros(4, 8, 2, 4))], 0), []

    class Watched:
        def out(self, parts):
            every, wait = copies.out(parts)
            kept.extend(map(weakref.ref, every))
            return every, wait

    part = PartOfTiers(Watched(), None, CPU, lambda *_: None)
    slots = np.arange(5)
    part.do([], "out", [3, 4], [slots, slots])
    part.do([3, 7], "out", [5], [slots])
    copies.close()
    assert [one() is None for one in kept] == [True, False, False]


def test_the_options_are_those_of_one_device(two, tmp_path):
    """The sizes are of all ranks together."""
    options = {"device": "cpu", "dtype": "float32", "kv_memory": "2MiB", "seed": 3}
    tiers = {"host_kv": "6MiB", "disk_kv": tmp_path, "disk_kv_size": "8MiB"}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    prompt = "The river rises in the hills, and runs through the town to the sea. " * 5

    def told(llm: LLM) -> tuple[list[int], int]:
        [output] = llm.generate([prompt], greedy)
        return output.outputs[0].token_ids, output.metrics.num_computed_tokens

    with LLM(**options) as llm:
        want, count = told(llm)
    computed = []
    for size in (1, 2, 1, 2):
        with lent_to_llms(two), LLM(**options, **tiers, tensor_parallel_size=size) as llm:
            found, rows = told(llm)
            assert found == want
            computed.append(rows)
            assert llm.engine.tiers.stores.host.budget >= 6 * MIB // size
            llm.sleep(1)
            llm.wake_up()
            assert told(llm)[0] == want
    assert computed == [count, count, 1, 1]


@pytest.mark.steps_fail
@pytest.mark.usefixtures("forked_teams")
def test_a_rank_that_is_killed_while_it_keeps(tiny, tmp_path):
    """Rank 0 waits for it no longer, and what it had not written is a miss."""
    [request] = requests_for(long_prompts(1))
    found = []
    for when in ("before", "after", "never"):
        team = Team(2, CPU)
        engine = with_tiers(team, tiny("llama"), tmp_path)
        disk = engine.tiers.stores.disk

        def asked(*what, ask=disk.others, when=when, rank=team.members[0].process):
            if when == "before":
                rank.kill()
            wait = ask(*what)
            if when == "after":
                rank.kill()
            return wait

        disk.others = asked
        found.append(run(engine, [request]))
        if when != "never":
            with pytest.raises(RankError, match=r"rank 1 of 2 .* ended by signal 9"):
                answer(engine, [request])
            assert engine.tiers.stats.not_written > 0
        engine.close()
        team.close()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
