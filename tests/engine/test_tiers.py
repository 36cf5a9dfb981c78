"""Runs in host memory and on a disk: what was evicted, or another process computed, is copied back,
with the same answers; nothing that is damaged or of something else is used."""

from __future__ import annotations

import json
import os
import struct
from concurrent.futures import Future
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.ops.kv import read_kv
from onestem.request import Request, SamplingParams
from tests.engine.harness import (
    answer,
    make_engine,
    record_logprobs,
    requests_for,
    shared_prompts,
)
from tests.engine.pml_harness import compiled_prompts, pml_request
from tests.engine.test_pml_tiers import empty, flip, same, truncate
from tests.forked import ENVIRONMENT, FORKSERVER
from tests.models.changed import changed_model, tensors_of

MIB = 1 << 20


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Prompts of tests are short."""
    take_few(monkeypatch)


def take_few(patching):
    patching.setattr("onestem.engine.tiers.prefixes.LEAST_TOKENS", 4)
    patching.setattr("onestem.cache.pieces.PIECE_TOKENS", 32)


def beside(work, *arguments):
    """Another process that does some work, and where it tells how far it is."""
    told, tells = FORKSERVER.Pipe(duplex=False)
    with tells, patch.dict(os.environ, ENVIRONMENT):
        child = FORKSERVER.Process(target=_work, args=(work, tells, *arguments))
        child.start()
    return child, told


def _work(work, tells, *arguments):
    with pytest.MonkeyPatch.context() as few:
        take_few(few)
        work(tells, *arguments)


def engine_with(path, folder=None, *, host=64 * MIB, disk=64 * MIB, identity="model", **options):
    engine = make_engine(path, **{"page_size": 16, "num_pages": 24, **options})
    engine.keep_below(
        identity,
        host=HostStore(host) if host else None,
        disk=DiskStore(folder, disk, identity) if folder is not None else None,
    )
    return engine


def long_prompts(count: int, length: int = 130, head: int = 70) -> list[list[int]]:
    rng = np.random.default_rng(5)
    first = rng.integers(3, 270, head).tolist()
    return [first + rng.integers(3, 270, length - head).tolist() for _ in range(count)]


def run(engine, requests):
    """Answers, log-probabilities over the vocabulary at each sampled token, and tokens computed."""
    seen = record_logprobs(engine)
    outputs = answer(engine, requests)
    if engine.tiers is not None:
        engine.tiers.stores.flush()
    tokens = {name: [one.token_ids for one in out.outputs] for name, out in outputs.items()}
    for one in (out.metrics for out in outputs.values()):
        assert one.num_host_tokens + one.num_disk_tokens <= one.num_cached_tokens
    return tokens, dict(seen), {n: o.metrics.num_computed_tokens for n, o in outputs.items()}


@pytest.mark.parametrize("family", ["llama", "gemma4_image", "qwen3_moe"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_was_evicted_comes_back(tiny, family, page_size):
    """Conversations of 130 tokens in turns; KV memory holds two."""
    options = {"page_size": page_size, "num_pages": 24 * 16 // page_size}
    plain = make_engine(tiny(family), **options)
    engine = engine_with(tiny(family), **options)
    prompts = long_prompts(6, head=1)
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            [request] = requests_for([prompt])
            first, second = run(plain, [request]), run(engine, [request])
            assert same(first, second), (turn, i)
            again = turn == 1
            assert second[2]["0"] == (1 if again else len(prompt) - (i > 0))
            assert not again or first[2]["0"] > 100  # it is gone without tiers
    assert engine.tiers.stats.from_host_tokens > 600


@pytest.mark.parametrize("host", [0, 64 * MIB])
def test_a_restart_finds_what_was_closed(tiny, tmp_path, host):
    prompts = long_prompts(4)
    first = engine_with(tiny("llama"), tmp_path, host=host, num_pages=4096)
    answers = run(first, requests_for(prompts))
    first.close()
    again = engine_with(tiny("llama"), tmp_path, host=host, num_pages=4096)
    found = run(again, requests_for(prompts))
    assert same(answers, found)
    assert sum(found[2].values()) == len(prompts)  # the last token of each
    assert again.tiers.stats.from_disk_tokens + again.tiers.stats.from_host_tokens >= 70 + 4 * 59


def test_a_prompt_that_differs_takes_the_beginning(tiny, tmp_path):
    """The second process knows the first one's tokens only from the files."""
    one, other = long_prompts(2, head=83)
    first = engine_with(tiny("llama"), tmp_path)
    run(first, requests_for([one]))
    first.close()
    again = engine_with(tiny("llama"), tmp_path)
    found = run(again, requests_for([other]))
    assert same(run(make_engine(tiny("llama")), requests_for([other])), found)
    assert found[2]["0"] == len(other) - 83


