"""When the configuration is read anew: its file changed, or the process got a SIGHUP.

The folder is watched, not the file: editors and ConfigMaps put another file in its place. What counts is whether the
content differs from what was read last, so that a change beside it is none, and one during the start is not missed.
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

from gateway.errors import SettingsError
from gateway.settings import Settings
from gateway.snapshot import Gateway
from workers.api.errors import KvrelayError
from workers.api.tasks import cancel_and_wait

DEBOUNCE_MS = 200  # a file that is written in pieces is read once
LOOK_MS = 2000  # so often the file is looked at in any case: not every change is told
REWATCH_S = 2.0  # after a watch that failed
CONFIG_MAP = "..data"  # the link that Kubernetes swaps beside the files of a mounted ConfigMap

log = structlog.get_logger()


@dataclass
class Source:
    """The file, and how settings are made of it; `asked` is set to read it whether or not it changed. Made before the
    settings are read for the first time. `secrets` are those in other files, by key, that a running process goes on
    with: read anew with the settings, so that nobody takes a rotated one for taken up."""

    path: Path
    make: Callable[[], Settings]
    secrets: Callable[[Settings], Mapping[str, str]] = lambda settings: {}
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # whose it is to read
    seen: str | None = None  # the digest of what was read last, or of something older
    _held: Mapping[str, str] | None = None  # the secrets as they were first

    def read(self) -> Settings:
        """Raises `SettingsError`. A change while it is read is seen as one later."""
        self.seen = self.digest()
        settings = self.make()
        secrets = self.secrets(settings)
        self._held = self._held or secrets
        for key, secret in secrets.items():
            if secret != self._held.get(key):
                told = f"{key}: a running gateway cannot change it, nor the secret that it leads to; restart for that"
                raise SettingsError(told)
        return settings

    @property
    def has_changed(self) -> bool:
        return self.digest() not in (None, self.seen)

    def digest(self) -> str | None:
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError:
            return None  # between two files: there will be another change


@asynccontextmanager
async def following(gateway: Gateway, source: Source | None) -> AsyncIterator[None]:
    """Within the block the gateway follows its file."""
    tasks = [asyncio.create_task(follow(gateway, source)) for follow in (_changes, _asked)] if source else []
    try:
        yield
    finally:
        for task in tasks:
            await cancel_and_wait(task)


async def reload(gateway: Gateway, source: Source) -> str | None:
    """What cannot be used is told (the problem is returned, too) and counted, and changes nothing. Reading a long file
    takes seconds, and holds up no request."""
    try:
        async with source.turn:  # else an older reading might be the last to be taken up
            await gateway.reload(await asyncio.to_thread(source.read))
    except KvrelayError as error:
        gateway.metrics.config_reload.labels("rejected").inc()
        log.error("config_rejected", error=error.message, generation=gateway.current.generation)
        return error.message
    except Exception as error:  # a bug in reading it must not end the watch
        gateway.metrics.config_reload.labels("failed").inc()
        log.error("config_failed", error=repr(error), generation=gateway.current.generation)
        return "reading it failed; the log knows more"
    gateway.metrics.config_reload.labels("ok").inc()
    log.info("config_reloaded", generation=gateway.current.generation)
    return None


async def _changes(gateway: Gateway, source: Source) -> None:
    while True:
        try:
            await _watch(gateway, source)
        except Exception as error:  # no watch left for this user, or no such folder (any more)
            gateway.metrics.config_reload.labels("failed").inc()
            log.error("config_watch_failed", error=repr(error), generation=gateway.current.generation)
        await asyncio.sleep(REWATCH_S)


async def _watch(gateway: Gateway, source: Source) -> None:
    names = (source.path.name, CONFIG_MAP)

    def concerns(change: Change, path: str) -> bool:
        return Path(path).name in names  # and not a log that is written in the same folder

    async for _ in awatch(
        source.path.parent,
        watch_filter=concerns,
        debounce=DEBOUNCE_MS,
        rust_timeout=LOOK_MS,
        yield_on_timeout=True,
        recursive=False,
    ):
        if source.has_changed:
            await reload(gateway, source)


async def _asked(gateway: Gateway, source: Source) -> None:
    while True:
        await source.asked.wait()
        source.asked.clear()
        await reload(gateway, source)
