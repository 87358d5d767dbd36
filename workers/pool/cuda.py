"""`CudaArena`: blocks in a GPU's memory, which another process opens by a CUDA IPC handle.

The blocks have an allocation of their own (`cudaMalloc` of the CUDA runtime). A handle opens a whole allocation, so one
from PyTorch's caching allocator would also share its neighbours. Generations are in a host file (`Segment` without
blocks): owner and readers access them without a kernel launch, and its lock shows readers that the owner lives.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from workers.api.errors import KvrelayError
from workers.api.schemas import KVLayout, PoolExport
from workers.pool.arena import Arena, host_id
from workers.pool.blocks import block_bytes, block_shape, torch_dtype
from workers.pool.segment import SHM, Header, Segment

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class CudaError(KvrelayError):
    """A call to the CUDA runtime failed."""

    code = "cuda_error"


class _IpcHandle(ctypes.Structure):
    _fields_: ClassVar = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class CudaRuntime:
    """The calls of `libcudart` that PyTorch does not offer. Device addresses are plain integers."""

    def __init__(self) -> None:
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise CudaError("PyTorch finds no CUDA device; use a pool of kind shm")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._lib = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def malloc(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return _address(pointer)

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def ipc_handle(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        pointer, structure = ctypes.c_void_p(), _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), structure, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _address(pointer)

    def ipc_close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def pci_bus_id(self, device: int) -> str:
        name = ctypes.create_string_buffer(32)
        self._call("cudaDeviceGetPCIBusId", name, ctypes.c_int(len(name)), ctypes.c_int(device))
        return name.value.decode()

    def device_at(self, pci_bus_id: str) -> int:
        """Return this process's number of a GPU. It depends on CUDA_VISIBLE_DEVICES."""
        device = ctypes.c_int()
        self._call("cudaDeviceGetByPCIBusId", ctypes.byref(device), ctypes.c_char_p(pci_bus_id.encode()))
        return device.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            self._lib.cudaGetLastError()  # cleared, or a later call would report this failure
            raise CudaError(f"{name} failed: {self._lib.cudaGetErrorString(status).decode()} ({status})")


class _DeviceMemory:
    """Device memory in a form that PyTorch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def device_tensor(address: int, num_blocks: int, layout: KVLayout, device: int) -> Tensor:
    """Return the blocks at `address` as a tensor. The memory must outlive the tensor."""
    raw = torch.as_tensor(_DeviceMemory(address, num_blocks * block_bytes(layout)), device=f"cuda:{device}")
    return raw.view(torch_dtype(layout.dtype)).view(num_blocks, *block_shape(layout))


class CudaArena(Arena):
    """Blocks on a CUDA device, the current one if `device` has no number.

    All work on them goes to the device's default stream, which keeps it in order: a block is not cleared before earlier
    copies out of it.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        epoch: str,
        worker: str,
        directory: Path = SHM,
        device: str = "cuda",
    ):
        self._address: int | None = None
        self._runtime = CudaRuntime()
        index = torch.device(device).index
        self._device = torch.cuda.current_device() if index is None else index
        self._host = host_id(directory)
        self._segment = Segment.create(worker, Header(num_blocks, 0, epoch), directory)
        try:
            with torch.cuda.device(self._device):
                self._address = self._runtime.malloc(num_blocks * block_bytes(layout))
            data = device_tensor(self._address, num_blocks, layout, self._device)
            super().__init__(layout, data, self._segment.generations, epoch)
            data.zero_()
            self.synchronize()
        except BaseException:
            self._give_back()
            raise

    def export(self) -> PoolExport:
        assert self._address is not None, "a closed pool issues no tickets"
        address: dict[str, str | int] = {
            "name": self._segment.name,
            "host": self._host,
            "handle": self._runtime.ipc_handle(self._address).hex(),
            "gpu": self._runtime.pci_bus_id(self._device),
        }
        return PoolExport(kind=self.kind, address=address, num_blocks=self.num_blocks, epoch=self.epoch)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        if self._address is None:
            return
        torch.cuda.synchronize(self._device)
        self._drop_references()
        self._give_back()

    def _give_back(self) -> None:
        self._segment.close()
        if self._address is not None:
            self._runtime.free(self._address)
            self._address = None


def _address(pointer: ctypes.c_void_p) -> int:
    assert pointer.value is not None, "a successful call returns an address"
    return pointer.value
