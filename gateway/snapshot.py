"""What one request sees of the gateway, from its beginning to its end; and how one such view follows another.

    Gateway.current ──► Snapshot 1 ◄── requests that began with it
          │ reload: validated whole, built beside the old one, swapped by one assignment
          └───────────► Snapshot 2 ◄── requests that began since

What only the old one needs (workers, a registry) is closed when its last request has ended. What both need (a worker
that is configured as before, with its circuit, epoch and rates) is one and the same object in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
import structlog

from gateway.errors import SettingsError
from gateway.metrics import Metrics
from gateway.request.lookup import ClientCaches, Prefixes
from gateway.request.route import Parts
from gateway.settings import RegistrySettings, Settings, WorkerSettings, read_secret
from gateway.state import registry
from gateway.state.quotas import Quotas
from gateway.state.registry import Registry
from gateway.state.tenants import AdminKey, Tenants
from gateway.state.usage import Usage
from gateway.upstream.fleet import Fleet
from gateway.upstream.limits import TenantShares
from gateway.upstream.worker import Worker
from workers.api.tasks import cancel_and_wait

log = structlog.get_logger()

STOP_S = 2.0  # at the end no request is left, and so nothing to wait for
FIXED = ("server", "secret_file", "tracing", "discovery")  # what a running process cannot change


@dataclass(frozen=True)
class Filing:
    """All that outlives a request: prefixes, clients' caches, and counts.

    Kept in this process, or in the Redis at `url` (password included).
    """

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


class Snapshot:
    def __init__(
        self,
        generation: int,
        settings: Settings,
        parts: Parts,
        filing: Filing,
        tenants: Tenants,
        admin_key: AdminKey | None,
    ):
        self.generation = generation
        self.settings = settings
        self.parts = parts
        self.filing = filing
        self.tenants = tenants
        self.admin_key = admin_key
        self._num_held = 0
        self._unheld = asyncio.Event()
        self._unheld.set()

    def __enter__(self) -> Snapshot:
        """Held, for as long as a request sees it."""
        self._num_held += 1
        self._unheld.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._num_held -= 1
        if not self._num_held:
            self._unheld.set()

    async def unheld(self) -> None:
        """Waits until no request sees it. Nobody new may come to hold it meanwhile."""
        await self._unheld.wait()


class Gateway:
    """What the application sees, as `app.state.gateway`: the current snapshot, and whether the end has begun."""

    def __init__(self, settings: Settings, secret: str, transports: Mapping[str, httpx.AsyncBaseTransport]):
        """Raises `SettingsError` for an address that others can reach while no tenant has an API key."""
        settings.check_bind()
        self.metrics = Metrics()
        self.usage = Usage()
        self.is_draining = False
        self._secret = secret
        self._transports = transports
        self._watch: asyncio.Task[None] | None = None
        self._retiring: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()
        self._configured = settings
        self._found: dict[str, WorkerSettings] = {}
        self._drained: set[str] = set()  # by id, as a worker may leave and come back
        self.current = self._built(settings, None)
        self.parts.fleet.export_circuits()
        self.metrics.config_generation.set(1)

    @property
    def settings(self) -> Settings:
        return self.current.settings

    @property
    def parts(self) -> Parts:
        return self.current.parts

    async def start(self) -> None:
        """Looks at every worker, and keeps an eye on them from now on."""
        await self.parts.fleet.check_health()
        self._watch = asyncio.create_task(self.parts.fleet.watch())

    async def stop(self) -> None:
        if self._watch is not None:
            await cancel_and_wait(self._watch)
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=STOP_S)
        await self.current.filing.aclose()
        await self.parts.fleet.aclose()

    async def reload(self, settings: Settings) -> None:
        """Every request from now on sees these settings. Raises `SettingsError` for what needs a restart, or is not
        safe; then all stays as it is."""
        async with self._reloading:
            await self._change_to(settings, self._found, self._built)

    async def found(self, workers: Mapping[str, WorkerSettings]) -> None:
        """Every request from now on sees these workers, and those that are configured."""
        async with self._reloading:
            if workers != self._found:
                await self._change_to(self._configured, dict(workers), self._with_other_workers)
                log.info("workers_found", workers=sorted(workers))

    def drain(self, worker: Worker, is_drained: bool) -> None:
        """As an operator wants it, until told otherwise: over reloads, and however often the worker comes and goes."""
        (self._drained.add if is_drained else self._drained.discard)(worker.id)
        worker.is_drained = is_drained

    async def _change_to(
        self,
        configured: Settings,
        found: dict[str, WorkerSettings],
        built: Callable[[Settings, Snapshot], Snapshot],
    ) -> None:
        before = self.current
        settings = configured.model_copy(update={"workers": found | configured.workers})
        settings.check_bind()
        for name in FIXED:
            if getattr(settings, name) != getattr(before.settings, name):
                raise SettingsError(f"{name}: a running gateway cannot change it; restart for that")
        after = built(settings, before)
        try:
            await after.parts.fleet.check_health(only_new=True)
        except BaseException:
            await _closed(after, before)
            raise
        for worker in after.parts.fleet.workers:
            worker.is_drained = worker.id in self._drained
        self.current, self._configured, self._found = after, configured, found
        after.parts.fleet.export_circuits()
        self.metrics.config_generation.set(after.generation)
        self._watch, watch = asyncio.create_task(after.parts.fleet.watch()), self._watch
        if watch is not None:
            await cancel_and_wait(watch)
        self._retire(before, after)

    def _with_other_workers(self, settings: Settings, before: Snapshot) -> Snapshot:
        """No password or key is read anew: workers come and go whether or not that could be."""
        return self._with(settings, before, before.filing, before.admin_key)

    def _built(self, settings: Settings, before: Snapshot | None) -> Snapshot:
        admin_key = _admin_key(settings)
        return self._with(settings, before, self._filing(settings, before), admin_key)

    def _with(
        self, settings: Settings, before: Snapshot | None, filing: Filing, admin_key: AdminKey | None
    ) -> Snapshot:
        tenants, old = Tenants(settings, self._secret), before.parts if before else None
        fleet = Fleet(settings, self._secret, self.metrics, self._transports, old.fleet if old else None)
        if old is not None and settings.limits == old.settings.limits:
            shares = old.shares
        else:
            shares = TenantShares(settings.limits.max_concurrency_per_tenant)
        prefixes, caches, quotas = filing.prefixes, filing.caches, filing.quotas
        policy = settings.chosen_policy
        parts = Parts(settings, fleet, prefixes, caches, policy, self.metrics, shares, quotas, self.usage)
        return Snapshot(before.generation + 1 if before else 1, settings, parts, filing, tenants, admin_key)

    def _filing(self, settings: Settings, before: Snapshot | None) -> Filing:
        if before is not None and before.filing.is_at(settings.registry):
            return before.filing
        return Filing.at(settings.registry, self.metrics)

    def _retire(self, before: Snapshot, after: Snapshot) -> None:
        earlier = [task for task in self._retiring if not task.done()]
        self._retiring = [*earlier, asyncio.create_task(self._retired(before, after, earlier))]

    async def _retired(self, before: Snapshot, after: Snapshot, earlier: list[asyncio.Task[None]]) -> None:
        """Closes what the later snapshot does not share, once nobody sees the earlier ones any more."""
        if earlier:
            await asyncio.wait(earlier)
        await before.unheld()
        await _closed(before, after)
        for worker_id in set(before.settings.workers) - set(self.current.settings.workers):
            self.metrics.forget_worker(worker_id)


def _admin_key(settings: Settings) -> AdminKey | None:
    path = settings.admin.key_file
    return AdminKey(read_secret(path, "admin.key_file"), settings) if path is not None else None


async def _closed(one: Snapshot, but: Snapshot) -> None:
    """Closes what only the one has, and the other has not."""
    if one.filing is not but.filing:
        await one.filing.aclose()
    await one.parts.fleet.aclose(keep=but.parts.fleet)
