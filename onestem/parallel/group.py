"""How ranks on one machine find each other: through a file that is in no folder."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import FileStore, ProcessGroup, ProcessGroupGloo

from onestem.models.ranks import Ranks
from onestem.parallel.mapped import MappedMemory

if TYPE_CHECKING:
    from onestem.ops.triton.peers import PeerMemory

log = logging.getLogger(__name__)

# All ranks are up when they join: only one that dies in that moment is waited for.
JOIN_SECONDS = 8
# A collective ends when the last rank comes to it, or a rank has died.
NEVER = timedelta(days=365)

_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _keep_groups() -> None:
    """A fork has the groups, and not their threads, which the end of one would wait for."""
    for group in _groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)


def meeting_place() -> str:
    """An empty file for `join`. Processes of this user can open it by that name as long as this one
    lives; then nothing is left of it."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('onestem-ranks')}"


def join(place: str, rank: int, size: int, device: torch.device) -> Ranks:
    """Meet the others, which call this too. The caller's own default group of torch.distributed, if
    there is one, is not touched.

    Raises:
        RuntimeError: one of them does not come.
    """
    store = FileStore(place, size)
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    group = ProcessGroup(store, rank, size)
    _groups.add(group)
    if device.type == "cuda":
        kind, backend = ProcessGroup.BackendType.NCCL, _nccl(store, rank, size)
    else:
        kind, backend = ProcessGroup.BackendType.GLOO, _gloo(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    peers = None
    if device.type == "cuda":
        # Communicators are made by the first call.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        peers = _peers(group, store, device)
        torch.cuda.synchronize(device)
    backend._set_default_timeout(NEVER)
    return Ranks(rank, size, group, peers)


def _peers(group: ProcessGroup, store: FileStore, device: torch.device) -> PeerMemory | None:
    """Memory of each GPU that all of them write to; None: one of them cannot."""
    found, rank, size = None, group.rank(), group.size()
    first = (device.index or 0) - rank
    others = [first + other for other in range(size) if other != rank]
    if all(torch.cuda.can_device_access_peer(first + rank, other) for other in others):
        try:
            found = _peer_memory(store, rank, size, device)
        except (ImportError, OSError, RuntimeError) as error:
            log.warning("collectives of GPUs go by NCCL alone, which is slower: %s", error)
    # What one of them does not have is used by none.
    absent = torch.tensor([found is None], dtype=torch.int32, device=device)
    group.allreduce([absent]).wait()
    return None if absent.item() else found


def _peer_memory(store: FileStore, rank: int, size: int, device: torch.device) -> PeerMemory:
    from onestem.ops.triton.peers import PeerMemory

    memory = MappedMemory(PeerMemory.num_bytes(size), device)
    store.set(f"memory of {rank}", memory.handle.hex())
    addresses = [
        memory.address
        if other == rank
        else memory.map(bytes.fromhex(store.get(f"memory of {other}").decode()))
        for other in range(size)
    ]
    return PeerMemory(addresses, rank, device, memory)


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
    # Its monitor would read the store for ever, which goes with one of the ranks.
    quiet = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
