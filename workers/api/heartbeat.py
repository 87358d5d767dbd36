"""Workers that tell by themselves that they are there: heartbeats, through a Redis that gateways and workers share.

    worker ── every beat_s ──►  kvrelay:workers {id: signed beat}  ◄── every beat_s ── gateways, and other workers

A beat names an address to which prompts and the cluster secret will go, so it is signed with that secret: what a Redis
says counts for nothing without. A worker lives as long as its beats go on, by the reader's own clock; a Redis that is
gone says nothing, and whoever lived goes on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import Redis

from workers.api.addresses import HttpUrl
from workers.api.redis import connection_pool

KEY = "kvrelay:workers"  # a Redis hash, by worker
TIMEOUT_S = 1.0
COUNTED_SHARE = 0.25  # of the time after which a worker is lost: no look counts for more silence than that
MAX_AGE_S = 300.0  # between the clocks of two hosts; an older beat was kept by somebody


class Heartbeat(BaseModel):
    """`at` is when it was sent, in Unix seconds; a later one of the same worker replaces it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    tier: str
    url: HttpUrl
    epoch: str
    at: float

    def signed(self, secret: str) -> str:
        return json.dumps({"beat": self.model_dump(), "signature": _signature(self, secret)})

    @classmethod
    def read(cls, raw: str | bytes, secret: str) -> Heartbeat | None:
        """None for one that is none, or is signed by somebody else."""
        try:
            content: dict[str, Any] = json.loads(raw)
            beat, signature = cls.model_validate(content["beat"]), str(content["signature"]).encode()
        except (ValueError, KeyError, TypeError, RecursionError):  # a stranger's, which must not hide the others
            return None
        is_ours = hmac.compare_digest(signature, _signature(beat, secret).encode())
        return beat if is_ours else None

    @property
    def is_of_long_ago(self) -> bool:
        """Such a one counts for nothing."""
        return abs(time.time() - self.at) >= MAX_AGE_S


def _signature(beat: Heartbeat, secret: str) -> str:
    content = json.dumps(beat.model_dump(), sort_keys=True, separators=(",", ":"))
    return hmac.new(secret.encode(), f"heartbeat|{content}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _Seen:
    beat: Heartbeat
    silent_s: float = 0.0


class Living:
    """Whose beats go on. After a time in which nobody could look, all have some looks to be heard again."""

    def __init__(self, lost_after_s: float):
        self._lost_after_s = lost_after_s
        self._looked_at: float | None = None
        self._seen: dict[str, _Seen] = {}

    def update(self, beats: Iterable[Heartbeat], now: float) -> Mapping[str, Heartbeat]:
        """Those that live, by id, after a look at the board. `now` is any clock in seconds that never goes back."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, COUNTED_SHARE * self._lost_after_s)
        self._looked_at = now
        seen = {name: _Seen(one.beat, one.silent_s + passed_s) for name, one in self._seen.items()}
        shown = {beat.worker: beat for beat in beats}
        for name, beat in shown.items():
            if name not in seen or beat.at > seen[name].beat.at:
                seen[name] = _Seen(beat)
        living = {name: one.beat for name, one in sorted(seen.items()) if one.silent_s < self._lost_after_s}
        # A lost one is known for as long as its last beat is shown, which would be taken for a new one else.
        self._seen = {name: one for name, one in seen.items() if name in living or name in shown}
        return living


class Board:
    """The beats in one Redis. Raises `RedisError`."""

    def __init__(self, url: str, secret: str, timeout_s: float = TIMEOUT_S):
        self._redis = Redis.from_pool(connection_pool(url, timeout_s))
        self._secret = secret

    async def put(self, beat: Heartbeat) -> None:
        await self._redis.hset(KEY, beat.worker, beat.signed(self._secret))

    async def remove(self, worker: str) -> None:
        await self._redis.hdel(KEY, worker)

    async def read(self) -> list[Heartbeat]:
        """Those that count. What a worker left there long ago is taken off: the board does not grow for ever."""
        raw = await self._redis.hgetall(KEY)
        ours = {name: beat for name, signed in raw.items() if (beat := Heartbeat.read(signed, self._secret))}
        old = [name for name, beat in ours.items() if beat.is_of_long_ago]
        if old:
            await self._redis.hdel(KEY, *old)
        return [beat for name, beat in ours.items() if name not in old]

    async def aclose(self) -> None:
        await self._redis.aclose()
