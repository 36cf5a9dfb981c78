"""GPU memory that other processes map too, by CUDA's driver: torch hands out none that it lets be
mapped without counting its users, which fails when one of them is killed."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_char, c_size_t, c_uint, c_ulonglong

import torch

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", c_char * 64),)


class MappedMemory:
    """Zeros on a GPU, and the same of other processes on this machine.

    Attributes:
        address: where it begins.
        handle: for `map` in another process.

    Raises:
        OSError: there is no driver.
        RuntimeError: the driver refuses.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device, self._mapped = device, list[int]()
        own = c_ulonglong()
        with torch.cuda.device(device):
            self._call("cuMemAlloc_v2", byref(own), c_size_t(num_bytes))
            self.address = own.value
            weakref.finalize(
                self, _free, self._driver, device, self.address, self._mapped
            ).atexit = False
            self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), c_size_t(num_bytes))
            torch.cuda.synchronize(device)
            handle = _Handle()
            self._call("cuIpcGetMemHandle", byref(handle), own)
        self.handle = bytes(handle)

    def map(self, handle: bytes) -> int:
        """Where the memory with this handle begins for this process and its GPU. It must live as
        long as this object. Raises `RuntimeError`: the driver refuses."""
        found = c_ulonglong()
        with torch.cuda.device(self._device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                byref(found),
                _Handle.from_buffer_copy(handle),
                c_uint(_PEER_ACCESS),
            )
        self._mapped.append(found.value)
        return found.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUDA's error {code}")


def _free(driver: ctypes.CDLL, device: torch.device, own: int, mapped: list[int]) -> None:
    with torch.cuda.device(device):
        for address in mapped:
            driver.cuIpcCloseMemHandle(c_ulonglong(address))
        driver.cuMemFree_v2(c_ulonglong(own))
