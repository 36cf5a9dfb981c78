"""Tiers beside what is not theirs: folders without rights, other processes, and engines that have
none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from onestem.cache.storage import DiskStore
from tests.engine.harness import make_engine, requests_for
from tests.engine.test_pml_tiers import same
from tests.engine.test_tiers import engine_with, few_tokens, flip, long_prompts, run

__all__ = ["few_tokens"]

WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from tests.engine import test_tiers_beside as t
t.answer_without_rights(*map(Path, sys.argv[1:]))
"""


def answer_without_rights(path, folder):
    """As a user that may neither list, read nor write a folder of root's with files."""
    requests = requests_for(long_prompts(3))
    want = run(make_engine(path), requests)
    engine = make_engine(path, page_size=16, num_pages=24)
    os.setuid(65534)
    with pytest.raises(PermissionError):
        os.listdir(folder)
    engine.keep_below("model", host=None, disk=DiskStore(folder, 1 << 20, "model"))
    assert same(want, run(engine, requests))
    assert engine.tiers.stats.not_written > 0
    engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="has to become another user")
def test_a_folder_without_rights_is_a_miss(tiny):
    with TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent, "kv")
        first = engine_with(tiny("llama"), folder)
        run(first, requests_for(long_prompts(3)))
        first.close()
        before = sorted(folder.iterdir())
        command = [sys.executable, "-c", WITHOUT_RIGHTS, str(tiny("llama")), str(folder)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        assert child.returncode == 0, child.stderr
        assert child.stderr.count("cannot be written: Permission denied") == 1
        assert sorted(folder.iterdir()) == before


def test_what_cannot_be_read_is_said_once(tiny, tmp_path, caplog):
    first = engine_with(tiny("llama"), tmp_path)
    run(first, requests_for(long_prompts(3)))
    first.close()
    for path in tmp_path.iterdir():
        flip(path)
    engine = engine_with(tiny("llama"), tmp_path)
    with caplog.at_level(logging.WARNING, "onestem"):
        run(engine, requests_for(long_prompts(3)))
    engine.close()
    assert engine.tiers.stats.damaged > 1
    [line] = [record.getMessage() for record in caplog.records]
    assert f"in {tmp_path} cannot be read: it is computed" in line


def test_what_others_remove_is_not_said_to_be_damaged(tiny, tmp_path, monkeypatch, caplog):
    """As a store over the same folder does that makes room."""
    first = engine_with(tiny("llama"), tmp_path)
    answers = run(first, requests_for(long_prompts(3)))
    first.close()
    engine = engine_with(tiny("llama"), tmp_path)
    disk = engine.tiers.stores.disk
    monkeypatch.setattr(disk, "read", lambda name, kv: disk.discard(name))
    with caplog.at_level(logging.WARNING, "onestem"):
        assert same(answers, run(engine, requests_for(long_prompts(3))))
    engine.close()
    assert (engine.tiers.stats.damaged, caplog.records) == (0, [])


def test_room_is_made_before_a_file_is_written(tmp_path):
    """A bound as large as the disk is would be none else."""
    store, totals = DiskStore(tmp_path, 5000, "model"), []

    def look():
        totals.append(sum(size for _, size, _ in store.files()))
        return True

    store.others = lambda *_: look
    for i in range(9):
        kv, tokens = torch.full((4, 64), float(i)), torch.arange(4, dtype=torch.int32)
        assert store.put(f"{i:032x}", kv, tokens)
        assert store.read(f"{i:032x}", torch.empty(4, 64))
    assert 3000 < max(totals) <= 5000


def test_the_bound_holds_while_two_write(tiny, tmp_path):
    """Two engines' threads over one folder, which is looked at all the while. One may make room
    before it sees what the other one begins to write."""
    sizes, ended = [], threading.Event()
    stores = [DiskStore(tmp_path, 600_000, "model") for _ in range(2)]

    def look():
        while not ended.is_set():
            sizes.append(sum(size for _, size, _ in stores[0].files()))

    looking = threading.Thread(target=look)
    looking.start()
    engines = [engine_with(tiny("llama"), tmp_path, host=0, disk=600_000) for _ in range(2)]
    answering = [
        threading.Thread(target=lambda one=one, i=i: [
            run(one, [request]) for request in requests_for(long_prompts(8, head=1 + i))
        ])
        for i, one in enumerate(engines)
    ]  # fmt: skip
    for thread in answering:
        thread.start()
    for thread in answering:
        thread.join()
    for engine in engines:
        engine.close()
    ended.set()
    looking.join()
    written = sum(engine.tiers.stats.saved_tokens for engine in engines)
    assert written * engines[0].tiers.stores.bytes_per_token > 600_000
    most = max(size for _, size, _ in stores[0].files())
    assert 300_000 < max(sizes) <= 600_000 + most
    assert sum(size for _, size, _ in stores[0].files()) <= 600_000


def test_engines_without_tiers_run_nothing_of_theirs(tiny):
    """Not a function of theirs is called, whatever the step has to do."""
    engine, called = make_engine(tiny("llama"), page_size=16, num_pages=24), set()

    def note(frame, event, _):
        if event == "call":
            called.add(Path(frame.f_code.co_filename).as_posix())

    sys.setprofile(note)
    try:
        for prompt in long_prompts(6, head=1):
            run(engine, requests_for([prompt], max_tokens=9))
    finally:
        sys.setprofile(None)
    assert any(path.endswith("engine/schedule/chunks.py") for path in called)
    theirs = ("engine/tiers/", "cache/host.py", "cache/storage.py", "cache/pieces.py")
    assert not [path for path in called if any(one in path for one in theirs)]
