"""Registries by URL scheme; each one's module is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable

from gateway.registry.base import Entry, Registry
from gateway.settings import MEMORY, RegistrySettings
from workers.api.addresses import scheme_of
from workers.api.redis_url import REDIS_SCHEMES

__all__ = ["Entry", "Registry", "connect"]


def connect(settings: RegistrySettings, on_op: Callable[[str, str], None]) -> Registry:
    """The registry that `settings.url` names. Connects lazily: a Redis that is down does not stop the start."""
    return _MAKERS[scheme_of(settings.url)](settings, on_op)


def _memory(settings: RegistrySettings, on_op: Callable[[str, str], None]) -> Registry:
    from gateway.registry.memory import MemoryRegistry

    return MemoryRegistry(settings.max_entries, on_op=on_op)


def _redis(settings: RegistrySettings, on_op: Callable[[str, str], None]) -> Registry:
    from gateway.registry.guarded import GuardedRedis
    from gateway.registry.redis import RedisRegistry

    return RedisRegistry(GuardedRedis(settings.full_url, timeout_s=settings.timeout_ms / 1000, on_op=on_op))


_MAKERS = {MEMORY: _memory} | dict.fromkeys(REDIS_SCHEMES, _redis)