def goes_on_after_restarts(path, folder):
    """A conversation; each turn in an engine of its own computes its own tokens and no others."""
    prompt = long_prompts(1)[0]
    for _ in range(4):
        engine = engine_with(path, folder)
        found = run(engine, requests_for([prompt], max_tokens=9))
        assert same(found, run(make_engine(path), requests_for([prompt], max_tokens=9)))
        if len(prompt) > 130:
            assert found[2]["0"] == 1 + 12  # of the last sampled token nothing is kept
        prompt = prompt + found[0]["0"][0] + list(range(7, 19))
        engine.close()


def test_a_conversation_goes_on_after_a_restart(tiny, tmp_path):
    goes_on_after_restarts(tiny("llama"), tmp_path)


def computed_again(requests, make):
    """Tokens that a second engine of `make` computes for a job; it has the answers of the first."""
    results = []
    for _ in range(2):
        engine = make()
        outputs = {out.request_id: out for out in engine.run(requests)}
        engine.check()
        engine.close()
        results.append(outputs)
    first, second = results
    assert {n: o.outputs[0].token_ids for n, o in first.items()} == {
        n: o.outputs[0].token_ids for n, o in second.items()
    }
    return sum(o.metrics.num_computed_tokens for o in second.values())


def only_many_readers_pay(stores, monkeypatch):
    """As on a GPU where one reader is slower than computing, and eight are not."""
    rates, stores.copies.is_aside = stores.rates, True
    monkeypatch.setattr(rates, "note_step", lambda *_: None)
    monkeypatch.setattr(rates, "reader", lambda beside: 1e6)
    rates.num_readers, rates.row_seconds = 8, stores.bytes_per_token / 1e6 / 4


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_second_job_computes_its_own_tokens(tiny, tmp_path, monkeypatch, on_gpu):
    """Groups of a planned job: what they share is kept, what is one prompt's is not."""
    rng = np.random.default_rng(1)
    heads = [rng.integers(3, 270, 64 + i).tolist() for i in range(5)]
    prompts = [head + rng.integers(3, 270, 20).tolist() for head in heads for _ in range(4)]
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            group=i // 4,
            group_prefix_tokens=64 + i // 4,
        )
        for i, prompt in enumerate(prompts)
    ]

    def make():
        engine = engine_with(tiny("llama"), tmp_path, num_pages=40)
        if on_gpu:
            only_many_readers_pay(engine.tiers.stores, monkeypatch)
        return engine

    assert computed_again(requests, make) == 20 * len(prompts)
    kept = sum(int(path.stem.split("-")[2]) for path in tmp_path.iterdir())
    assert kept == sum(map(len, heads))


