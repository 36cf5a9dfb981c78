"""What is there when a server, a run or a call begins is left alone until it ends; freed memory is
used again, or leaves a server's process."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onestem import LLM, SamplingParams
from onestem.garbage import OLD_PASSES, PASSES, TrimPace, collecting_less
from onestem.scores import ScoreTree
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(autouse=True, scope="module")
def collecting_seldom():
    """Not here."""


def test_what_is_there_is_left_alone_until_the_end():
    before = gc.get_threshold()
    with collecting_less(clean=True):
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > before[0]
        assert gc.isenabled()  # cycles that requests leave behind go, only later
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_the_last_of_overlapping_blocks_brings_the_settings_back():
    before = gc.get_threshold()
    one, other = collecting_less(), collecting_less()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() != before
    other.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_what_the_user_froze_or_stopped_stays_so():
    before = gc.get_threshold()
    try:
        gc.freeze()
        gc.set_threshold(0)
        with collecting_less():
            assert gc.get_threshold()[0] == 0
        assert gc.get_freeze_count() > 1000
        gc.set_threshold(100_000, 1, 1)
        with collecting_less():
            assert gc.get_threshold() == (100_000, PASSES, OLD_PASSES)
        assert gc.get_threshold() == (100_000, 1, 1)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_a_call_collects_nothing_that_was_there_before(tmp_path, monkeypatch):
    path = make_tiny("llama", tmp_path / "llama")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    llm = LLM(path, dtype="float32", kv_memory="8MiB", device="cpu")
    before, settings, passes = gc.get_threshold(), [], []
    planned = []

    def noted(function):
        def call(*args):
            planned.append(gc.get_freeze_count() > 1000)
            return function(*args)

        return call

    monkeypatch.setattr(llm, "plan", noted(llm.plan))
    monkeypatch.setattr("onestem.llm.ScoreTree", noted(ScoreTree))
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5)
    for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True)):
        settings.append(gc.get_freeze_count() > 1000)
    assert settings == [True] * 3
    planned.clear()
    gc.set_threshold(20, 2, 2)
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
    try:
        llm.generate([[1, 2, 3, i] for i in range(64)], params, use_tqdm=False)
        llm.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
        llm.score([[1, 2, 3, i] for i in range(64)], [[[4], [5]]] * 64)
        assert gc.get_threshold() == (20, 2, 2)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
    assert 2 not in passes
    assert planned == [True] * 3  # before anything is computed
    assert gc.get_freeze_count() == 0


BLOCKS = """
import resource, sys
import numpy as np
from onestem.garbage import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(3 << 20) for _ in range(6)]  # 24 MiB each
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(what: str, **environment: str) -> int:
    command = [sys.executable, "-c", BLOCKS, what]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    return int(done.stdout)


needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)


@needs_glibc
def test_freed_memory_is_used_again():
    """The third round of blocks touches no new page, unless the user has set it otherwise."""
    assert page_faults("leave") > 1000
    assert page_faults("keep") < 100
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="1000000") > 1000


HOLES = """
import ctypes, os, sys, threading
from onestem.garbage import give_freed_memory_back
from onestem.threads import resident_bytes

if sys.argv[1] == "give":
    give_freed_memory_back()
done = threading.Barrier(5)

def answer():
    bodies = [(b"x" * (6 << 20), b"y" * 1000) for _ in range(6)]
    kept = [small for _, small in bodies]
    del bodies
    done.wait()
    done.wait()

large = b"x" * (24 << 20)
del large
before = resident_bytes(os.getpid())
threads = [threading.Thread(target=answer) for _ in range(4)]
for thread in threads:
    thread.start()
done.wait()
grown = resident_bytes(os.getpid()) - before
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
done.wait()
print(grown, open(sys.argv[2]).read().count("<heap "))
"""


def holes(what: str, path: Path, **environment: str) -> tuple[int, int]:
    """Bytes that are left of what four threads have freed, and how many heaps there are."""
    command = [sys.executable, "-c", HOLES, what, str(path)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    grown, heaps = map(int, done.stdout.split())
    return grown, heaps


@needs_glibc
def test_a_servers_freed_memory_is_given_back(tmp_path):
    """Of 144 MiB that threads have freed between small blocks that stay, nothing is left. What the
    user has set stays."""
    grown, heaps = holes("leave", tmp_path / "heaps")
    assert grown > 64 << 20
    assert heaps > 4
    grown, heaps = holes("give", tmp_path / "heaps")
    assert grown < 16 << 20
    assert heaps == 3
    grown, heaps = holes("give", tmp_path / "heaps", MALLOC_ARENA_MAX="1")
    assert grown < 16 << 20
    assert heaps == 1


PITTED = """
import os
from onestem.garbage import give_freed_memory_back, give_holes_back
from onestem.threads import resident_bytes

give_freed_memory_back()
before = resident_bytes(os.getpid())
bodies = [(b"x" * (100 << 10), bytes(1000)) for _ in range(1500)]
kept = [small for _, small in bodies]
del bodies
grown = resident_bytes(os.getpid()) - before
give_holes_back()
print(grown, resident_bytes(os.getpid()) - before)
"""


@needs_glibc
def test_holes_between_blocks_are_given_back():
    """150 MiB of bodies, freed between small blocks that stay."""
    done = subprocess.run([sys.executable, "-c", PITTED], capture_output=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 100 << 20
    assert left < 16 << 20


def test_memory_that_was_in_use_is_given_back_later():
    pace = TrimPace(500 << 20)
    assert not pace.is_due(560 << 20)
    assert pace.is_due(1000 << 20)  # a large answer is being written
    pace.note(900 << 20)
    waits = []
    for _ in range(5):  # it does not grow: what is there may be free by now
        looks = 1
        while not pace.is_due(900 << 20):
            looks += 1
        waits.append(looks)
        pace.note(900 << 20)
    assert waits == [2, 4, 8, 12, 12]
    assert [pace.is_due(held << 20) for held in (963, 964)] == [False, True]
    pace.note(900 << 20)
    assert [pace.is_due(held << 20) for held in (800, 863, 864)] == [False, False, True]
    pace.note(520 << 20)
    assert [pace.is_due(held << 20) for held in (563, 564)] == [False, True]
