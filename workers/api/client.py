"""`WorkerClient`: a worker's API as methods. Raises only the errors of `workers.api.errors`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

import httpx
import orjson
from pydantic import BaseModel, ValidationError

from workers.api import logs
from workers.api.errors import DeadlineExceeded, InvalidRequest, KvrelayError, WorkerUnavailable, from_reply
from workers.api.http_client import (
    ConnectFailed,
    HttpClient,
    HttpClientError,
    HttpResponse,
    HttpxClient,
    InvalidPath,
    ReadTimeout,
    SocketClient,
)
from workers.api.schemas import (
    SECRET_HEADER,
    BundleInfo,
    CacheInfo,
    ChatRequest,
    CompletionRequest,
    LeaseRequest,
    PrefillReply,
    PrefillRequest,
    Prompt,
    Reply,
    Ticket,
    TokenizeReply,
    TransferReply,
    TransferRequest,
    WorkerInfo,
)

R = TypeVar("R", bound=Reply)

CONNECT_TIMEOUT_S = 2.0
DATA, DONE = b"data: ", b"data: [DONE]"
MAX_EVENT_BYTES = 16 * 2**20  # far more than all tokens of an answer take with their log-probabilities

Chunk = dict[str, Any]
Fields = Mapping[str, Any]  # the fields of a request as plain JSON; top-level nulls are left out


class WorkerClient:
    """Calls one worker.

    `timeout_s` bounds the wait for a response's head, then for its whole body, and each gap in a stream. A worker that
    accepts no connection within `CONNECT_TIMEOUT_S` is `WorkerUnavailable`, however much time is left. `transport`
    replaces the sockets, for example by an ASGI application. `fast` selects `SocketClient` in place of httpx.
    """

    def __init__(self, url: str, secret: str, *, transport: httpx.AsyncBaseTransport | None = None, fast: bool = False):
        self.url = url
        headers = {SECRET_HEADER: secret}
        self._http: HttpClient = (
            SocketClient(url, headers) if fast and transport is None else HttpxClient(url, headers, transport)
        )

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def info(self, *, timeout_s: float = 5.0) -> WorkerInfo:
        return _parse(WorkerInfo, await self._call("GET", "/v1/info", None, timeout_s))

    async def ready(self, *, timeout_s: float = 2.0) -> bool:
        try:
            await self._call("GET", "/readyz", None, timeout_s)
        except Exception:
            return False
        return True

    async def prefill(self, request: PrefillRequest, *, timeout_s: float) -> PrefillReply:
        return _parse(PrefillReply, await self._call("POST", "/v1/prefix/prefill", request, timeout_s))

    async def transfer(self, request: TransferRequest, *, timeout_s: float) -> TransferReply:
        return _parse(TransferReply, await self._call("POST", "/v1/cache/transfer", request, timeout_s))

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket:
        return _parse(Ticket, await self._call("POST", f"/v1/cache/{cache_id}/lease", request, timeout_s))

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
        await self._call("DELETE", f"/v1/cache/{cache_id}/lease/{lease_id}", None, timeout_s)

    async def cache(self, cache_id: str, *, timeout_s: float = 2.0) -> CacheInfo:
        return _parse(CacheInfo, await self._call("GET", f"/v1/cache/{cache_id}", None, timeout_s))

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None:
        await self._call("DELETE", f"/v1/cache/{cache_id}", None, timeout_s)

    async def resume_bundle(self, bundle_id: str, *, timeout_s: float = 5.0) -> BundleInfo:
        """Use a bundle again that was switched off in service. Raises `BundleUnusable` if it cannot be used."""
        return _parse(BundleInfo, await self._call("POST", f"/v1/bundles/{bundle_id}/resume", None, timeout_s))

    async def tokenize(self, prompt: Prompt, *, timeout_s: float = 5.0) -> TokenizeReply:
        return _parse(TokenizeReply, await self._call("POST", "/v1/tokenize", prompt, timeout_s))

    async def chat(self, request: ChatRequest, *, timeout_s: float) -> dict[str, Any]:
        """The OpenAI chat completion, with `KVUsage` under `kv_transfer_params`."""
        reply = await self._call("POST", "/v1/chat/completions", request, timeout_s)
        if not isinstance(reply, dict):
            raise WorkerUnavailable("the worker did not return a chat completion")
        return reply

    def completion_stream(self, request: CompletionRequest | Fields, *, timeout_s: float) -> Chunks:
        """The chunks of a streamed text completion, as in `chat_stream`."""
        return Chunks(self, "/v1/completions", request, timeout_s)

    def chat_stream(self, request: ChatRequest | Fields, *, timeout_s: float) -> Chunks:
        """The chunks of a streamed chat completion; the last one holds `KVUsage` as `kv_transfer_params`."""
        return Chunks(self, "/v1/chat/completions", request, timeout_s)

    async def _call(self, method: str, path: str, request: BaseModel | None, timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left to call {path}")
        try:
            async with self.open(method, path, request, timeout_s) as response:
                reply = _json(await response.read_all(timeout_s))
        except HttpClientError as error:
            raise self.translated(error, path, timeout_s) from error
        if response.status >= 400:
            raise from_reply(response.status, reply, response.retry_after)
        return reply

    def open(
        self, method: str, path: str, request: BaseModel | Fields | None, timeout_s: float
    ) -> AbstractAsyncContextManager[HttpResponse]:
        """Send a request when the block begins. Raises `HttpClientError`, in the block too."""
        return self._http.stream(
            method,
            path,
            b"" if request is None else _encode(request),
            timeout_s=timeout_s,
            connect_timeout_s=min(timeout_s, CONNECT_TIMEOUT_S),
            headers=logs.trace_headers(),
        )

    def translated(self, error: HttpClientError, path: str, timeout_s: float) -> KvrelayError:
        """The contract's error for one of the HTTP client."""
        if isinstance(error, InvalidPath):
            return InvalidRequest(f"{self.url}{path} is not a URL")
        if isinstance(error, ReadTimeout):
            return DeadlineExceeded(f"worker at {self.url} sent nothing on {path} for {timeout_s:.3f} s")
        if isinstance(error, ConnectFailed):
            return WorkerUnavailable(f"worker at {self.url} is not reachable: {error}")
        return WorkerUnavailable(f"the connection to the worker at {self.url} broke: {error}")


