"""A client that hangs up stops the work that is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from workers.api.tasks import cancel_and_wait
from workers.routes.replies import ClientGone

R = TypeVar("R")


async def until_hang_up(work: Coroutine[Any, Any, R], receive: Receive, on_gone: Callable[[], object]) -> R:
    """The result of `work`, unless the client goes first, or `work` itself finds that it is gone: then `on_gone` hears
    of it, `work` is cancelled, has ended, and `ClientGone` is raised. The request's body must have been received."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    except ClientGone:
        on_gone()
        raise
    finally:
        await cancel_and_wait(working)
        await cancel_and_wait(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
