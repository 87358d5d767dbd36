"""`HttpxWire`: calls carried by an httpx transport, such as one to an ASGI application in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import httpx

from workers.api.wire import Answer, BadPath, BrokenOff, Silent, Unreachable, Wire


class HttpxWire(Wire):
    def __init__(self, url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport):
        told = {"content-type": "application/json", **headers}
        self._http = httpx.AsyncClient(base_url=url, headers=told, transport=transport, trust_env=False)

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        connect_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Answer]:
        timeout = httpx.Timeout(timeout_s, connect=connect_s)
        with translated():
            call = self._http.stream(method, path, content=body, headers=headers, timeout=timeout)
            async with AsyncExitStack() as opened:
                async with asyncio.timeout(timeout_s):  # which a transport need not do
                    reply = await opened.enter_async_context(call)
                yield HttpxAnswer(reply)

    async def aclose(self) -> None:
        with translated():
            await self._http.aclose()


class HttpxAnswer(Answer):
    def __init__(self, reply: httpx.Response):
        self.status = reply.status_code
        self.retry_after = reply.headers.get("retry-after")
        self._pieces = reply.aiter_bytes()

    async def read(self, within_s: float | None = None) -> bytes:
        with translated():
            async with asyncio.timeout(within_s):
                return await anext(self._pieces, b"")


@contextmanager
def translated() -> Iterator[None]:
    """httpx's errors, as those of a wire."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise BadPath(str(error)) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(repr(error)) from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise Silent(repr(error)) from error
    except httpx.HTTPError as error:
        raise BrokenOff(repr(error)) from error
