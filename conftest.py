"""One thread: tiny models gain nothing from more, and barriers between threads cost milliseconds
on a machine that does something else as well.

Without a GPU, Triton's kernels run under its interpreter, which must be chosen before anything
imports Triton.
"""

from __future__ import annotations

import gc
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from onestem.garbage import collecting_less

# A shell's background jobs ignore Ctrl-C from their start, and what they start does too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example is held to a time: on a busy machine any of them takes longer.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# What is imported and collected stays: passes over it take a sixth of the time until tests run.
gc.disable()

# What one process compiles, the next ones read: tests start some hundred.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each client of HTTP reads the certificates of all authorities, which takes longer than most tests.
ssl.create_default_context = cache(ssl.create_default_context)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def collecting_seldom() -> Iterator[None]:
    """What is imported stays: `LLM.close`, which collects garbage, need not look through it, and no
    call counts it, which takes longer than most calls."""
    with collecting_less():
        yield
        gc.collect()


torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with suppress(ImportError):  # where Triton has no build there is nothing to interpret
        from tests.interpreted import hasten

        hasten()
