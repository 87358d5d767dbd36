"""`FakeWorker`: the calls of the worker contract, and the faults that a test sets."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tools.fake_worker.model import ChatAnswer, FakeCache, FakePool, TextAnswer, common_length, render, tokenize
from workers.api.errors import (
    BundleUnusable,
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
    BundleInfo,
    ChatRequest,
    CompletionRequest,
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
from workers.api.tasks import cancel_and_wait

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Body = dict[str, Any]
Handler = Callable[[Body], Awaitable[Body | Response]]

FAKE_SECRET = "fake-cluster-secret-0123456789abcdef"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=16, dtype="float32")
MS_PER_TOKEN = 1.0  # reported prefill time
BYTES_PER_TOKEN = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim * 4


def fingerprint(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()


@dataclass(frozen=True)
class RecordedCall:
    """A call that arrived: its name and body."""

    name: str
    body: Body


@dataclass
class CallFault:
    """A fault of the next `times` calls of one kind (None: of all)."""

    error: KvrelayError | None = None
    delay_s: float = 0.0
    garbage: bool = False
    times: int | None = None


@dataclass
class FakeWorker:
    """A worker without a model.

    Calls are `info`, `readyz`, `prefill`, `transfer`, `drop`, `tokenize`, `resume_bundle`, `chat` (without a cache) and
    `cached_chat`. Text completions are `complete` and `cached_complete`.
    """

    name: str
    model: str
    peers: Mapping[str, FakeWorker] = field(default_factory=dict)
    secret: str = FAKE_SECRET
    rates: Rates = field(default_factory=Rates)

    # Answers
    logprob: float = -0.125
    first_logprobs: Sequence[float] = ()  # replace `logprob` for the first words
    answer: str | None = None  # replaces the generated answer
    canned_answers: Mapping[str, str] = field(default_factory=dict)  # by text of the last message
    tool_call: dict[str, Any] | None = None
    response_formats: Sequence[str] = ("text",)
    max_model_len: int = 100_000
    reports_early: bool = True  # the first chunk reports the reused tokens

    # Streaming
    token_s: float = 0.0
    cut_after: int | None = None  # `cut` for every kind of answer
    break_after: int | None = None  # `break_off` for every kind of answer

    # Mapping
    by_cost: int | KvrelayError | None = None  # result of a handoff by cost: max mapped tokens, or an error
    reused_tokens: int = 0  # tokens of a transfer that were mapped before
    bundle_off: str | None = None  # reason why the bundle is switched off
    bundle_on_trial: bool = False

    # Records
    calls: list[RecordedCall] = field(default_factory=list)
    num_disconnects: int = 0

    # Faults
    is_frozen: bool = False
    stalls: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = FakePool()
        self._faults: dict[str, CallFault] = {}
        self._app = Starlette(
            routes=[
                self._route("GET", "/livez", "livez", self._ok),
                self._route("GET", "/readyz", "readyz", self._ok),
                self._route("GET", "/v1/info", "info", self._info),
                self._route("POST", "/v1/prefix/prefill", "prefill", self._prefill),
                self._route("POST", "/v1/cache/transfer", "transfer", self._transfer),
                self._route("POST", "/v1/tokenize", "tokenize", self._tokenize),
                self._route("POST", "/v1/bundles/fake-bundle/resume", "resume_bundle", self._resume_bundle),
                Route("/v1/cache/{cache_id}", self._drop, methods=["DELETE"]),
                self._route("POST", "/v1/chat/completions", "chat", self._chat),
                self._route("POST", "/v1/completions", "complete", self._complete),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def caches(self) -> dict[str, FakeCache]:
        return self.pool.by_id

    def restart(self) -> None:
        """Behave like a process restarted on the same port: a new epoch, no caches."""
        self.pool.restart()

    def answer_to(self, messages: Sequence[Message]) -> str:
        """Return the answer to these messages."""
        answer = self.canned_answers.get(messages[-1].text, self.answer)
        if answer is not None:
            return answer
        return f"{self.model} answers {zlib.crc32(' '.join(render(messages)).encode()):08x} and that is all"

    def requests(self, name: str) -> list[Body]:
        """Return the bodies of the calls of one kind."""
        return [call.body for call in self.calls if call.name == name]

    # Faults

    def fail(self, call: str, error: KvrelayError, *, times: int | None = None) -> None:
        """Fail calls with this error."""
        self._faults[call] = CallFault(error=error, times=times)

    def delay(self, call: str, seconds: float, *, times: int | None = None) -> None:
        """Answer calls after this delay."""
        self._faults[call] = CallFault(delay_s=seconds, times=times)

    def garble(self, call: str, *, times: int | None = None) -> None:
        """Answer calls with status 200 and a malformed body."""
        self._faults[call] = CallFault(garbage=True, times=times)

    def stall(self, call: str, *, after: int) -> None:
        """Pause answers of this kind (`chat`, `cached_chat`) after this many words, until `heal`."""
        self.stalls[call] = after

    def break_off(self, call: str, *, after: int) -> None:
        """End answers of this kind with an error frame after this many words."""
        self.breaks[call] = after

    def cut(self, call: str, *, after: int) -> None:
        """End answers of this kind without `[DONE]` after this many words."""
        self.cuts[call] = after

    def heal(self) -> None:
        for faults in (self._faults, self.stalls, self.breaks, self.cuts):
            faults.clear()

    async def wait_while_frozen(self) -> None:
        """Wait while frozen."""
        # The test sets the flag from another thread, where an asyncio.Event cannot be set.
        while self.is_frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _with_faults(self, name: str, handler: Handler, body: Body) -> Body | Response:
        await self.wait_while_frozen()
        fault = self._faults.get(name, CallFault())
        if fault.times is not None:
            fault.times -= 1
            if fault.times < 0:
                fault = CallFault()
        await asyncio.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error
        return {"nonsense": True} if fault.garbage else await handler(body)

    # HTTP

    def _route(self, method: str, path: str, name: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            return await self._reply(request, name, handler)

        return Route(path, endpoint, methods=[method])

    async def _reply(self, request: Request, name: str, handler: Handler) -> Response:
        raw = await request.body()
        body: Body = orjson.loads(raw) if raw else {}
        if name == "livez":
            return _json({})
        if name in ("chat", "complete") and (body.get("kv_transfer_params") or {}).get("cache_id"):
            name = f"cached_{name}"
        self.calls.append(RecordedCall(name, body))
        try:
            if name != "readyz" and request.headers.get(SECRET_HEADER) != self.secret:
                raise Unauthorized("the cluster secret is missing or wrong")
            reply = await self._unless_disconnected(request, self._with_faults(name, handler, body))
        except KvrelayError as error:
            retry = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
            return _json(error.body(), error.status, retry)
        return reply if isinstance(reply, Response) else _json(reply)

    async def _unless_disconnected(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the work. If the caller disconnects first, cancel the work and count the disconnect."""

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        task, disconnect = asyncio.create_task(work), asyncio.create_task(disconnected())
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.num_disconnects += 1
                raise KvrelayError("the caller disconnected")
            return task.result()
        finally:
            for one in (task, disconnect):
                await cancel_and_wait(one)

    # The contract: information

    async def _ok(self, body: Body) -> Body:
        return {}

    async def _info(self, body: Body) -> Body:
        info = WorkerInfo(
            worker=self.name,
            model=self.model,
            fingerprint=fingerprint(self.model),
            engine="fake",
            device="none",
            layout=LAYOUT,
            epoch=self.pool.epoch,
            max_model_len=self.max_model_len,
            transports=["shm"],
            bundles=[self._bundle(peer.model) for peer in self.peers.values()],
            pool_blocks=1000,
            free_blocks=1000,
            rates=self.rates,
            pid=os.getpid(),
            response_formats=list(self.response_formats),
        )
        return info.model_dump()

    def _bundle(self, source: str) -> BundleInfo:
        return BundleInfo(
            bundle_id="fake-bundle",
            source_model=source,
            source_fingerprint=fingerprint(source),
            target_fingerprint=fingerprint(self.model),
            method="fake",
            usable=self.bundle_off is None,
            on_trial=self.bundle_on_trial,
            reason=self.bundle_off,
        )

    async def _resume_bundle(self, body: Body) -> Body:
        self.bundle_off = None
        return self._bundle(next(iter(self.peers.values())).model).model_dump()

    async def _tokenize(self, body: Body) -> Body:
        tokens = tokenize(_parse(Prompt, body))
        return TokenizeReply(token_ids=list(range(len(tokens))), num_tokens=len(tokens)).model_dump()

    # The contract: caches

    async def _prefill(self, body: Body) -> Body:
        request = _parse(PrefillRequest, body)
        tokens = tokenize(request)
        self._check_length(tokens)
        cached = self.pool.longest_exact(tokens, request.tenant_salt)
        cache = self.pool.store(tokens, request.tenant_salt, "exact", 0, request.ttl_s)
        prefill_ms = (len(tokens) - cached) * MS_PER_TOKEN
        return PrefillReply(cached_tokens=cached, prefill_ms=prefill_ms, **self.pool.describe(cache)).model_dump()

    async def _transfer(self, body: Body) -> Body:
        request = _parse(TransferRequest, body)
        if self.bundle_off is not None:
            raise BundleUnusable(self.bundle_off)
        source = await self._lease(request)
        available = min(request.num_tokens or len(source.tokens), len(source.tokens))
        num_tokens = available
        if request.by_cost and self.by_cost is not None:
            if isinstance(self.by_cost, KvrelayError):
                raise self.by_cost
            num_tokens = min(self.by_cost, available)
        mapped, is_hybrid = num_tokens - request.native_head, num_tokens < available
        tokens = source.tokens[:num_tokens]
        cache = self.pool.store(tokens, request.tenant_salt, "mapped:fake-bundle", mapped, request.ttl_s, is_hybrid)
        reply = TransferReply(
            mapper="fake-bundle",
            map_ms=2.0,
            copy_ms=1.0,
            total_ms=3.0,
            bytes=mapped * BYTES_PER_TOKEN,
            decision="hybrid" if is_hybrid else "map",
            reused_tokens=min(self.reused_tokens, num_tokens),
            **self.pool.describe(cache),
        )
        return reply.model_dump()

    async def _lease(self, request: TransferRequest) -> FakeCache:
        """Return the source cache of a peer, within the deadline."""
        peer = self.peers.get(request.source_worker)
        if peer is None:
            raise TransferFailed(f"unknown worker {request.source_worker!r}; known: {', '.join(self.peers) or 'none'}")
        deadline = time.monotonic() + request.deadline_ms / 1000
        while peer.is_frozen:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{peer.name} did not answer in time")
            await asyncio.sleep(0.01)
        source = peer.pool.find(request.cache_id, request.tenant_salt)
        if source.provenance != "exact":
            raise CacheMismatch(f"{source.cache_id} is {source.provenance}; a source must be exact")
        return source

    async def _drop(self, request: Request) -> Response:
        cache_id = request.path_params["cache_id"]

        async def drop(body: Body) -> Body:
            if self.caches.pop(cache_id, None) is None:
                raise CacheNotFound(f"unknown cache {cache_id}")
            return {}

        return await self._reply(request, "drop", drop)

    # The contract: answers

    async def _chat(self, body: Body) -> Response:
        request = _parse(ChatRequest, body)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if request.response_format is not None and request.response_format.type not in self.response_formats:
            kind = request.response_format.type
            raise InvalidRequest(f"{self.model} does not support {kind}", param="response_format.type")
        tokens = render(request.messages)
        self._check_length(tokens)
        answer = ChatAnswer(self, request, tokens, self._usage(request, tokens))
        return StreamingResponse(answer.frames(), media_type="text/event-stream")

    async def _complete(self, body: Body) -> Response:
        request = _parse(CompletionRequest, body)
        tokens = str(request.prompt).split()
        self._check_length(tokens)
        answer = TextAnswer(self, request, tokens, self._usage(request, tokens))
        return StreamingResponse(answer.frames(), media_type="text/event-stream")

    def _usage(self, request: ChatRequest | CompletionRequest, tokens: list[str]) -> KVUsage:
        """Return how many prompt tokens came from which cache. Raises `CacheNotFound`, `CacheMismatch`."""
        params = request.kv_transfer_params or KVTransferParams()
        if params.cache_id is None:
            cached = self.pool.longest_exact(tokens, request.tenant_salt) if params.reuse else 0
            return KVUsage(
                epoch=self.pool.epoch,
                path="exact" if cached else "prefill",
                cached_tokens=cached,
                prefill_ms=(len(tokens) - cached) * MS_PER_TOKEN,
            )
        cache = self.pool.find(params.cache_id, request.tenant_salt)
        shared = common_length(cache.tokens, tokens)
        if params.require_exact and cache.provenance != "exact":
            raise CacheMismatch(f"{cache.cache_id} is {cache.provenance}; an exact cache is required")
        if shared == 0:
            raise CacheMismatch(f"{cache.cache_id} does not match the beginning of this prompt")
        mapped = min(cache.num_mapped, shared)
        return KVUsage(
            epoch=self.pool.epoch,
            path=("hybrid" if cache.is_hybrid else "mapped") if mapped else "exact",
            cached_tokens=0 if mapped else shared,
            mapped_tokens=mapped,
            provenance=cache.provenance,
            prefill_ms=(len(tokens) - shared) * MS_PER_TOKEN,
            top1_agreement=0.875 if params.agreement_probe else None,
            full_prefill_ms=50.0 if params.agreement_probe else None,
        )

    def _check_length(self, tokens: Sequence[str]) -> None:
        if len(tokens) > self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens; {self.model} allows {self.max_model_len}", param="messages"
            )


def _parse(kind: type[M], body: Body) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _json(body: Body, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
