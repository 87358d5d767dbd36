"""How hard a family is soaked, and the kvrelay.yaml of the stack that bears it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools import family
from tools.stack import free_ports

TENANTS = ("default", "ashwood", "birch")


@dataclass(frozen=True)
class Scale:
    """What a family's models can bear on two cores. `num_at_once` by each tenant; `request_s` is the deadline."""

    request_s: float = 120.0
    max_words: int = 400
    max_tokens: int = 12
    num_at_once: int = 1
    fault_every_s: float = 30.0
    longest_fault_s: float = 20.0
    num_small: int = 1
    threads: int = 2
    pool_bytes: int = 256 * 2**20
    transfer_floor_s: float = 0.0
    threshold: float = -0.8  # of confidence


SCALES: Mapping[str, Scale] = {
    "tiny": Scale(
        request_s=30.0,
        max_words=700,
        max_tokens=16,
        num_at_once=2,
        fault_every_s=10.0,
        longest_fault_s=6.0,
        num_small=2,
        threads=1,
        pool_bytes=16 * 2**20,  # so small that caches are evicted
        transfer_floor_s=5.0,
        threshold=-2.5,
    ),
}


def scale_of(name: str) -> Scale:
    return SCALES.get(name, Scale())


def key_of(tenant: str) -> str:
    """Its API key. The stack listens on loopback, and lives as long as the soak."""
    return f"soak-{tenant}"


def configuration(name: str, folders: Mapping[str, str], scale: Scale, *, redis_url: str | None) -> dict[str, Any]:
    """The contents of a kvrelay.yaml. Worker ids are unlike those of any other stack on this machine."""
    settings = family.configuration(name, dict(folders))
    small, large = settings["workers"].values()
    own = {
        "num_threads": scale.threads,
        "pool_bytes": scale.pool_bytes,
        "upgrade_idle_s": 1.0,
        "native_share": 0.9,
        "grace_s": 0.1,
    }
    smalls = {f"small-{number}": small | {"url": _url(port)} for number, port in _numbered(scale.num_small)}
    workers = {f"soak{os.getpid()}.{one}": worker | own for one, worker in (smalls | {"large-0": large}).items()}
    deadlines = {
        "request_s": scale.request_s,
        "decode_reserve_s": scale.request_s / 20,
        "transfer_floor_s": scale.transfer_floor_s,
        "shutdown_grace_s": 0.1,
    }
    tenants = {tenant: {"api_keys": [hashlib.sha256(key_of(tenant).encode()).hexdigest()]} for tenant in TENANTS}
    return settings | {
        "workers": workers,
        "tenants": tenants,
        "deadlines": deadlines,
        "policy": {"name": "confidence", "threshold": scale.threshold, "num_tokens": 4},
        "registry": {"url": redis_url or "memory://"},
    }


def _numbered(count: int) -> list[tuple[int, int]]:
    return list(enumerate(free_ports(count)))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
