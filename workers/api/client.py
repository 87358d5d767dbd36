"""`WorkerClient`: a worker's calls as methods. Raises the errors of `workers.api.errors`, never a wire's."""

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
from workers.api.http_client import Answer, BadPath, HttpxWire, Silent, SocketWire, Unreachable, Wire, WireError
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
EVENT, DONE = b"data: ", b"data: [DONE]"
MAX_FRAME_BYTES = 16 * 2**20  # far more than all tokens of an answer take with their log-probabilities

Chunk = dict[str, Any]
Fields = Mapping[str, Any]  # of a request, as plain JSON; nulls at the top are left out


class WorkerClient:
    """Calls one worker. `timeout_s` bounds the wait for a reply's head, then for all of its body, and each gap in a
    stream; a worker that takes no connection within `CONNECT_TIMEOUT_S` is `WorkerUnavailable`, however much time is
    left. `transport` carries the calls in place of sockets."""

    def __init__(self, url: str, secret: str, *, transport: httpx.AsyncBaseTransport | None = None):
        self.url = url
        headers = {SECRET_HEADER: secret}
        self._wire: Wire = SocketWire(url, headers) if transport is None else HttpxWire(url, headers, transport)

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._wire.aclose()

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
        """Has a bundle used again that was switched off in service. Raises `BundleUnusable` where it cannot be."""
        return _parse(BundleInfo, await self._call("POST", f"/v1/bundles/{bundle_id}/resume", None, timeout_s))

    async def tokenize(self, prompt: Prompt, *, timeout_s: float = 5.0) -> TokenizeReply:
        return _parse(TokenizeReply, await self._call("POST", "/v1/tokenize", prompt, timeout_s))

    async def chat(self, request: ChatRequest, *, timeout_s: float) -> dict[str, Any]:
        """The OpenAI chat completion, with `KVUsage` under `kv_transfer_params`."""
        reply = await self._call("POST", "/v1/chat/completions", request, timeout_s)
        if not isinstance(reply, dict):
            raise WorkerUnavailable("worker answered with something that is not a chat completion")
        return reply

    def completion_stream(self, request: CompletionRequest | Fields, *, timeout_s: float) -> Chunks:
        """The chunks of a streamed text completion; else as `chat_stream`."""
        return Chunks(self, "/v1/completions", request, timeout_s)

    def chat_stream(self, request: ChatRequest | Fields, *, timeout_s: float) -> Chunks:
        """The chunks of a streamed chat completion; `KVUsage` stands in the last one's `kv_transfer_params`."""
        return Chunks(self, "/v1/chat/completions", request, timeout_s)

    async def _call(self, method: str, path: str, request: BaseModel | None, timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left to call {path}")
        try:
            async with self.asked(method, path, request, timeout_s) as answer:
                reply = _json(await answer.whole(timeout_s))
        except WireError as error:
            raise self.failed(error, path, timeout_s) from error
        if answer.status >= 400:
            raise from_reply(answer.status, reply, answer.retry_after)
        return reply

    def asked(
        self, method: str, path: str, request: BaseModel | Fields | None, timeout_s: float
    ) -> AbstractAsyncContextManager[Answer]:
        """A call, made where the block begins. Raises `WireError`, in the block too."""
        body = b"" if request is None else _written(request)
        connect_s, told = min(timeout_s, CONNECT_TIMEOUT_S), logs.trace_headers()
        return self._wire.ask(method, path, body, timeout_s=timeout_s, connect_s=connect_s, headers=told)

    def failed(self, error: WireError, path: str, timeout_s: float) -> KvrelayError:
        """What a wire's error means."""
        if isinstance(error, BadPath):
            return InvalidRequest(f"{self.url}{path} is not a URL")
        if isinstance(error, Silent):
            return DeadlineExceeded(f"worker at {self.url} sent nothing on {path} for {timeout_s:.3f} s")
        if isinstance(error, Unreachable):
            return WorkerUnavailable(f"worker at {self.url} is not reachable: {error}")
        return WorkerUnavailable(f"worker at {self.url} broke off: {error}")


class Chunks:
    """The chunks of an answer under way, as many at a time as came together. The call is made when they are first asked
    for. Who asks closes: before the end that hangs up, which stops the worker.

    An error frame is raised. A stream that ends without `[DONE]` raises `WorkerUnavailable`: a cut answer is never
    taken for a whole one.
    """

    def __init__(self, client: WorkerClient, path: str, request: BaseModel | Fields, timeout_s: float):
        self.has_ended = False
        self._client = client
        self._path = path
        self._request = request
        self._timeout_s = timeout_s
        self._frames = Frames()
        self._call: AbstractAsyncContextManager[Answer] | None = None
        self._answer: Answer | None = None

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        try:
            while chunks := await self.read():
                yield chunks
        finally:
            await self.aclose()

    async def read(self, within_s: float | None = None) -> list[Chunk]:
        """The next ones; none at the end. Raises `DeadlineExceeded` where none came in time, by default within what the
        client was asked for, from one piece to the next."""
        until = None if within_s is None else time.monotonic() + within_s
        chunks: list[Chunk] = []
        try:
            answer = self._answer or await self._begun(within_s)
            while not self.has_ended and (not chunks or self._frames.are_whole):
                if self._frames.error is not None:
                    raise self._frames.error
                left_s = None if until is None else until - time.monotonic()
                data = await answer.read(left_s)  # after [DONE] too: hanging up there would look like a client's
                self.has_ended = not data
                chunks += self._frames.add(data)
        except WireError as error:
            if not self._frames.are_whole:
                waited_s = self._timeout_s if within_s is None else within_s
                raise self._client.failed(error, self._path, waited_s) from error
            self.has_ended = True
        if self.has_ended and not self._frames.are_whole:
            raise WorkerUnavailable(f"worker at {self._client.url} ended its stream without [DONE]")
        return chunks

    async def aclose(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            await call.__aexit__(None, None, None)

    async def _begun(self, within_s: float | None) -> Answer:
        timeout_s = self._timeout_s if within_s is None else max(0.0, within_s)
        call = self._client.asked("POST", self._path, self._request, timeout_s)
        answer = self._answer = await call.__aenter__()
        self._call = call
        if answer.status != 200:
            raise from_reply(answer.status, _json(await answer.whole(timeout_s)), answer.retry_after)
        return answer


class Frames:
    """The chunks in a stream of server-sent events, as its pieces arrive. Whatever follows `[DONE]` is passed over."""

    def __init__(self) -> None:
        self.are_whole = False
        self.error: KvrelayError | None = None  # told in place of a chunk, which ends the stream
        self._unfinished = b""

    def add(self, data: bytes) -> list[Chunk]:
        """The chunks that are complete now, up to an error."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        chunks: list[Chunk] = []
        if len(self._unfinished) > MAX_FRAME_BYTES:
            self.error = WorkerUnavailable(f"worker sent a frame of more than {MAX_FRAME_BYTES} bytes")
        for line in lines:
            if self.are_whole or not line.startswith(EVENT):
                continue
            if line.rstrip() == DONE:
                self.are_whole = True
                continue
            chunk = _json(line[len(EVENT) :])
            if not isinstance(chunk, dict):
                self.error = WorkerUnavailable("worker sent a frame that is not a JSON object")
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
        raise WorkerUnavailable(f"worker answered with something that is not a {kind.__name__}") from error


def _written(request: BaseModel | Fields) -> bytes:
    if isinstance(request, BaseModel):
        return request.model_dump_json(exclude_none=True).encode()
    return orjson.dumps({key: value for key, value in request.items() if value is not None})


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return None
