"""Modules in host memory and on a disk: the same answers; damaged or foreign files are not used."""

from __future__ import annotations

import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch

from onestem.cache import ModuleRun
from onestem.cache.host import HostStore
from onestem.cache.storage import DiskStore
from onestem.engine.tiers.modules import module_name
from onestem.errors import ConfigError
from tests.engine.harness import TOLERANCE, answer, make_engine
from tests.engine.pml_harness import check_pml, compiled_prompts, pml_request, record
from tests.models.changed import changed_model, tensors_of

MIB = 1 << 20
A, B, C = (letter * 32 for letter in "abc")  # names
IDS = torch.arange(4, dtype=torch.int32)


def engine_with(path, folder=None, *, host=0, disk=16 * MIB, identity="model", **options):
    engine = make_engine(path, **options)
    engine.keep_below(
        identity,
        host=HostStore(host) if host else None,
        disk=DiskStore(folder, disk, identity) if folder is not None else None,
    )
    return engine


def run(engine, compiled):
    """Answers, what was seen, how many module rows were computed, and how many tokens requests say
    that they found in host memory and on the disk."""
    seen = record(engine)
    outputs = answer(engine, [pml_request(i, one) for i, one in enumerate(compiled)])
    if engine.tiers is not None:
        engine.tiers.stores.flush()
    tokens = [outputs[str(i)].outputs[0].token_ids for i in range(len(compiled))]
    costs = [one.metrics for one in outputs.values()]
    below = [sum(one.num_host_tokens for one in costs), sum(one.num_disk_tokens for one in costs)]
    return tokens, seen, sum(one.num_computed_tokens for one in costs), below


def same(first, second) -> bool:
    return first[0] == second[0] and all(
        (values - second[1][key]).abs().max() < TOLERANCE for key, values in first[1].items()
    )


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
@pytest.mark.parametrize(
    ("family", "page_size"), [("llama", 1), ("llama", 16), ("gemma4_image", 16)]
)
def test_a_restart_finds_modules_on_the_disk(tiny, tmp_path, isolation, family, page_size):
    compiled = compiled_prompts(isolation)
    engine = engine_with(tiny(family), tmp_path, page_size=page_size)
    first = run(engine, compiled)
    cached = {s.key: len(s.token_ids) for c in compiled for s in c.segments if s.kind == "cached"}
    assert engine.tiers.stats.saved_tokens == sum(cached.values())
    again = engine_with(tiny(family), tmp_path, page_size=page_size)
    second = run(again, compiled)
    assert same(first, second)
    assert again.tiers.stats.from_disk_tokens == sum(cached.values())
    assert second[3] == [0, sum(cached.values())]
    assert second[2] <= sum(one.num_computed_tokens for one in compiled)
    assert len(again.cache.modules) == len(cached)


@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_what_was_evicted_comes_back_from_host_memory(tiny, isolation):
    engine = engine_with(tiny("llama"), host=16 * MIB, num_pages=24, page_size=16)
    compiled = compiled_prompts(isolation)
    first = run(engine, compiled)
    engine.cache.clear()
    assert len(engine.cache.modules) == 0
    second = run(engine, compiled)
    assert same(first, second)
    assert engine.tiers.stats.from_host_tokens > 0
    assert second[3] == [engine.tiers.stats.from_host_tokens, 0]
    assert second[2] <= sum(one.num_computed_tokens for one in compiled)


def test_every_check_holds_with_modules_from_the_disk(tiny, tmp_path):
    for _ in range(2):
        engine = engine_with(tiny("llama"), tmp_path, num_pages=24, page_size=16)
        check_pml(tiny("llama"), "isolated", engine=engine)
    assert engine.tiers.stats.from_disk_tokens > 0


def flip(path):
    """One bit of a value."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-8])


def empty(path):
    path.write_bytes(b"")


def no_header(path):
    path.write_bytes(b"\xff" * 4096)


def other_module(path):
    """The file of another module under this one's name."""
    others = sorted(p for p in path.parent.iterdir() if p != path)
    path.write_bytes(others[0].read_bytes())


