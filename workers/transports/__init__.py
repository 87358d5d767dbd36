"""How one worker reads another's pool. Transports by name; a transport's module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from workers.api.errors import TransferFailed

if TYPE_CHECKING:
    from workers.transports.base import Transport

# Fastest first.
TRANSPORTS = {
    "inproc": "workers.transports.inproc:InprocTransport",
    "cuda_ipc": "workers.transports.cuda_ipc:CudaIpcTransport",
    "shm": "workers.transports.shm:ShmTransport",
}


def load_transport(kind: str) -> Transport:
    """The transport of that name. Raises `TransferFailed` for one that does not exist."""
    if kind not in TRANSPORTS:
        raise TransferFailed(f"unknown transport {kind!r}; known: {', '.join(TRANSPORTS)}")
    module, name = TRANSPORTS[kind].split(":")
    transport: Transport = getattr(import_module(module), name)()
    return transport


def readable_transports(*, cuda: bool) -> list[str]:
    """What a worker process can read: memory of its own host, and that of its GPUs if it has any."""
    return [kind for kind in TRANSPORTS if cuda or kind != "cuda_ipc"]


def choose(offered: Sequence[str], readable: Sequence[str]) -> str:
    """The fastest transport that the source offers and the target reads."""
    for kind in TRANSPORTS:
        if kind in offered and kind in readable:
            return kind
    raise TransferFailed(
        f"no common transport: the source offers {', '.join(offered) or 'none'}; "
        f"this worker reads {', '.join(readable) or 'none'}"
    )
