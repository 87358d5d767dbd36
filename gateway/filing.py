"""`Filing`: all that outlives a request, in one place: prefixes, clients' caches, and counts."""

from __future__ import annotations

from dataclasses import dataclass

from gateway import registry
from gateway.client_caches import ClientCaches
from gateway.metrics import Metrics
from gateway.prefixes import Prefixes
from gateway.quotas import Quotas
from gateway.registry import Registry
from gateway.settings import RegistrySettings


@dataclass(frozen=True)
class Filing:
    """In this process, or in the one Redis that `url`, password included, leads to."""

    settings: RegistrySettings
    url: str
    registry: Registry
    prefixes: Prefixes
    caches: ClientCaches
    quotas: Quotas

    @classmethod
    def at(cls, settings: RegistrySettings, metrics: Metrics) -> Filing:
        """Raises `SettingsError` for a password's file that cannot be used."""
        url = settings.full_url  # before it is connected to: a later one is seen as a change
        filed = registry.connect(settings, metrics.registry_op)
        return cls(settings, url, filed, Prefixes(filed, metrics), ClientCaches(filed), Quotas(filed.redis))

    def is_at(self, settings: RegistrySettings) -> bool:
        """Whether they lead to the same place: not with another password, though it stand in the same file. Raises
        `SettingsError`."""
        return settings == self.settings and settings.full_url == self.url

    async def aclose(self) -> None:
        await self.quotas.aclose()
        await self.registry.aclose()
