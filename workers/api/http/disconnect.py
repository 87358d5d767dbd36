"""A client that hangs up cancels the work that is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from workers.api.http.errors import ClientDisconnected

T = TypeVar("T")

CANCEL_AGAIN_S = 20.0  # a library may mistake a cancellation for the end of a timeout of its own, and swallow it


class DisconnectWatch:
    """Listens for the client's disconnect; create it once the body has been read, and close it.

    watch = DisconnectWatch(receive, on_disconnect)
    with watch.guard():
        answer = await work()      # cancelled on a disconnect; the block then raises ClientDisconnected
    watch.close()
    """

    def __init__(self, receive: Receive, on_disconnect: Callable[[], object]):
        self._on_disconnect = on_disconnect
        self._guarded: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self._timer: asyncio.TimerHandle | None = None
        self._listener = asyncio.create_task(_disconnected(receive))
        self._listener.add_done_callback(self._cancel_guarded)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A block that runs in the caller's task. Calls `on_disconnect` and raises `ClientDisconnected` once the client
        has hung up and the block has cleaned up; any other cancellation passes through."""
        if self._has_disconnected:
            self._on_disconnect()
            raise ClientDisconnected("the client hung up")
        self._guarded = task = asyncio.current_task()
        assert task is not None
        was_cancelled = False
        try:
            yield
        except asyncio.CancelledError:
            if not self._num_cancels:
                raise
            was_cancelled = True
        finally:
            self._guarded = None
            if self._timer is not None:
                self._timer.cancel()
            num_left, num_cancels, self._num_cancels = 0, self._num_cancels, 0
            for _ in range(num_cancels):
                num_left = task.uncancel()
        if was_cancelled and num_left:
            raise asyncio.CancelledError  # cancelled from elsewhere as well
        if num_cancels:
            self._on_disconnect()
            raise ClientDisconnected("the client hung up")

    def close(self) -> None:
        self._listener.cancel()

    @property
    def _has_disconnected(self) -> bool:
        return self._listener.done() and not self._listener.cancelled()

    def _cancel_guarded(self, listener: asyncio.Task[None]) -> None:
        if listener.cancelled():
            return
        listener.exception()  # retrieved; whatever it is, nothing more is heard of the client
        self._cancel()

    def _cancel(self) -> None:
        if self._guarded is not None:
            self._num_cancels += 1
            self._guarded.cancel()
            self._timer = asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel)


async def until_disconnect(work: Coroutine[Any, Any, T], receive: Receive, on_disconnect: Callable[[], object]) -> T:
    """The result of `work`. Raises `ClientDisconnected`, with `work` cancelled, once the client hangs up."""
    watch = DisconnectWatch(receive, on_disconnect)
    try:
        with watch.guard():
            return await work
    finally:
        watch.close()
        work.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
