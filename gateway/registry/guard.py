"""`Guard`: calls to a Redis that may hang or be gone. Such a Redis costs one operation's time, once.

Every operation runs in a task of its own, which the caller waits for but never cancels: a cancelled redis-py call can
leave its answer on the connection for the next one to read. The first failure opens the circuit; from then on
operations return at once, and a background task looks whether Redis is back, so that no request pays for the probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from gateway.upstream.breaker import Breaker, BreakerSettings, State

T = TypeVar("T")
OnOp = Callable[[str, str], None]

PROBE_S = 0.25
CIRCUIT = BreakerSettings(window=1, min_outcomes=1, failure_rate=1.0, open_s=1.0, num_probes=1, num_successes=2)


class Guard:
    """`ping` is what the probe does; the outcome of every operation goes to `on_op(op, result)`."""

    def __init__(self, ping: Callable[[], Awaitable[object]], *, timeout_s: float, on_op: OnOp):
        self._ping = ping
        self._timeout_s = timeout_s
        self._on_op = on_op
        self._breaker = Breaker("redis", CIRCUIT)
        self._tasks: set[asyncio.Task[object]] = set()
        self._probing: asyncio.Task[None] | None = None

    async def bounded(self, op: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """The call's result; None where Redis failed, was late, or is not asked at all."""
        if not self._is_closed:
            self._on_op(op, "skipped")
            return None
        task = self._spawn(call)
        await asyncio.wait({task}, timeout=self._timeout_s)
        if task.done() and task.exception() is None:
            self._on_op(op, "ok")
            return task.result()
        self._failed(op, "error" if task.done() else "timeout")
        return None

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        await asyncio.gather(*self._tasks, self._probing or asyncio.sleep(0), return_exceptions=True)

    @property
    def _is_closed(self) -> bool:
        """Requests go through a closed circuit only; a half-open one is the probe's."""
        return self._breaker.state is State.CLOSED

    def _spawn(self, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        async def run() -> T:
            return await call()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that one whose caller went away is not reported as forgotten

    def _failed(self, op: str, result: str) -> None:
        self._on_op(op, result)
        if self._is_closed:
            self._breaker.attempt().end(RedisError(result))
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        """Pings until the circuit is closed again."""
        while not self._is_closed:
            await asyncio.sleep(PROBE_S)
            if self._breaker.admits:
                await self._try_once()

    async def _try_once(self) -> None:
        attempt = self._breaker.attempt()
        try:
            await self._ping()
        except Exception as error:  # whatever it is: a probe that ends would leave the circuit open for ever
            attempt.end(error)
        else:
            attempt.end(None)
