"""`Direct`: the calls that are made for every answer, past the router.

The router's matching, dependency solving and stacks of cleanups cost more than the gateway's own work on a request.
The routes stay in it all the same: they describe the API, and other methods of their paths are refused there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.replies import on_error
from workers.api.errors import KvrelayError

Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """POSTs to the given paths, answered by their endpoints; all else by `app`."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Endpoint]):
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except KvrelayError as error:
            response = await on_error(request, error)
        await response(scope, receive, send)
