"""Heartbeats: workers announce themselves through a Redis that gateways and workers share.

    worker ── every beat_s ──►  kvrelay:workers {id: signed beat}  ◄── every beat_s ── gateways, and other workers

A beat names an address that prompts and the cluster secret are sent to, so it is signed with that secret; unsigned
content of Redis is ignored. A worker is alive while its beats continue, by the reader's own clock. While Redis is
unavailable, the known workers stay.
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
MAX_SILENCE_SHARE = 0.25  # of lost_after_s: the most silence that one update counts
MAX_AGE_S = 300.0  # tolerated clock difference between hosts; an older beat is a replay


class Heartbeat(BaseModel):
    """`at` is the time of sending, in Unix seconds. A later beat of the same worker replaces an earlier one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    tier: str
    url: HttpUrl
    epoch: str
    at: float

    def signed(self, secret: str) -> str:
        return json.dumps({"beat": self.model_dump(), "signature": _signature(self, secret)})

    @classmethod
    def parse(cls, raw: str | bytes, secret: str) -> Heartbeat | None:
        """Return None if it is malformed, or not signed with this secret."""
        try:
            content: dict[str, Any] = json.loads(raw)
            beat, signature = cls.model_validate(content["beat"]), str(content["signature"]).encode()
        except (ValueError, KeyError, TypeError, RecursionError):  # foreign content must not hide other beats
            return None
        return beat if hmac.compare_digest(signature, _signature(beat, secret).encode()) else None

    @property
    def is_stale(self) -> bool:
        """Whether the beat is too old to count."""
        return abs(time.time() - self.at) >= MAX_AGE_S


def _signature(beat: Heartbeat, secret: str) -> str:
    content = json.dumps(beat.model_dump(), sort_keys=True, separators=(",", ":"))
    return hmac.new(secret.encode(), f"heartbeat|{content}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _Record:
    beat: Heartbeat
    silent_s: float = 0.0


class LiveWorkers:
    """Tracks which workers are alive. After a pause in the updates, each worker has a few of them to reappear."""

    def __init__(self, lost_after_s: float):
        self._lost_after_s = lost_after_s
        self._updated_at: float | None = None
        self._records: dict[str, _Record] = {}

    def update(self, beats: Iterable[Heartbeat], now: float) -> Mapping[str, Heartbeat]:
        """Return the last beat of each live worker, by id, given the board's current beats. `now` is a monotonic clock
        in seconds."""
        max_s = MAX_SILENCE_SHARE * self._lost_after_s
        passed_s = 0.0 if self._updated_at is None else min(now - self._updated_at, max_s)
        self._updated_at = now
        records = {name: _Record(one.beat, one.silent_s + passed_s) for name, one in self._records.items()}
        on_board = {beat.worker: beat for beat in beats}
        for name, beat in on_board.items():
            if name not in records or beat.at > records[name].beat.at:
                records[name] = _Record(beat)
        live = {name: one.beat for name, one in sorted(records.items()) if one.silent_s < self._lost_after_s}
        # Remember a lost worker while its last beat is on the board: otherwise it would count as new.
        self._records = {name: one for name, one in records.items() if name in live or name in on_board}
        return live


class Board:
    """The heartbeats in one Redis. Raises `RedisError`."""

    def __init__(self, url: str, secret: str, timeout_s: float = TIMEOUT_S):
        self._redis = Redis.from_pool(connection_pool(url, timeout_s))
        self._secret = secret

    async def put(self, beat: Heartbeat) -> None:
        await self._redis.hset(KEY, beat.worker, beat.signed(self._secret))

    async def remove(self, worker: str) -> None:
        await self._redis.hdel(KEY, worker)

    async def read(self) -> list[Heartbeat]:
        """Return the valid beats. Deletes stale ones, so that the board does not grow forever."""
        raw = await self._redis.hgetall(KEY)
        beats = {name: beat for name, signed in raw.items() if (beat := Heartbeat.parse(signed, self._secret))}
        stale = [name for name, beat in beats.items() if beat.is_stale]
        if stale:
            await self._redis.hdel(KEY, *stale)
        return [beat for name, beat in beats.items() if name not in stale]

    async def aclose(self) -> None:
        await self._redis.aclose()
