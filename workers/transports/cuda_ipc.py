"""Between processes on one GPU host: the source's allocation, opened by its CUDA IPC handle; generations are read from
its host file. The copy is synchronised before the second check of the generations."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from workers.api.errors import TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Site
from workers.pool.cuda import CudaRuntime, device_tensor
from workers.pool.segment import SHM, Segment
from workers.transports.base import MemoryReader, Reader, Transport, check_header, check_layout, text_at
from workers.transports.shm import attach


class CudaIpcReader(MemoryReader):
    """Holds one opened handle. `close` closes it, or the source's memory would stay allocated after its death."""

    def __init__(
        self, export: PoolExport, layout: KVLayout, segment: Segment, runtime: CudaRuntime, address: int, device: int
    ):
        data = device_tensor(address, export.num_blocks, layout, device)
        super().__init__(export, layout, data, segment.generations)
        self._segment, self._runtime, self._address = segment, runtime, address

    def _owner_alive(self) -> bool:
        return self._segment.owner_alive()

    def _unmap(self) -> None:
        super()._unmap()
        self._generations = self._generations.copy()
        self._segment.close()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._runtime.ipc_close(self._address)

    def _synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class CudaIpcTransport(Transport):
    kind = "cuda_ipc"

    def __init__(self, directory: Path = SHM):
        self._directory = directory
        self._runtime = CudaRuntime()

    @staticmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        return export.address.get("host") == site.host and export.address.get("gpu") in site.gpus

    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        check_layout(layout)
        segment = attach(export, self._directory)
        try:
            check_header(segment.header, export, layout, blocks_inside=False)
            return self._open_handle(export, layout, segment)
        except BaseException:
            segment.close()
            raise

    def _open_handle(self, export: PoolExport, layout: KVLayout, segment: Segment) -> Reader:
        device = self._runtime.device_at(text_at(export, "gpu"))
        with torch.cuda.device(device):
            address = self._runtime.ipc_open(_handle(export))
            try:
                return CudaIpcReader(export, layout, segment, self._runtime, address, device)
            except BaseException:
                self._runtime.ipc_close(address)
                raise


def _handle(export: PoolExport) -> bytes:
    text = text_at(export, "handle")
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b""
    if len(handle) != 64:
        raise TransferFailed(f"a CUDA IPC handle must be 128 hex digits; got {text!r}")
    return handle