def other_shape(path):
    """A header that tells another shape of as many bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["kv"]["shape"] = [2, header["kv"]["shape"][0] // 2]
    text = json.dumps(header).encode().ljust(size)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize("damage", [flip, truncate, empty, no_header, other_module, other_shape])
def test_a_damaged_file_is_computed_again(tiny, tmp_path, damage):
    compiled = compiled_prompts("anchored")[:3]
    first = run(engine_with(tiny("llama"), tmp_path), compiled)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in sorted(before):
        damage(path)
    engine = engine_with(tiny("llama"), tmp_path)
    second = run(engine, compiled)
    assert same(first, second)
    assert engine.tiers.stats.damaged > 0
    again = engine_with(tiny("llama"), tmp_path)
    assert same(first, run(again, compiled))
    assert again.tiers.stats.damaged == 0


def test_a_file_of_another_model_is_not_used(tiny, tmp_path):
    compiled = compiled_prompts("anchored")[:2]
    run(engine_with(tiny("llama"), tmp_path, identity="one"), compiled)
    for path in list(tmp_path.iterdir()):  # under the name that it would have for the other
        store = DiskStore(tmp_path, MIB, "two")
        for segment in (s for c in compiled for s in c.segments if s.key):
            other = store.path(module_name("two", "", segment.key, segment.position))
            if not other.exists():
                other.write_bytes(path.read_bytes())
                break
    engine = engine_with(tiny("llama"), tmp_path, identity="two")
    run(engine, compiled)
    assert engine.tiers.stats.from_disk_tokens == 0
    assert engine.tiers.stats.damaged > 0


def test_what_a_waiting_request_wants_is_read_ahead(tiny, tmp_path):
    compiled = compiled_prompts("anchored")[0]
    first = run(engine_with(tiny("llama"), tmp_path), [compiled])
    engine = engine_with(tiny("llama"), tmp_path, host=16 * MIB)
    request = pml_request("0", compiled)
    engine.add_request(request)
    for future in list(engine.tiers.stores.reading.values()):
        future.result()
    cached = [segment for segment in compiled.segments if segment.kind == "cached"]
    assert all(
        module_name("model", "", s.key, s.position) in engine.tiers.stores.host for s in cached
    )
    engine.abort("0")
    assert same(first, run(engine, [compiled]))
    assert engine.tiers.stats.from_disk_tokens == sum(len(s.token_ids) for s in cached)
    assert engine.tiers.stats.from_host_tokens == 0


def test_read_ahead_is_bounded(tiny, tmp_path, monkeypatch):
    compiled = compiled_prompts("anchored")
    run(engine_with(tiny("llama"), tmp_path), compiled)
    monkeypatch.setattr("onestem.engine.tiers.stores.MOST_READ_AHEAD", 2)
    engine = engine_with(tiny("llama"), tmp_path)
    engine.requests.prefetch_modules(
        [s for one in compiled for s in one.segments if s.kind == "cached"]
    )
    engine.tiers.stores.flush()
    run(engine, compiled)
    assert len(engine.tiers.stores.reading) <= 2


def test_on_a_gpu_the_disk_has_to_be_faster_than_computing(tiny, tmp_path, monkeypatch):
    """The choice alone, made on the host."""
    compiled = compiled_prompts("anchored")[0]
    run(engine_with(tiny("llama"), tmp_path), [compiled])
    both = engine_with(tiny("llama"), tmp_path).tiers
    tiers, modules = both.stores, both.modules
    monkeypatch.setattr(tiers.copies, "is_aside", True)
    monkeypatch.setattr("onestem.engine.tiers.stores.PROBED_SECONDS", 1e9)  # once
    module = next(s for s in compiled.segments if s.kind == "cached")
    name, count = module_name("model", "", module.key, module.position), len(module.token_ids)
    run_of_it = ModuleRun(("", module.key, None), module.token_ids, module.position, True)
    assert not modules.has(run_of_it)  # no rate is known: this measures the disk's
    modules.prefetch([(run_of_it.name, module.position, count)])
    both.close(60)  # waits for the threads
    rate, tiers.rates.num_readers = tiers.rates.reader(1), 4
    assert not tiers.reading
    assert not modules.has(run_of_it)
    assert not tiers.disk_pays(name, count)  # that of computing is not known
    seconds = tiers.bytes_per_token / rate
    tiers.rates.note_step(5000, 15_000 * seconds)
    assert tiers.disk_pays(name, count)
    tiers.rates.note_step(5000, 3000 * seconds)
    tiers.rates.note_step(1, 1.0)  # a small step says nothing about a large one
    assert not tiers.disk_pays(name, count)
    assert tiers.disk_pays(name, count, 4)  # at once: each as fast, until that is measured
    tiers.rates.note_read(1000, 4 * 1000 / rate, 4)
    assert not tiers.disk_pays(name, count, 4)
    tiers.rates.note_step(2500, 0.0)  # what ended late is counted with what came before
    tiers.rates.note_step(2500, 15_000 * seconds)
    assert not tiers.disk_pays(name, count)
    assert tiers.rates.row_seconds == pytest.approx(0.6 * seconds / 0.95)


def test_salts_have_files_of_their_own(tiny, tmp_path):
    one = compiled_prompts("anchored")[0]
    for salt, hits in (("a", 0), ("b", 0), ("a", one.num_cached_tokens)):
        engine = engine_with(tiny("llama"), tmp_path)
        answer(engine, [pml_request("0", one, cache_salt=salt)])
        engine.tiers.stores.flush()
        assert engine.tiers.stats.from_disk_tokens == hits


def test_disk_budget_lets_the_oldest_go(tmp_path):
    module = torch.zeros(16, 16)
    size = 2 * module.nbytes + 1024
    store = DiskStore(tmp_path, size, "m")
    (tmp_path / "notes.txt").write_text("x" * 4096)
    for name, age in ((A, 300), (B, 200)):
        assert store.put(name, module, IDS)
        stamp = 1e9 - age
        os.utime(store.path(name), (stamp, stamp))
    assert store.read(A, torch.empty(16, 16))  # used: now the youngest
    assert store.put(C, module, IDS)
    assert (A in store, B in store, C in store) == (True, False, True)
    assert (tmp_path / "notes.txt").exists()
    assert not store.put("d", torch.zeros(256, 60), IDS)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_what_a_checksum_sees(tmp_path):
    """Bits, words and pages that change, are empty, or change places."""
    store, rows = DiskStore(tmp_path, 64 * MIB, "m"), torch.randn(100, 1300)
    assert store.put(A, rows, IDS)
    good = bytearray(store.path(A).read_bytes())
    first, rng = len(good) - rows.nbytes - IDS.nbytes, np.random.default_rng(0)
    for size in (8, 512, 4096, 8192):
        places = first + size * rng.choice(rows.nbytes // size, (8, 2), replace=False)
        for a, b in places.tolist():
            one, other, flipped = good[a : a + size], good[b : b + size], good[a] ^ 4
            for changes in (
                {a: other, b: one},
                {a: bytes(size)},
                {a: bytes([flipped])},
                {a: other},
            ):
                bad = bytearray(good)
                for place, data in changes.items():
                    bad[place : place + len(data)] = data
                store.path(A).write_bytes(bad)
                assert not store.read(A, torch.empty_like(rows)), (size, a, b)
    store.path(A).write_bytes(good)
    assert store.read(A, torch.empty_like(rows))


def test_leftovers_of_killed_processes_are_within_the_bound(tmp_path, monkeypatch):
    """They count as what is whole does, and go in their turn."""
    store, rows = DiskStore(tmp_path, 10_000, "m"), torch.zeros(32, 32)
    (tmp_path / ".mine.part").write_bytes(bytes(20_000))
    with monkeypatch.context() as killed:
        killed.setattr("os.replace", lambda *_: pytest.fail("killed"))
        for name in (A, B):
            with pytest.raises(pytest.fail.Exception):
                store.put(name, rows, IDS)
    first, second = sorted(path for path in tmp_path.iterdir() if path.name != ".mine.part")
    os.utime(second, (1e9, 1e9))
    assert store.put(C, rows, IDS)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".mine.part", first.name, store.path(C).name,
    }  # fmt: skip
    assert store.names() == [C]


def test_no_link_in_the_folder_is_written_through(tmp_path, monkeypatch):
    store, file = DiskStore(tmp_path / "kv", MIB, "m"), tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (store.folder / f".{store.path(A).name}.0.part").symlink_to(file)
    assert not store.put(A, torch.zeros(16, 16), IDS)
    store.path(B).symlink_to(file)
    (store.folder / f".{store.path(A).name}.0.part").unlink(missing_ok=True)
    assert store.put(B, torch.zeros(16, 16), IDS)
    assert file.read_text() == "mine"
    assert not store.path(B).is_symlink()


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    store, rows = DiskStore(tmp_path / "kv", MIB, "m"), torch.zeros(16, 16)
    assert store.put(A, rows, IDS)
    shutil.rmtree(store.folder)
    assert store.names() == []
    assert store.put(B, rows, IDS)
    assert store.names() == [B]
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/x", "file", "nul\0byte"):
        with pytest.raises(ConfigError, match=r"disk_kv .* cannot be made: \w") as refused:
            DiskStore(tmp_path / name, MIB, "m")
        assert refused.value.args[0].isprintable()


def test_a_folder_without_rights_is_a_miss(tmp_path):
    """Root has all rights, so it is another user meanwhile."""
    folder = tmp_path / "kv"
    store, rows = DiskStore(folder, MIB, "m"), torch.zeros(16, 16)
    assert store.put(A, rows, IDS)
    is_root = os.geteuid() == 0
    folder.chmod(0)
    if is_root:
        os.seteuid(65534)
    try:
        assert A not in store
        assert not store.read(A, torch.empty(16, 16))
        assert store.tokens(A, len(IDS)) is None
        assert not store.put(B, rows, IDS)
        store.discard(A)
        assert store.names() == []
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
    assert store.read(A, torch.empty(16, 16))
    assert store.names() == [A]


def test_a_full_folder_keeps_its_bound_without_a_look_at_each_write(tmp_path, monkeypatch):
    """Stores write in turns: what one has not seen of the others fits as well."""
    rows, listings = torch.zeros(16, 16), []
    budget = 1024 * rows.nbytes
    stores = [DiskStore(tmp_path, budget, "m") for _ in range(16)]
    listed = DiskStore.files
    monkeypatch.setattr(DiskStore, "files", lambda self: listings.append(1) or listed(self))
    for i in range(1500):
        assert stores[i % 16].put(f"{i:032x}", rows, IDS)
        if i % 16 == 0:
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= budget + rows.nbytes
    assert len(listings) < 750
    assert f"{1499:032x}" in stores[0]


def test_without_sharing_there_are_no_tiers(tiny):
    off = make_engine(tiny("llama"), share="off")
    off.keep_below("model", host=HostStore(MIB), disk=None)
    assert off.tiers is None


def test_other_weights_forget_what_tiers_keep(tiny, tmp_path):
    """Neither host memory nor the disk has modules of the new weights."""
    compiled = compiled_prompts("anchored")
    other = changed_model(tiny("llama"), tmp_path / "other")
    folder = tmp_path / "modules"
    engine = engine_with(tiny("llama"), folder, host=16 * MIB)
    tokens, seen, computed, _ = run(engine, compiled)
    before = tokens, dict(seen), computed  # the engine is watched on
    files = sorted(folder.iterdir())
    engine.weights.update(tensors_of(other).items())
    loaded = engine.tiers.stats.to_dict()
    after = run(engine, compiled)
    assert same(after, run(engine_with(other), compiled))
    assert not same(after, before)
    engine.cache.clear()
    assert same(run(engine, compiled), after)
    stats = engine.tiers.stats
    assert stats.from_disk_tokens == loaded["from_disk_tokens"]
    assert stats.from_host_tokens > loaded["from_host_tokens"]  # what was computed anew
    assert sorted(folder.iterdir()) == files
    assert same(run(engine_with(tiny("llama"), folder), compiled), before)
    engine.close()
