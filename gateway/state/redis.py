"""`SharedRedis`: the Redis that several gateways share, guarded so that a broken one costs a request almost nothing.

Each operation runs in a task of its own. The caller waits for it with a timeout but never cancels it: a cancelled
redis-py call can leave its reply on the connection for the next caller. The first failure opens the circuit. Operations
then return at once, while a background task pings Redis until it is back, so no request pays for the probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.settings import BreakerSettings
from gateway.upstream.breaker import Breaker, State
from workers.api.redis import connection_pool

T = TypeVar("T")

PROBE_S = 0.25
CIRCUIT = BreakerSettings(window=1, min_outcomes=1, failure_rate=1.0, open_s=1.0, num_probes=1, num_successes=2)


class SharedRedis:
    """One Redis for everything that a gateway shares. Calls on `client` and `pool` belong inside `run`.

    The outcome of each operation goes to `on_op(op, result)`; the results are ok, error, timeout and skipped.
    """

    def __init__(self, url: str, *, timeout_s: float, on_op: Callable[[str, str], None] = lambda op, result: None):
        self.pool = connection_pool(url, timeout_s)
        self.client = Redis.from_pool(self.pool)
        self.on_op = on_op
        self._timeout_s = timeout_s
        self._breaker = Breaker("redis", CIRCUIT)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._probing: asyncio.Task[None] | None = None

    @property
    def is_available(self) -> bool:
        """Whether the circuit is closed. A half-open circuit admits the probe only."""
        return self._breaker.state is State.CLOSED

    async def run(self, op: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the call's result; None if Redis failed, was late, or is known to be unavailable."""
        if not self.is_available:
            self.on_op(op, "skipped")
            return None

        async def start() -> T:
            return await call()

        task = asyncio.create_task(start())
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        await asyncio.wait({task}, timeout=self._timeout_s)
        if task.done() and task.exception() is None:
            self.on_op(op, "ok")
            return task.result()
        result = "error" if task.done() else "timeout"
        self.on_op(op, result)
        if self.is_available:
            self._breaker.begin().end(RedisError(result))
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return None

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it if the caller was cancelled

    async def _probe(self) -> None:
        """Ping until the circuit is closed again."""
        while not self.is_available:
            await asyncio.sleep(PROBE_S)
            if self._breaker.admits:
                attempt = self._breaker.begin()
                try:
                    await self.client.ping()
                except Exception as error:  # any: a probe that ends would leave the circuit open forever
                    attempt.end(error)
                else:
                    attempt.end(None)

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        await asyncio.gather(*self._tasks, self._probing or asyncio.sleep(0), return_exceptions=True)
        await self.client.aclose()
