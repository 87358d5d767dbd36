"""Transports by name: how a worker reads another worker's pool. A transport's module is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from workers.api.errors import TransferFailed
from workers.api.schemas import PoolExport, Site
from workers.pool.arena import host_id, process_id

if TYPE_CHECKING:
    from workers.transports.base import Transport

# Fastest first.
TRANSPORTS = {
    "inproc": "workers.transports.inproc:InprocTransport",
    "cuda_ipc": "workers.transports.cuda_ipc:CudaIpcTransport",
    "shm": "workers.transports.shm:ShmTransport",
    "tcp": "workers.transports.tcp:TcpTransport",
}


def load_transport(kind: str, secret: str = "") -> Transport:
    """Create the transport of that name with the cluster's secret. Raises `TransferFailed` for an unknown name."""
    return transport_class(kind).create(secret)


def transport_class(kind: str) -> type[Transport]:
    """Import the class of a transport. Raises `TransferFailed` for an unknown name."""
    if kind not in TRANSPORTS:
        raise TransferFailed(f"unknown transport {kind!r}; known: {', '.join(TRANSPORTS)}")
    module, name = TRANSPORTS[kind].split(":")
    cls: type[Transport] = getattr(import_module(module), name)
    return cls


def choose(exports: Sequence[PoolExport], site: Site) -> list[PoolExport]:
    """Return the exports of a pool that a worker at `site` can open, fastest first. Raises `TransferFailed` if there is
    none."""
    order = list(TRANSPORTS)
    known = [export for export in exports if export.kind in order and export.kind in site.transports]
    reachable = [export for export in known if transport_class(export.kind).reaches(export, site)]
    if not reachable:
        raise TransferFailed(
            f"no common transport: the source offers {', '.join(map(_describe, exports)) or 'none'}; "
            f"this worker supports {', '.join(site.transports) or 'none'} on host {site.host or 'unknown'}"
        )
    return sorted(reachable, key=lambda export: order.index(export.kind))


def _describe(export: PoolExport) -> str:
    """Describe an export in a message, without a long memory handle."""
    host = export.address.get("host")
    return f"{export.kind} on host {host}" if host else export.kind


def site_here(*, cuda: bool) -> Site:
    """Describe what this process can open: memory of its host, memory of its GPUs if `cuda`, and streams."""
    gpus = []
    if cuda:
        import torch

        from workers.pool.cuda import CudaRuntime

        runtime = CudaRuntime()
        gpus = [runtime.pci_bus_id(device) for device in range(torch.cuda.device_count())]
    return Site(
        transports=[kind for kind in TRANSPORTS if cuda or kind != "cuda_ipc"],
        host=host_id(),
        process=process_id(),
        gpus=gpus,
    )