@pytest.mark.parametrize("pieces", [24, 32])
def test_what_is_evicted_leaves_what_was_read_ahead(tiny, tmp_path, monkeypatch, pieces):
    """As on a GPU, over a host's memory for few groups: each reader's rate is known before the
    first request, and no group's pieces are gone when its turn comes."""
    monkeypatch.setattr("onestem.engine.tiers.prefixes.PIECE_TOKENS", 32)
    rng = np.random.default_rng(1)
    heads = [[3 + i, *rng.integers(3, 270, 124).tolist()] for i in range(20)]
    prompts = [[*head, *range(3 + 12 * i, 15 + 12 * i)] for head in heads for i in range(16)]
    requests = [
        replace(one, group=i // 16, group_prefix_tokens=125)
        for i, one in enumerate(requests_for(prompts, max_tokens=7))
    ]
    size = 32 * make_engine(tiny("llama")).weights.decoder.kv_bytes_per_token
    monkeypatch.setattr("onestem.engine.tiers.copies._CpuCopies.is_aside", True)
    monkeypatch.setattr("onestem.engine.tiers.rates.CopyRates.note_step", lambda *_: None)
    for computed in (137 + 15 * 12, 16 * 12):  # of a group
        engine = engine_with(
            tiny("llama"), tmp_path, num_pages=3750, page_size=1, host=pieces * size
        )
        rates = engine.tiers.stores.rates
        assert (rates.reader(1) is None) == (computed > 200)
        rates.row_seconds = 1.0
        outputs = list(engine.run(requests))
        engine.close()
        assert sum(one.metrics.num_computed_tokens for one in outputs) == 20 * computed


def test_files_are_read_before_their_turn(tiny):
    """A group ahead, since host memory takes the files of so many; none from one without files."""
    engine = engine_with(tiny("llama"))
    prefixes, stores = engine.tiers.prefixes, engine.tiers.stores
    stores.host.budget = 2 * 6 * 512 * stores.bytes_per_token
    requests = [replace(one, group=i // 3) for i, one in enumerate(requests_for([[5]] * 18))]
    files = {i: [Future() for _ in range(3)] for i in range(6) if i != 4}
    asked, seen = [], []
    for request in prefixes.read_ahead(
        requests, lambda one: asked.append(one) or files.get(one.group, [])
    ):
        seen.append((request.request_id, len(asked)))
    assert [int(name) for name, _ in seen] == list(range(18))
    ahead = [count - 1 - int(name) for name, count in seen]
    assert ahead == [3, 2, 1] * 4 + [0, 0, 0] + [2, 1, 0]


def test_salts_have_files_of_their_own(tiny, tmp_path):
    prompt = long_prompts(1)[0]
    for salt, computed in (("a", 130), ("b", 130), ("a", 1), ("", 130)):
        engine = engine_with(tiny("llama"), tmp_path)
        [request] = requests_for([prompt])
        request = Request(
            request_id="0", prompt_token_ids=prompt, params=request.params, cache_salt=salt
        )
        assert run(engine, [request])[2]["0"] == computed
        engine.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_another_model_finds_nothing(tiny, tmp_path):
    prompt = long_prompts(1)[0]
    for identity in ("one", "two"):
        engine = engine_with(tiny("llama"), tmp_path, identity=identity)
        assert run(engine, requests_for([prompt]))[2]["0"] == len(prompt)
        engine.close()


def another(path):
    others = sorted(one for one in path.parent.iterdir() if one != path)
    path.write_bytes(others[0].read_bytes())


def folder(path):
    path.unlink()
    path.mkdir()


def metadata_of_a_list(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text = json.dumps({**json.loads(data[8 : 8 + size]), "__metadata__": []}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def no_tokens(path):
    """Files beside it that tell of pieces without a token."""
    for key in path.stem.split("-")[:2]:
        path.with_name(f"{key}-{key}-0.safetensors").write_bytes(b"")
    path.unlink()


def many_tokens(path):
    path.rename(path.with_name(path.stem.rpartition("-")[0] + "-999999999.safetensors"))


DAMAGES = [flip, truncate, empty, another, folder, os.unlink]
HOSTILE = [metadata_of_a_list, pipe, no_tokens, many_tokens]


@pytest.mark.parametrize("damage", DAMAGES + HOSTILE)
def test_a_damaged_file_is_a_miss(tiny, tmp_path, damage):
    prompts = long_prompts(3)
    first = engine_with(tiny("llama"), tmp_path)
    answers = run(first, requests_for(prompts))
    first.close()
    for path in sorted(tmp_path.iterdir()):
        damage(path)
    again = engine_with(tiny("llama"), tmp_path)
    found = run(again, requests_for(prompts))
    again.close()
    assert same(answers, found)
    assert sum(found[2].values()) > 70 + 3 * 59


@pytest.mark.parametrize("failure", ["write", "read", "list"])
def test_a_disk_that_fails_is_a_miss(tiny, tmp_path, monkeypatch, failure):
    prompts = long_prompts(3)
    if failure != "write":
        first = engine_with(tiny("llama"), tmp_path)
        run(first, requests_for(prompts))
        first.close()

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    names = {"write": "os.replace", "read": "open", "list": "Path.iterdir"}
    engine = engine_with(tiny("llama"), tmp_path)
    monkeypatch.setattr(f"onestem.cache.storage.{names[failure]}", fails, raising=False)
    found = run(engine, requests_for(prompts))
    engine.close()
    assert same(run(make_engine(tiny("llama")), requests_for(prompts)), found)
    assert failure != "write" or engine.tiers.stats.not_written > 0


@pytest.mark.parametrize("seed", [3, *(pytest.param(i, marks=pytest.mark.soak) for i in range(30))])
def test_traffic_with_little_of_everything(tiny, tmp_path, seed):
    """Preemptions, forks, scores, salts and aborts over memory for three prompts and tiers that
    forget: each answer is that of an engine without tiers."""
    rng = np.random.default_rng(seed)
    prompts = long_prompts(8)
    engine = engine_with(tiny("llama"), tmp_path, host=200_000, disk=900_000)
    plain = make_engine(tiny("llama"), page_size=16, num_pages=24)
    for turn in range(12):
        requests = []
        for i in rng.choice(8, 4, replace=False).tolist():
            ids = prompts[i][: int(rng.integers(60, 131))]
            kind = int(rng.integers(4))
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 9)),
                temperature=0,
                ignore_eos=True,
                n=2 if kind == 1 else 1,
                prompt_logprobs=1 if kind == 2 else None,
            )
            requests.append(
                Request(
                    request_id=f"{turn}-{i}",
                    prompt_token_ids=ids,
                    params=params,
                    cache_salt="s" if kind == 3 else "",
                    common_prefix_tokens=20 if kind == 3 else 0,
                    priority="job" if turn % 3 == 0 else "interactive",
                )
            )
        if turn % 4 == 1:  # one leaves while it may wait for a copy
            gone = Request(
                request_id="gone", prompt_token_ids=prompts[turn % 8], params=SamplingParams()
            )
            engine.add_request(gone)
            engine.step()
            engine.abort("gone")
            engine.check()
        assert same(run(plain, requests), run(engine, requests)), turn
    stats = engine.tiers.stats
    assert stats.from_host_tokens > 0
    # Which files are there in time is the disk's to say: some seeds read few of them.
    assert stats.from_disk_tokens > 0 or seed != 3
    engine.close()


def test_others_run_while_a_copy_is_awaited(tiny, monkeypatch):
    """A sequence whose copy does not end has no rows; the others have."""
    engine = engine_with(tiny("llama"), num_pages=40)
    prompts = long_prompts(2, head=0)
    run(engine, requests_for([prompts[0]]))
    engine.cache.make_room(engine.cache.pool.num_pages)
    copies, made = engine.tiers.stores.copies, []

    class Slow:
        def __init__(self, copied):
            self.copied = copied
            self.ended = False

        def done(self):
            return self.ended

        def go_on(self):
            self.copied.go_on()

        def wait(self):
            self.copied.wait()

    into = copies.into
    monkeypatch.setattr(copies, "into", lambda parts: made.append(Slow(into(parts))) or made[-1])
    first, second = requests_for(prompts, max_tokens=4)
    engine.add_request(first)
    engine.add_request(second)
    ended = [out.request_id for _ in range(4) for out in engine.step()]
    assert ended == ["1"]
    assert engine.num_running == 1
    made[0].ended = True
    ended = [out.request_id for _ in range(4) for out in engine.step()]
    assert ended == ["0"]
    assert len(made) == 1


def test_other_weights_forget(tiny, tmp_path):
    prompts = long_prompts(3)
    other = changed_model(tiny("llama"), tmp_path / "other")
    disk = tmp_path / "kv"
    engine = engine_with(tiny("llama"), disk)
    before = run(engine, requests_for(prompts))
    engine.weights.update(tensors_of(other).items())
    after = run(engine, requests_for(prompts))
    assert same(after, run(make_engine(other), requests_for(prompts)))
    engine.cache.make_room(engine.cache.pool.num_pages)
    assert same(run(engine, requests_for(prompts)), after)
    engine.close()
    again = engine_with(tiny("llama"), disk)
    assert same(run(again, requests_for(prompts)), before)


def test_an_engine_that_slept(tiny):
    """KV memory is elsewhere afterwards."""
    engine = engine_with(tiny("llama"))
    requests = requests_for(long_prompts(3))
    first = run(engine, requests)
    engine.cache.make_room(engine.cache.pool.num_pages)
    engine.weights.sleep(1)
    engine.weights.wake_up()
    assert same(first, run(engine, requests))
    assert engine.tiers.stats.from_host_tokens > 0


def test_what_a_module_takes_the_place_of_is_saved_first(tiny):
    """A module that is copied back evicts a run, whose pages it gets."""
    engine = engine_with(tiny("llama"))
    plain = make_engine(tiny("llama"), page_size=16, num_pages=24)
    prompts, modules = long_prompts(4, head=1), compiled_prompts("anchored")
    for i in range(16):
        for request in (*requests_for([prompts[i % 4]]), pml_request("pml", modules[i % 8])):
            assert same(run(plain, [request]), run(engine, [request])), i


def test_a_salt_is_any_text(tiny):
    [request] = requests_for(long_prompts(1))
    request = replace(request, cache_salt="\ud800")
    engine = engine_with(tiny("llama"))
    first = run(engine, [request])
    engine.cache.make_room(engine.cache.pool.num_pages)
    second = run(engine, [request])
    assert same(first, second)
    assert second[2]["0"] == 1


def test_the_index_forgets_what_no_tier_has(tiny, monkeypatch):
    monkeypatch.setattr("onestem.engine.tiers.prefixes.MANY_PIECES", 16)
    engine = engine_with(tiny("llama"), host=100_000)
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(3, 270, 130).tolist()
        run(engine, requests_for([prompt]))
    engine.close()
    assert engine.tiers.prefixes.num_pieces <= 32


@pytest.mark.parametrize("disk", [300_000, 64 * MIB])
def test_an_idle_engine_saves_once(tiny, tmp_path, monkeypatch, disk):
    """What it has is more than the host's memory holds, or the disk."""
    monkeypatch.setattr("onestem.engine.tiers.prefixes.MOST_UNWRITTEN", 200_000)
    engine = engine_with(tiny("llama"), tmp_path, host=100_000, disk=disk, num_pages=4096)
    run(engine, requests_for(long_prompts(8, head=1)))
    for _ in range(20):
        assert not engine.has_unfinished()
        engine.tiers.stores.flush()
    saved = engine.tiers.stats.saved_tokens
    assert 0 < saved <= 8 * 136
    assert not engine.has_unfinished()
    assert engine.tiers.stats.saved_tokens == saved


def test_what_is_larger_than_all_that_may_wait_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("onestem.engine.tiers.stores.MOST_UNWRITTEN", 1)
    engine = engine_with(tiny("llama"), tmp_path, host=0)
    answer(engine, requests_for([long_prompts(1)[0][:20]]))
    engine.close()
    assert len(list(tmp_path.iterdir())) == 1


def answer_each(tells, path, folder):
    engine = engine_with(path, folder)
    for prompt in long_prompts(8, head=1):
        run(engine, requests_for([prompt]))
        tells.send(None)


@pytest.mark.soak
def test_a_kill_at_any_moment_leaves_whole_files(tiny, tmp_path):
    """200 processes over one folder, killed while they write: what is there afterwards is used."""
    rng = np.random.default_rng(0)
    prompts = long_prompts(8, head=1)
    want = run(make_engine(tiny("llama")), requests_for(prompts))
    for _ in range(200):
        child, told = beside(answer_each, tiny("llama"), tmp_path)
        for _ in range(int(rng.integers(1, 5))):
            told.recv()
        child.kill()
        child.join()
        engine = engine_with(tiny("llama"), tmp_path)
        assert same(want, run(engine, requests_for(prompts)))
        assert engine.tiers.stats.damaged == 0
        engine.close()
        for path in list(tmp_path.iterdir())[::2]:
            path.unlink()


def answer_in_turns(tells, path, folder, first: int) -> None:
    """Prompts over tiers for few of them: each answer is that of an engine without."""
    tells.send(None)
    engine, plain = engine_with(path, folder, host=200_000, disk=900_000), make_engine(path)
    prompts = long_prompts(8, head=1)
    for i in range(24):
        [request] = requests_for([prompts[(first + i * (first + 1)) % 8]])
        assert same(run(plain, [request]), run(engine, [request])), i
    engine.close()


def test_two_processes_over_one_folder(tiny, tmp_path):
    """Both write, read and evict there at once."""
    kv = tmp_path / "kv"
    child, told = beside(answer_in_turns, tiny("llama"), kv, 2)
    told.recv()  # it has imported all
    _, tells = ends = FORKSERVER.Pipe()
    answer_in_turns(tells, tiny("llama"), kv, 0)
    for end in ends:
        end.close()
    child.join()
    assert child.exitcode == 0
    assert 0 < sum(path.stat().st_size for path in kv.iterdir()) <= 900_000


def test_a_bfloat16_model_gives_the_same_bits(tiny):
    """What is copied out and back is what was there."""
    engine = engine_with(tiny("llama"), dtype=torch.bfloat16)
    [request] = requests_for([long_prompts(1)[0]])
    run(engine, [request])
    every = [pages for pair in engine.launcher.runner.kv_pages for pages in pair]

    def bits():
        path = next(iter(engine.cache.tree)).path()
        slots = torch.from_numpy(np.concatenate([r.slots(0, r.computed) for r in path]))
        return [read_kv(pages, slots)[:129].view(torch.int16).clone() for pages in every]

    before = bits()
    engine.cache.make_room(engine.cache.pool.num_pages)
    engine.tiers.prefixes.save_evicted()
    for pages in every:
        pages.fill_(float("nan"))
    run(engine, [request])
    assert all(map(torch.equal, before, bits()))


def test_shared_prompts(tiny, tmp_path):
    """The tree of prompts that other tests answer, evicted between any two requests."""
    requests = requests_for(shared_prompts())
    want = run(make_engine(tiny("llama")), requests)
    engine = engine_with(tiny("llama"), tmp_path)
    for request in requests:
        found = run(engine, [request])
        assert found[0][request.request_id] == want[0][request.request_id]
        engine.cache.make_room(engine.cache.pool.num_pages)
    engine.close()


def test_a_pinned_prefix_is_there_after_a_restart(tiny, tmp_path):
    prompt = long_prompts(1)[0]
    computed = []
    for _ in range(2):
        engine = engine_with(tiny("llama"), tmp_path, num_pages=64, max_model_len=256)
        engine.requests.pin_prefix("header", prompt)
        while engine.has_unfinished():
            engine.step()
        computed.append(engine.stats.processed_prompt_tokens)
        assert engine.requests.prefixes()[0].ready
        engine.close()
    assert computed == [130, 1]
