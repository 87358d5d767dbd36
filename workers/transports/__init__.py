"""How one worker reads another's pool. Transports by name; a transport's module is imported when it is first used.

Where this process stands: what it shares memory with."""

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
    """The transport of that name. `secret` is the cluster's. Raises `TransferFailed` for one that does not exist."""
    return transport_class(kind).create(secret)


def transport_class(kind: str) -> type[Transport]:
    """Errors as `load_transport`."""
    if kind not in TRANSPORTS:
        raise TransferFailed(f"unknown transport {kind!r}; known: {', '.join(TRANSPORTS)}")
    module, name = TRANSPORTS[kind].split(":")
    cls: type[Transport] = getattr(import_module(module), name)
    return cls


def choose(exports: Sequence[PoolExport], site: Site) -> list[PoolExport]:
    """The ways to a pool that a worker at `site` can go, fastest first. Raises `TransferFailed` if there is none."""
    order = list(TRANSPORTS)
    known = [export for export in exports if export.kind in order and export.kind in site.transports]
    open_ways = [export for export in known if transport_class(export.kind).reaches(export, site)]
    if not open_ways:
        raise TransferFailed(
            f"no common transport: the source offers {', '.join(map(_told, exports)) or 'none'}; "
            f"this worker reads {', '.join(site.transports) or 'none'} on host {site.host or 'unknown'}"
        )
    return sorted(open_ways, key=lambda export: order.index(export.kind))


def _told(export: PoolExport) -> str:
    """A way, for messages: what it leads by is nobody's secret, but a memory handle is long."""
    host = export.address.get("host")
    return f"{export.kind} on host {host}" if host else export.kind


def site_here(*, cuda: bool) -> Site:
    """What this process can open: memory of its own host, that of its GPUs if it works on any, and streams."""
    return Site(
        transports=[kind for kind in TRANSPORTS if cuda or kind != "cuda_ipc"],
        host=host_id(),
        process=process_id(),
        gpus=_gpus() if cuda else [],
    )


def _gpus() -> list[str]:
    import torch

    from workers.pool.cuda import CudaRuntime

    runtime = CudaRuntime()
    return [runtime.pci_bus_id(device) for device in range(torch.cuda.device_count())]
