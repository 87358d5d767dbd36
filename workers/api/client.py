"""`WorkerClient`: a worker's calls as methods. Raises the errors of `workers.api.errors`, never httpx's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, TypeVar

import httpx
import orjson
from pydantic import ValidationError

from workers.api.errors import DeadlineExceeded, InvalidRequest, WorkerUnavailable, from_reply
from workers.api.schemas import (
    SECRET_HEADER,
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
KEEPALIVE_EXPIRY_S = 2.0  # well before a server closes an idle connection (uvicorn: 5 s), which a call would run into


class WorkerClient:
    """Calls one worker. `timeout_s` bounds each gap in a reply or a stream; a worker that takes no connection within
    `CONNECT_TIMEOUT_S` is `WorkerUnavailable`, however much time is left."""

    def __init__(self, url: str, secret: str, *, transport: httpx.AsyncBaseTransport | None = None):
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={SECRET_HEADER: secret},
            transport=transport,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_EXPIRY_S
            ),
            trust_env=False,
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

    async def tokenize(self, prompt: Prompt, *, timeout_s: float = 5.0) -> TokenizeReply:
        return _parse(TokenizeReply, await self._call("POST", "/v1/tokenize", prompt, timeout_s))

    async def chat(self, request: ChatRequest, *, timeout_s: float) -> dict[str, Any]:
        """The OpenAI chat completion, with `KVUsage` under `kv_transfer_params`."""
        reply = await self._call("POST", "/v1/chat/completions", request, timeout_s)
        if not isinstance(reply, dict):
            raise WorkerUnavailable("worker answered with something that is not a chat completion")
        return reply

    def completion_stream(
        self, request: CompletionRequest, *, timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed text completion; else as `chat_stream`."""
        return self._stream("/v1/completions", request, timeout_s)

    def chat_stream(self, request: ChatRequest, *, timeout_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed chat completion; `KVUsage` stands in the last one's `kv_transfer_params`.

        An error frame is raised. A stream that ends without `[DONE]` raises `WorkerUnavailable`: a cut answer is never
        taken for a whole one. Closing the iterator hangs up, which stops the worker.
        """
        return self._stream("/v1/chat/completions", request, timeout_s)

    async def _stream(
        self, path: str, request: ChatRequest | CompletionRequest, timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        is_whole = False
        try:
            async with self._http.stream(
                "POST",
                path,
                content=_body(request),
                headers={"content-type": "application/json"},
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            ) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise from_reply(reply.status_code, _json(reply), reply.headers.get("retry-after"))
                async for line in reply.aiter_lines():
                    if is_whole or not line.startswith("data: "):
                        continue  # after [DONE] too it is read to its end: hanging up there would look like a client's
                    is_whole = line == "data: [DONE]"
                    if is_whole:
                        continue
                    chunk = _chunk(line[6:])
                    if "error" in chunk:
                        raise from_reply(500, chunk)
                    yield chunk
        except httpx.ConnectTimeout as error:
            raise WorkerUnavailable(f"worker at {self.url} is not reachable: {error!r}") from error
        except httpx.TimeoutException as error:
            if not is_whole:
                raise DeadlineExceeded(f"worker at {self.url} sent nothing for {timeout_s:.3f} s") from error
        except httpx.HTTPError as error:
            if not is_whole:
                raise WorkerUnavailable(f"worker at {self.url} broke off: {error!r}") from error
        if not is_whole:
            raise WorkerUnavailable(f"worker at {self.url} ended its stream without [DONE]")

    async def _call(self, method: str, path: str, request: Prompt | ChatRequest | Any, timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left to call {path}")
        try:
            reply = await self._http.request(
                method,
                path,
                content=None if request is None else _body(request),
                headers={"content-type": "application/json"},
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            )
        except httpx.ConnectTimeout as error:
            raise WorkerUnavailable(f"worker at {self.url} is not reachable: {error!r}") from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"worker at {self.url} did not answer {path} in {timeout_s:.3f} s") from error
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self.url}{path} is not a URL") from error
        except httpx.HTTPError as error:
            raise WorkerUnavailable(f"worker at {self.url} is not reachable: {error!r}") from error
        if reply.status_code >= 400:
            raise from_reply(reply.status_code, _json(reply), reply.headers.get("retry-after"))
        return _json(reply)


def _body(request: Any) -> bytes:
    return orjson.dumps(request.model_dump(exclude_none=True))


def _parse(kind: type[R], data: Any) -> R:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise WorkerUnavailable(f"worker answered with something that is not a {kind.__name__}") from error


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        chunk = None
    if not isinstance(chunk, dict):
        raise WorkerUnavailable("worker sent a frame that is not a JSON object")
    return chunk


def _json(reply: httpx.Response) -> Any:
    try:
        return orjson.loads(reply.content) if reply.content else None
    except orjson.JSONDecodeError:
        return None
