"""`FakeWorker`: speaks the worker's contract without a model, and does what a test tells it to.

    small = FakeWorker("small-0", "fake-small")
    large = FakeWorker("large-0", "fake-large", peers={"small-0": small})
    large.fail("transfer", TransferFailed("the source is gone"))

It is an ASGI application: serve it with uvicorn, or call it in process. Tokens are words, a cache is a list of them,
and every rule of the contract about caches holds: salts, epochs, expiry, exact and mapped, the longest common prefix.
An answer names the model and a checksum of its prompt, so that an answer to another prompt is told from the right one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from workers.api.errors import (
    CacheMismatch,
    CacheNotFound,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    TransferFailed,
    Unauthorized,
)
from workers.api.schemas import (
    SECRET_HEADER,
    ChatRequest,
    KVLayout,
    KVTransferParams,
    KVUsage,
    Message,
    PrefillReply,
    PrefillRequest,
    Prompt,
    Rates,
    TokenizeReply,
    TransferReply,
    TransferRequest,
    WorkerInfo,
)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

FAKE_SECRET = "fake-cluster-secret-0123456789abcdef"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=16, dtype="float32")
MS_PER_TOKEN = 1.0  # what it claims to take for reading
BYTES_PER_TOKEN = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim * 4


@dataclass(frozen=True)
class Call:
    """A call that was made: its name, and the body as it came."""

    name: str
    body: dict[str, Any]


@dataclass
class Fault:
    """What goes wrong with the next `times` calls of one kind (None: with all)."""

    error: KvrelayError | None = None
    delay_s: float = 0.0
    garbage: bool = False
    times: int | None = None


@dataclass(frozen=True)
class Cache:
    cache_id: str
    tokens: list[str]
    salt: str
    provenance: str
    num_mapped: int
    expires_at: float


@dataclass
class FakeWorker:
    """Calls are `info`, `readyz`, `prefill`, `transfer`, `chat` (without a cache), `cached_chat` and `tokenize`."""

    name: str
    model: str
    peers: Mapping[str, FakeWorker] = field(default_factory=dict)
    secret: str = FAKE_SECRET
    rates: Rates = field(default_factory=Rates)
    logprob: float = -0.125
    answer: str | None = None  # in place of what it says by itself
    tool_call: dict[str, Any] | None = None
    token_s: float = 0.0
    max_model_len: int = 100_000
    cut_after: int | None = None  # words, after which a stream ends without [DONE]
    break_after: int | None = None  # words, after which a stream ends with an error frame
    tells_early: bool = True  # what it reused stands in the first chunk too

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.caches: dict[str, Cache] = {}
        self.num_hang_ups = 0
        self.is_frozen = False
        self.epoch = secrets.token_hex(8)
        self._faults: dict[str, Fault] = {}
        self._stalls: dict[str, int] = {}
        self._app = Starlette(routes=self._routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # What a test tells it

    def fail(self, call: str, error: KvrelayError, *, times: int | None = None) -> None:
        self._faults[call] = Fault(error=error, times=times)

    def delay(self, call: str, seconds: float, *, times: int | None = None) -> None:
        self._faults[call] = Fault(delay_s=seconds, times=times)

    def garble(self, call: str, *, times: int | None = None) -> None:
        """Answers 200 with something that is no reply of the contract."""
        self._faults[call] = Fault(garbage=True, times=times)

    def stall(self, call: str, *, after: int) -> None:
        """Answers of this kind (`chat`, `cached_chat`) stop after so many words, and stay open."""
        self._stalls[call] = after

    def heal(self) -> None:
        self._faults.clear()
        self._stalls.clear()

    def restart(self) -> None:
        """As a process that was started anew on the same port: another epoch, no caches."""
        self.epoch = secrets.token_hex(8)
        self.caches.clear()

    def made(self, name: str) -> list[dict[str, Any]]:
        """The bodies of the calls of one kind."""
        return [call.body for call in self.calls if call.name == name]

    def says(self, messages: Sequence[Message]) -> str:
        """What it answers to these messages."""
        if self.answer is not None:
            return self.answer
        return f"{self.model} answers {zlib.crc32(' '.join(render(messages)).encode()):08x} and that is all"

    # The contract

    def _routes(self) -> list[Route]:
        return [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/v1/info", self._info),
            Route("/v1/prefix/prefill", self._prefill, methods=["POST"]),
            Route("/v1/cache/transfer", self._transfer, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/tokenize", self._tokenize, methods=["POST"]),
        ]

    async def _livez(self, request: Request) -> Response:
        return _json({})

    async def _readyz(self, request: Request) -> Response:
        return await self._reply(request, "readyz", self._ready)

    async def _ready(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def _info(self, request: Request) -> Response:
        return await self._reply(request, "info", self._tell)

    async def _tell(self, body: dict[str, Any]) -> dict[str, Any]:
        info = WorkerInfo(
            worker=self.name,
            model=self.model,
            fingerprint=hashlib.sha256(self.model.encode()).hexdigest(),
            engine="fake",
            device="none",
            layout=LAYOUT,
            epoch=self.epoch,
            max_model_len=self.max_model_len,
            transports=["shm"],
            bundles=[],
            pool_blocks=1000,
            free_blocks=1000,
            rates=self.rates,
            pid=os.getpid(),
        )
        return info.model_dump()

    async def _tokenize(self, request: Request) -> Response:
        return await self._reply(request, "tokenize", self._count)

    async def _count(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = render(_parse(Prompt, body).messages or [])
        return TokenizeReply(token_ids=list(range(len(tokens))), num_tokens=len(tokens)).model_dump()

    async def _prefill(self, request: Request) -> Response:
        return await self._reply(request, "prefill", self._read)

    async def _read(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = _parse(PrefillRequest, body)
        tokens = render(asked.messages or [])
        self._check_length(tokens)
        known = self._longest_exact(tokens, asked.tenant_salt)
        cache = self._store(tokens, asked.tenant_salt, "exact", 0, asked.ttl_s)
        took_ms = (len(tokens) - known) * MS_PER_TOKEN
        reply = PrefillReply(cached_tokens=known, prefill_ms=took_ms, **self._told(cache))
        return reply.model_dump()

    async def _transfer(self, request: Request) -> Response:
        return await self._reply(request, "transfer", self._map)

    async def _map(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = _parse(TransferRequest, body)
        source = await self._lease(asked)
        num_tokens = min(asked.num_tokens or len(source.tokens), len(source.tokens))
        mapped = num_tokens - asked.native_head
        cache = self._store(source.tokens[:num_tokens], asked.tenant_salt, "mapped:fake-bundle", mapped, asked.ttl_s)
        reply = TransferReply(
            mapper="fake-bundle",
            map_ms=2.0,
            copy_ms=1.0,
            total_ms=3.0,
            bytes=mapped * BYTES_PER_TOKEN,
            **self._told(cache),
        )
        return reply.model_dump()

    async def _lease(self, asked: TransferRequest) -> Cache:
        peer = self.peers.get(asked.source_worker)
        if peer is None:
            raise TransferFailed(f"unknown worker {asked.source_worker!r}; known: {', '.join(self.peers) or 'none'}")
        until = time.monotonic() + asked.deadline_ms / 1000
        while peer.is_frozen:
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"{peer.name} did not answer in time")
            await asyncio.sleep(0.01)
        source = peer.find(asked.cache_id, asked.tenant_salt)
        if source.provenance != "exact":
            raise CacheMismatch(f"{source.cache_id} is {source.provenance}; a source must be exact")
        return source

    async def _chat(self, request: Request) -> Response:
        body = await request.body()
        return await self._reply(request, _kind(_parse(ChatRequest, orjson.loads(body))), self._begin_answer)

    async def _begin_answer(self, body: dict[str, Any]) -> Response:
        asked = _parse(ChatRequest, body)
        tokens = render(asked.messages)
        self._check_length(tokens)
        usage, provenance = self._look_up(asked, tokens)
        return StreamingResponse(self._frames(asked, tokens, usage, provenance), media_type="text/event-stream")

    def _look_up(self, asked: ChatRequest, tokens: list[str]) -> tuple[KVUsage, str]:
        """What of the prompt stands in a cache, and what the answer's own cache will be."""
        params = asked.kv_transfer_params or KVTransferParams()
        if params.cache_id is None:
            known = self._longest_exact(tokens, asked.tenant_salt) if params.reuse else 0
            usage = KVUsage(epoch=self.epoch, path="prefill", prefill_ms=(len(tokens) - known) * MS_PER_TOKEN)
            return usage.model_copy(update={"path": "exact", "cached_tokens": known} if known else {}), "exact"
        cache = self.find(params.cache_id, asked.tenant_salt)
        shared = common(cache.tokens, tokens)
        if params.require_exact and cache.provenance != "exact":
            raise CacheMismatch(f"{cache.cache_id} is {cache.provenance}; an exact one is required")
        if shared == 0:
            raise CacheMismatch(f"{cache.cache_id} holds other tokens than this prompt begins with")
        mapped = min(cache.num_mapped, shared)
        usage = KVUsage(
            epoch=self.epoch,
            path="mapped" if mapped else "exact",
            cached_tokens=0 if mapped else shared,
            mapped_tokens=mapped,
            provenance=cache.provenance,
            prefill_ms=(len(tokens) - shared) * MS_PER_TOKEN,
            top1_agreement=0.875 if params.agreement_probe else None,
            full_prefill_ms=50.0 if params.agreement_probe else None,
        )
        return usage, cache.provenance

    async def _frames(
        self, asked: ChatRequest, tokens: list[str], usage: KVUsage, provenance: str
    ) -> AsyncGenerator[bytes, None]:
        words = self.says(asked.messages).split(" ")[: asked.max_tokens or asked.max_completion_tokens]
        opening: dict[str, Any] = {"choices": [_delta({"role": "assistant", "content": ""})]}
        try:
            yield _frame(opening | ({"kv_transfer_params": usage.model_dump()} if self.tells_early else {}))
            async for word in self._words(words, self._stalls.get(_kind(asked))):
                logprobs = {"content": [{"token": word, "logprob": self.logprob, "bytes": None, "top_logprobs": []}]}
                yield _frame({"choices": [_delta({"content": word}, logprobs if asked.logprobs else None)]})
        except Cut:
            return
        except KvrelayError as error:
            yield _frame(error.body())
            return
        except (asyncio.CancelledError, GeneratorExit):
            self.num_hang_ups += 1
            raise
        if self.tool_call is not None:
            yield _frame({"choices": [_delta({"tool_calls": [{"index": 0} | self.tool_call]})]})
        for last in self._endings(asked, tokens, words, usage, provenance):
            yield _frame(last)
        yield b"data: [DONE]\n\n"

    async def _words(self, words: Sequence[str], stall_after: int | None) -> AsyncGenerator[str, None]:
        for index, word in enumerate(words):
            if index == stall_after:
                await asyncio.sleep(3600)
            if index == self.cut_after:
                raise Cut
            if index == self.break_after:
                raise KvrelayError("the model broke off")
            await self._thawed()
            await asyncio.sleep(self.token_s)
            yield word if index == 0 else f" {word}"

    def _endings(
        self, asked: ChatRequest, tokens: list[str], words: list[str], usage: KVUsage, provenance: str
    ) -> list[dict[str, Any]]:
        params = asked.kv_transfer_params or KVTransferParams()
        if params.store:
            everything = [*tokens, *words]
            cache = self._store(everything, asked.tenant_salt, provenance, usage.mapped_tokens, params.ttl_s)
            stable = len(render(asked.messages[: asked.stable_messages or 0])) - 1
            usage = usage.model_copy(update=self._told(cache) | {"stable_tokens": stable})
        read, written = len(tokens), len(words)
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        finish = "tool_calls" if self.tool_call else "stop"
        return [
            {"choices": [_delta({}) | {"finish_reason": finish}]},
            {"choices": [], "usage": counts, "kv_transfer_params": usage.model_dump()},
        ]

    # Caches

    def find(self, cache_id: str, salt: str) -> Cache:
        cache = self.caches.get(cache_id)
        if cache is None or cache.expires_at <= time.time():
            raise CacheNotFound(f"{cache_id} is not known here")
        if cache.salt != salt:
            raise CacheMismatch(f"{cache_id} is another tenant's")
        return cache

    def _store(self, tokens: list[str], salt: str, provenance: str, num_mapped: int, ttl_s: float) -> Cache:
        cache = Cache(f"kvc-{secrets.token_hex(16)}", tokens, salt, provenance, num_mapped, time.time() + ttl_s)
        self.caches[cache.cache_id] = cache
        return cache

    def _longest_exact(self, tokens: Sequence[str], salt: str) -> int:
        """Automatic prefix matching: exact caches of this tenant only."""
        candidates = [cache for cache in self.caches.values() if cache.salt == salt and cache.provenance == "exact"]
        return max((common(cache.tokens, tokens) for cache in candidates), default=0)

    def _told(self, cache: Cache) -> dict[str, Any]:
        digest = hashlib.sha256(f"{cache.salt} {' '.join(cache.tokens)}".encode()).hexdigest()
        return {
            "cache_id": cache.cache_id,
            "num_tokens": len(cache.tokens),
            "digest": digest,
            "epoch": self.epoch,
            "expires_at": cache.expires_at,
            "provenance": cache.provenance,
        }

    def _check_length(self, tokens: Sequence[str]) -> None:
        if len(tokens) > self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens; {self.model} takes {self.max_model_len}", param="messages"
            )

    # Calls

    async def _reply(
        self, request: Request, name: str, work: Callable[[dict[str, Any]], Awaitable[dict[str, Any] | Response]]
    ) -> Response:
        raw = await request.body()
        body: dict[str, Any] = orjson.loads(raw) if raw else {}
        self.calls.append(Call(name, body))
        try:
            if name not in ("livez", "readyz") and request.headers.get(SECRET_HEADER) != self.secret:
                raise Unauthorized("the cluster secret is missing or wrong")
            reply = await self._until_gone(request, self._with_faults(name, work, body))
        except KvrelayError as error:
            retry = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
            return _json(error.body(), error.status, retry)
        return reply if isinstance(reply, Response) else _json(reply)

    async def _with_faults(
        self, name: str, work: Callable[[dict[str, Any]], Awaitable[dict[str, Any] | Response]], body: dict[str, Any]
    ) -> dict[str, Any] | Response:
        await self._thawed()
        fault = self._next_fault(name)
        await asyncio.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error
        return {"nonsense": True} if fault.garbage else await work(body)

    def _next_fault(self, name: str) -> Fault:
        fault = self._faults.get(name, Fault())
        if fault.times is not None:
            fault.times -= 1
            if fault.times < 0:
                return Fault()
        return fault

    async def _thawed(self) -> None:
        # The flag is set from the test's own thread, where an asyncio.Event may not be.
        while self.is_frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _until_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work; when the caller hangs up first, the work is cancelled and the hang-up counted."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.num_hang_ups += 1
                raise KvrelayError("the caller is gone")
            return task.result()
        finally:
            for one in (task, gone):
                one.cancel()
            await asyncio.wait({task, gone})


class Cut(Exception):
    """The stream ends here, as if the process had died."""


def render(messages: Sequence[Message]) -> list[str]:
    """The prompt's tokens: each message's role and words, then the mark at which the assistant begins."""
    tokens = []
    for message in messages:
        tokens += [f"<{message.role}>", *(message.text.split() if message.text else [])]
    return [*tokens, "<assistant>"]


def common(left: Sequence[str], right: Sequence[str]) -> int:
    """How many first tokens the two share."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _parse(kind: type[M], body: dict[str, Any]) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _kind(asked: ChatRequest) -> str:
    return "cached_chat" if asked.kv_transfer_params and asked.kv_transfer_params.cache_id else "chat"


def _delta(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"id": "fake", "object": "chat.completion.chunk"} | data) + b"\n\n"


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
