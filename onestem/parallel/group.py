"""How ranks on one machine find each other: through files in a folder that they alone may open."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroup, ProcessGroupGloo

from onestem.models.ranks import Ranks

__all__ = ["join"]

# All ranks are up when they join: only one that dies in that moment is waited for.
JOIN_SECONDS = 8
# A collective ends when the last rank comes to it, or a rank has died.
NEVER = timedelta(days=365)


def join(folder: Path, rank: int, size: int, device: torch.device) -> Ranks:
    """Meet the others, which call this too. The caller's own default group of torch.distributed, if
    there is one, is not touched.

    Raises:
        RuntimeError: one of them does not come.
    """
    store = FileStore(str(folder / "ranks"), size)
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    group = ProcessGroup(store, rank, size)
    if device.type == "cuda":
        kind, backend = ProcessGroup.BackendType.NCCL, _nccl(store, rank, size)
    else:
        kind, backend = ProcessGroup.BackendType.GLOO, _gloo(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    if device.type == "cuda":  # communicators are made by the first call
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize(device)
    backend._set_default_timeout(NEVER)
    return Ranks(rank, size, group)


# `Any`: torch's types lack members that both backends have.


def _gloo(store: FileStore, rank: int, size: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=JOIN_SECONDS)
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: FileStore, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only where torch was built with it

    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    return ProcessGroupNCCL(store, rank, size, options)