class Chunks:
    """The chunks of a streamed answer, in groups as they arrive.

    The call is made by the first read. Close it in any case: before the end, closing stops the worker. An error event
    is raised. A stream that ends without `[DONE]` raises `WorkerUnavailable`: a truncated answer never passes as whole.
    """

    def __init__(self, client: WorkerClient, path: str, request: BaseModel | Fields, timeout_s: float):
        self.has_ended = False
        self._client = client
        self._path = path
        self._request = request
        self._timeout_s = timeout_s
        self._events = EventParser()
        self._exchange: AbstractAsyncContextManager[HttpResponse] | None = None
        self._response: HttpResponse | None = None

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        try:
            while chunks := await self.read():
                yield chunks
        finally:
            await self.aclose()

    async def read(self, timeout_s: float | None = None) -> list[Chunk]:
        """Return the next chunks; none at the end. Raises `DeadlineExceeded` if nothing arrives within `timeout_s`, by
        default the call's own."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        chunks: list[Chunk] = []
        try:
            response = self._response or await self._open(timeout_s)
            while not self.has_ended and (not chunks or self._events.is_done):
                if self._events.error is not None:
                    raise self._events.error
                # Read past [DONE] too: the worker would take an earlier close for a client that hung up.
                data = await response.read(None if deadline is None else deadline - time.monotonic())
                self.has_ended = not data
                chunks += self._events.feed(data)
        except HttpClientError as error:
            if not self._events.is_done:
                waited_s = self._timeout_s if timeout_s is None else timeout_s
                raise self._client.translated(error, self._path, waited_s) from error
            self.has_ended = True
        if self.has_ended and not self._events.is_done:
            raise WorkerUnavailable(f"worker at {self._client.url} ended its stream without [DONE]")
        return chunks

    async def aclose(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.__aexit__(None, None, None)

    async def _open(self, timeout_s: float | None) -> HttpResponse:
        timeout_s = self._timeout_s if timeout_s is None else max(0.0, timeout_s)
        exchange = self._client.open("POST", self._path, self._request, timeout_s)
        response = self._response = await exchange.__aenter__()
        self._exchange = exchange
        if response.status != 200:
            raise from_reply(response.status, _json(await response.read_all(timeout_s)), response.retry_after)
        return response


class EventParser:
    """Parses server-sent events into chunks as data arrives. Whatever follows `[DONE]` is ignored."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: KvrelayError | None = None  # sent in place of a chunk; ends the stream
        self._rest = b""

    def feed(self, data: bytes) -> list[Chunk]:
        """Return the chunks that are complete now, up to an error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        chunks: list[Chunk] = []
        if len(self._rest) > MAX_EVENT_BYTES:
            self.error = WorkerUnavailable(f"the worker sent an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if self.is_done or not line.startswith(DATA):
                continue
            if line.rstrip() == DONE:
                self.is_done = True
                continue
            chunk = _json(line[len(DATA) :])
            if not isinstance(chunk, dict):
                self.error = WorkerUnavailable("the worker sent an event that is not a JSON object")
            elif "error" in chunk:
                self.error = from_reply(500, chunk)
            else:
                chunks.append(chunk)
                continue
            break
        return chunks


def _parse(kind: type[R], data: Any) -> R:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise WorkerUnavailable(f"the worker did not return a {kind.__name__}") from error


def _encode(request: BaseModel | Fields) -> bytes:
    if isinstance(request, BaseModel):
        return request.model_dump_json(exclude_none=True).encode()
    return orjson.dumps({key: value for key, value in request.items() if value is not None})


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return None
