"""What is there when a server or a run begins is left alone until it ends; freed memory is used
again."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

import pytest

from onestem.garbage import OLD_PASSES, PASSES, collecting_less


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_used_again():
    """The third round of blocks touches no new page, unless the user has set it otherwise."""
    assert page_faults("leave") > 1000
    assert page_faults("keep") < 100
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="1000000") > 1000
