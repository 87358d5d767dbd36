"""Reloading the configuration, when its file changes or the process gets a SIGHUP.

The folder is watched, not the file: editors and ConfigMaps replace the file. A reload happens only if the content
differs from what was read last, so other changes in the folder cause none, and one during the start is not missed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from watchfiles import Change, awatch

from gateway.settings import Settings
from gateway.snapshot import Gateway
from workers.api.config import SettingsError
from workers.api.errors import KvrelayError
from workers.api.tasks import cancel_and_wait

DEBOUNCE_MS = 200  # a file written in pieces is read once
POLL_MS = 2000  # the file is also polled: some file systems do not report every change
REWATCH_S = 2.0  # after a watch that failed
CONFIG_MAP = "..data"  # the link that Kubernetes swaps beside the files of a mounted ConfigMap

log = structlog.get_logger()


@dataclass
class ConfigSource:
    """The configuration file, and how to make settings from it. Create it before the first read.

    `secrets` returns the secrets, by key, that a running process cannot replace. They are read again with the settings,
    so that a rotated one is rejected rather than ignored. Setting `requested` reloads even an unchanged file.
    """

    path: Path
    make: Callable[[], Settings]
    secrets: Callable[[Settings], Mapping[str, str]] = lambda settings: {}
    requested: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_digest: str | None = None  # of the content read last, or of an older one
    _first_secrets: Mapping[str, str] | None = None

    def read(self) -> Settings:
        """Raises `SettingsError`. If the file changes during the read, `has_changed` is true afterwards."""
        self.last_digest = self.digest()
        settings = self.make()
        secrets = self.secrets(settings)
        self._first_secrets = self._first_secrets or secrets
        for key, secret in secrets.items():
            if secret != self._first_secrets.get(key):
                raise SettingsError(f"{key}: it and its secret cannot be changed while the gateway runs; restart it")
        return settings

    @property
    def has_changed(self) -> bool:
        return self.digest() not in (None, self.last_digest)

    def digest(self) -> str | None:
        """Return the content's SHA-256; None while the file is being replaced."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError:
            return None


@asynccontextmanager
async def reloading(gateway: Gateway, source: ConfigSource | None) -> AsyncIterator[None]:
    """Within the block, reload when the file changes or `source.requested` is set."""
    tasks = [asyncio.create_task(follow(gateway, source)) for follow in (_on_change, _on_request)] if source else []
    try:
        yield
    finally:
        for task in tasks:
            await cancel_and_wait(task)


async def reload(gateway: Gateway, source: ConfigSource) -> str | None:
    """Reload once. Return the problem if the settings are unusable; it is also logged and counted, and nothing changes.

    Reading runs in a thread: a long file takes seconds, and must not delay requests.
    """
    try:
        async with source.lock:  # keeps an older read from being applied last
            await gateway.reload(await asyncio.to_thread(source.read))
    except KvrelayError as error:
        gateway.metrics.config_reload.labels("rejected").inc()
        log.error("config_rejected", error=error.message, generation=gateway.current.generation)
        return error.message
    except Exception as error:  # a bug must not end the watch
        gateway.metrics.config_reload.labels("failed").inc()
        log.error("config_failed", error=repr(error), generation=gateway.current.generation)
        return "reading it failed; see the log"
    gateway.metrics.config_reload.labels("ok").inc()
    log.info("config_reloaded", generation=gateway.current.generation)
    return None


async def _on_change(gateway: Gateway, source: ConfigSource) -> None:
    while True:
        try:
            await _watch(gateway, source)
        except Exception as error:  # the user's watches are used up, or the folder is missing
            gateway.metrics.config_reload.labels("failed").inc()
            log.error("config_watch_failed", error=repr(error), generation=gateway.current.generation)
        await asyncio.sleep(REWATCH_S)


async def _watch(gateway: Gateway, source: ConfigSource) -> None:
    names = (source.path.name, CONFIG_MAP)

    def is_relevant(change: Change, path: str) -> bool:
        return Path(path).name in names  # not, for example, a log in the same folder

    async for _ in awatch(
        source.path.parent,
        watch_filter=is_relevant,
        debounce=DEBOUNCE_MS,
        rust_timeout=POLL_MS,
        yield_on_timeout=True,
        recursive=False,
    ):
        if source.has_changed:
            await reload(gateway, source)


async def _on_request(gateway: Gateway, source: ConfigSource) -> None:
    while True:
        await source.requested.wait()
        source.requested.clear()
        await reload(gateway, source)
