"""Where this process stands: what it shares memory with."""

from __future__ import annotations

from workers.api.schemas import Site
from workers.pool.arena import host_id, process_id
from workers.transports import TRANSPORTS


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
