"""Damaged headers of a GGUF file.

    python -m onestem_lab.gguf_fuzz [--count 10000] [--seed 0]

In the root of a clone: a tiny model with a vocabulary is written, and read again with something in
its header that is other than it was. What is no error of ours ends the run, as does more memory
than the file has and 64 MiB.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

from tests.models.test_models_gguf_errors import fuzz, write_whole
from tests.models.tiny import make_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        whole = write_whole(make_tiny("llama", place / "llama"), place / "whole.gguf")
        refused = fuzz(whole, place, options.count, options.seed)
    seconds = time.perf_counter() - started
    print(f"{options.count} headers, {refused} refused in one line, {seconds:.0f} s")


if __name__ == "__main__":
    main()
