"""The gateway as one request sees it, from start to end, and how one such snapshot replaces another.

    Gateway.current ──► Snapshot 1 ◄── requests that began with it
          │ reload: validated whole, built beside the old one, swapped by one assignment
          └───────────► Snapshot 2 ◄── requests that began since

Objects that both snapshots need are shared: a worker configured as before keeps its circuit, epoch and rates. Objects
that only the old snapshot needs are closed after its last request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
import structlog

from gateway.metrics import Metrics
from gateway.request.lookup import ClientCaches, Prefixes
from gateway.request.route import Parts
from gateway.settings import RegistrySettings, Settings, WorkerLocation
from gateway.state import registry
from gateway.state.quotas import Quotas
from gateway.state.registry import Registry
from gateway.state.tenants import AdminKey, Tenants
from gateway.state.usage import Usage
from gateway.upstream.fleet import Fleet
from gateway.upstream.limits import TenantShares
from gateway.upstream.worker import Worker
from workers.api.config import SettingsError, read_secret
from workers.api.tasks import cancel_and_wait

log = structlog.get_logger()

STOP_TIMEOUT_S = 2.0  # when the gateway stops, no request is left to wait for
RESTART_ONLY = ("server", "secret_file", "tracing", "discovery")  # settings that a running process cannot change


@dataclass(frozen=True)
class Stores:
    """The registry and the quotas, in this process or in the Redis at `url` (password included)."""

    settings: RegistrySettings
    url: str
    registry: Registry
    quotas: Quotas

    @classmethod
    def open(cls, settings: RegistrySettings, metrics: Metrics) -> Stores:
        """Raises `SettingsError` if the password file is unusable."""
        url = settings.full_url  # read before connecting: a password that changes meanwhile counts as a change
        opened = registry.connect(settings, metrics.registry_op)
        return cls(settings, url, opened, Quotas(opened.redis))

    def is_at(self, settings: RegistrySettings) -> bool:
        """Whether `settings` lead to the same stores with the same password. Raises `SettingsError`."""
        return settings == self.settings and settings.full_url == self.url

    async def aclose(self) -> None:
        await self.quotas.aclose()
        await self.registry.aclose()


class Snapshot:
    """Settings and everything built from them. A request holds it with `with`."""

    def __init__(
        self,
        generation: int,
        settings: Settings,
        parts: Parts,
        stores: Stores,
        tenants: Tenants,
        admin_key: AdminKey | None,
    ):
        self.generation = generation
        self.settings = settings
        self.parts = parts
        self.stores = stores
        self.tenants = tenants
        self.admin_key = admin_key
        self._num_holders = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    def __enter__(self) -> Snapshot:
        self._num_holders += 1
        self._is_free.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            self._is_free.set()

    async def wait_free(self) -> None:
        """Wait until no request holds the snapshot. Call it once no new request can."""
        await self._is_free.wait()

    async def aclose(self, keep: Snapshot) -> None:
        """Close what `keep` does not share."""
        if self.stores is not keep.stores:
            await self.stores.aclose()
        await self.parts.fleet.aclose(keep=keep.parts.fleet)


class Gateway:
    """The application's state: the current snapshot, and whether the gateway is draining."""

    def __init__(self, settings: Settings, secret: str, transports: Mapping[str, httpx.AsyncBaseTransport]):
        """Raises `SettingsError` for an unusable file, or a public address without API keys."""
        settings.check_bind()
        self.metrics = Metrics()
        self.usage = Usage()
        self.is_draining = False
        self._secret = secret
        self._transports = transports
        self._watch: asyncio.Task[None] | None = None
        self._retiring: list[asyncio.Task[None]] = []
        self._changing = asyncio.Lock()
        self._configured = settings
        self._discovered: dict[str, WorkerLocation] = {}
        self._drained_ids: set[str] = set()  # by id: a worker may leave and come back
        self.current = self._build(settings, None)
        self.parts.fleet.export_circuits()
        self.metrics.config_generation.set(1)

    @property
    def settings(self) -> Settings:
        return self.current.settings

    @property
    def parts(self) -> Parts:
        return self.current.parts

    async def start(self) -> None:
        """Check every worker once, then keep checking in the background."""
        await self.parts.fleet.check_health()
        self._watch = asyncio.create_task(self.parts.fleet.watch())

    async def stop(self) -> None:
        if self._watch is not None:
            await cancel_and_wait(self._watch)
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=STOP_TIMEOUT_S)
        await self.current.stores.aclose()
        await self.parts.fleet.aclose()

    async def reload(self, settings: Settings) -> None:
        """Use these settings for every request from now on.

        Raises `SettingsError`, and changes nothing, if they are unusable, unsafe or require a restart.
        """
        async with self._changing:
            await self._change_to(settings, self._discovered, self._build)

    async def set_discovered(self, workers: Mapping[str, WorkerLocation]) -> None:
        """Use these workers, and the configured ones, for every request from now on."""
        async with self._changing:
            if workers != self._discovered:
                await self._change_to(self._configured, dict(workers), self._build_with_same_secrets)
                log.info("workers_discovered", workers=sorted(workers))

    def drain(self, worker: Worker, is_drained: bool) -> None:
        """Drain a worker or take it back. Holds across reloads, and if the worker leaves and comes back."""
        (self._drained_ids.add if is_drained else self._drained_ids.discard)(worker.id)
        worker.is_drained = is_drained

    async def _change_to(
        self,
        configured: Settings,
        discovered: dict[str, WorkerLocation],
        build: Callable[[Settings, Snapshot], Snapshot],
    ) -> None:
        # 1. Validate
        before = self.current
        settings = configured.model_copy(update={"workers": discovered | configured.workers})
        settings.check_bind()
        for name in RESTART_ONLY:
            if getattr(settings, name) != getattr(before.settings, name):
                raise SettingsError(f"{name}: cannot be changed while the gateway runs; restart it")

        # 2. Build the new snapshot beside the old one
        after = build(settings, before)
        try:
            await after.parts.fleet.check_health(only_new=True)
        except BaseException:
            await after.aclose(keep=before)
            raise
        for worker in after.parts.fleet.workers:
            worker.is_drained = worker.id in self._drained_ids

        # 3. Swap, and close the old one after its last request
        self.current, self._configured, self._discovered = after, configured, discovered
        after.parts.fleet.export_circuits()
        self.metrics.config_generation.set(after.generation)
        self._watch, watch = asyncio.create_task(after.parts.fleet.watch()), self._watch
        if watch is not None:
            await cancel_and_wait(watch)
        earlier = [task for task in self._retiring if not task.done()]
        self._retiring = [*earlier, asyncio.create_task(self._retire(before, after, earlier))]

    def _build(self, settings: Settings, before: Snapshot | None) -> Snapshot:
        key_file = settings.admin.key_file
        admin_key = None if key_file is None else AdminKey(read_secret(key_file, "admin.key_file"), settings)
        if before is not None and before.stores.is_at(settings.registry):
            return self._assemble(settings, before, before.stores, admin_key)
        return self._assemble(settings, before, Stores.open(settings.registry, self.metrics), admin_key)

    def _build_with_same_secrets(self, settings: Settings, before: Snapshot) -> Snapshot:
        """Read no password or key again: workers come and go even while such a file is unreadable."""
        return self._assemble(settings, before, before.stores, before.admin_key)

    def _assemble(
        self, settings: Settings, before: Snapshot | None, stores: Stores, admin_key: AdminKey | None
    ) -> Snapshot:
        old = before.parts if before else None
        if old is not None and settings.limits == old.settings.limits:
            shares = old.shares
        else:
            shares = TenantShares(settings.limits.max_concurrency_per_tenant)
        tenants = Tenants(settings, self._secret)
        parts = Parts(
            settings=settings,
            fleet=Fleet(settings, self._secret, self.metrics, self._transports, old.fleet if old else None),
            prefixes=Prefixes(stores.registry, self.metrics),
            caches=ClientCaches(stores.registry),
            policy=settings.chosen_policy,
            metrics=self.metrics,
            shares=shares,
            quotas=stores.quotas,
            usage=self.usage,
        )
        return Snapshot(before.generation + 1 if before else 1, settings, parts, stores, tenants, admin_key)

    async def _retire(self, before: Snapshot, after: Snapshot, earlier: list[asyncio.Task[None]]) -> None:
        """Close what the later snapshot does not share, once no request holds this or an earlier one."""
        if earlier:
            await asyncio.wait(earlier)
        await before.wait_free()
        await before.aclose(keep=after)
        for worker_id in set(before.settings.workers) - set(self.current.settings.workers):
            self.metrics.forget_worker(worker_id)
