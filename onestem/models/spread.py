"""Work on tensors over several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from onestem.threads import usable_cores

T = TypeVar("T")


def spread(visit: Callable[[T], None], items: Iterable[T]) -> None:
    """Call `visit` with each of the items, from several threads, none of which shares its work with
    others of PyTorch."""
    inference, threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def turn(item: T) -> None:
        with torch.inference_mode(inference):  # a thread does not have its caller's mode
            visit(item)

    held = list(items)
    if len(held) == 1:
        turn(held[0])
        return
    torch.set_num_threads(1)  # of threads that begin now
    try:
        with ThreadPoolExecutor(usable_cores()) as pool:
            for _ in pool.map(turn, held):
                pass
    finally:
        torch.set_num_threads(threads)
