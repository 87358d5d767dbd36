"""`FakeWorker`: the calls of the contract, over words."""

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
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tools.fake_worker.answers import Answer, TextAnswer
from tools.fake_worker.caches import Cache, Caches, common, render, tokens_of
from tools.fake_worker.faults import Body, Call, Faulty
from tools.fake_worker.wire import json_reply, parse, until_disconnected
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
Work = Callable[[Body], Awaitable[Body | Response]]

FAKE_SECRET = "fake-cluster-secret-0123456789abcdef"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=16, dtype="float32")
MS_PER_TOKEN = 1.0  # what it claims to take for reading
BYTES_PER_TOKEN = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim * 4


def fingerprint(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()


@dataclass
class FakeWorker(Faulty):
    """Calls are `info`, `readyz`, `prefill`, `transfer`, `drop`, `tokenize`, `resume_bundle`, `chat` (without a cache),
    `cached_chat`; `complete` and `cached_complete` are their likes for texts."""

    name: str
    model: str
    peers: Mapping[str, FakeWorker] = field(default_factory=dict)
    secret: str = FAKE_SECRET
    rates: Rates = field(default_factory=Rates)
    logprob: float = -0.125
    first_logprobs: Sequence[float] = ()  # of its first words, in place of that
    answer: str | None = None  # in place of what it says by itself
    answers_to: Mapping[str, str] = field(default_factory=dict)  # the text of the last message
    tool_call: dict[str, Any] | None = None
    token_s: float = 0.0
    max_model_len: int = 100_000
    cut_after: int | None = None  # words, after which a stream ends without [DONE]
    break_after: int | None = None  # words, after which a stream ends with an error frame
    by_cost: int | KvrelayError | None = None  # of a handoff by cost it maps so many tokens at most, or declines
    bundle_off: str | None = None  # why its bundle is not used
    bundle_on_trial: bool = False
    reused_tokens: int = 0  # of what it maps, so many stood mapped here already
    response_formats: Sequence[str] = ("text",)
    tells_early: bool = True  # what it reused stands in the first chunk too

    def __post_init__(self) -> None:
        super().__init__()
        self.stored = Caches()
        self.num_hang_ups = 0
        self._app = Starlette(routes=self._routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def caches(self) -> dict[str, Cache]:
        return self.stored.by_id

    def restart(self) -> None:
        """As a process that was started anew on the same port: another epoch, no caches."""
        self.stored.restart()

    def says(self, messages: Sequence[Message]) -> str:
        """What it answers to these messages."""
        answer = self.answers_to.get(messages[-1].text, self.answer)
        if answer is not None:
            return answer
        return f"{self.model} answers {zlib.crc32(' '.join(render(messages)).encode()):08x} and that is all"

    # The contract

    def _routes(self) -> list[Route]:
        works: dict[str, tuple[str, Work]] = {
            "/livez": ("livez", self._nothing),
            "/readyz": ("readyz", self._nothing),
            "/v1/info": ("info", self._info),
        }
        posts: dict[str, tuple[str, Work]] = {
            "/v1/prefix/prefill": ("prefill", self._read),
            "/v1/cache/transfer": ("transfer", self._map),
            "/v1/tokenize": ("tokenize", self._count),
            "/v1/bundles/fake-bundle/resume": ("resume_bundle", self._resume),
        }
        return [
            *(Route(path, self._call(*work)) for path, work in works.items()),
            *(Route(path, self._call(*work), methods=["POST"]) for path, work in posts.items()),
            Route("/v1/cache/{cache_id}", self._drop, methods=["DELETE"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]

    def _call(self, name: str, work: Work) -> Callable[[Request], Awaitable[Response]]:
        async def called(request: Request) -> Response:
            return await self._reply(request, name, work)

        return called

    async def _nothing(self, body: Body) -> Body:
        return {}

    async def _info(self, body: Body) -> Body:
        info = WorkerInfo(
            worker=self.name,
            model=self.model,
            fingerprint=fingerprint(self.model),
            engine="fake",
            device="none",
            layout=LAYOUT,
            epoch=self.stored.epoch,
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

    async def _resume(self, body: Body) -> Body:
        self.bundle_off = None
        return self._bundle(next(iter(self.peers.values())).model).model_dump()

    async def _count(self, body: Body) -> Body:
        tokens = tokens_of(parse(Prompt, body))
        return TokenizeReply(token_ids=list(range(len(tokens))), num_tokens=len(tokens)).model_dump()

    async def _read(self, body: Body) -> Body:
        asked = parse(PrefillRequest, body)
        tokens = tokens_of(asked)
        self._check_length(tokens)
        known = self.stored.longest_exact(tokens, asked.tenant_salt)
        cache = self.stored.store(tokens, asked.tenant_salt, "exact", 0, asked.ttl_s)
        took_ms = (len(tokens) - known) * MS_PER_TOKEN
        return PrefillReply(cached_tokens=known, prefill_ms=took_ms, **self.stored.told(cache)).model_dump()

    async def _map(self, body: Body) -> Body:
        asked = parse(TransferRequest, body)
        if self.bundle_off is not None:
            raise BundleUnusable(self.bundle_off)
        source = await self._lease(asked)
        most = min(asked.num_tokens or len(source.tokens), len(source.tokens))
        num_tokens = self._decided(most) if asked.by_cost else most
        mapped, is_hybrid = num_tokens - asked.native_head, num_tokens < most
        tokens = source.tokens[:num_tokens]
        cache = self.stored.store(tokens, asked.tenant_salt, "mapped:fake-bundle", mapped, asked.ttl_s, is_hybrid)
        reply = TransferReply(
            mapper="fake-bundle",
            map_ms=2.0,
            copy_ms=1.0,
            total_ms=3.0,
            bytes=mapped * BYTES_PER_TOKEN,
            decision="hybrid" if is_hybrid else "map",
            reused_tokens=min(self.reused_tokens, num_tokens),
            **self.stored.told(cache),
        )
        return reply.model_dump()

    def _decided(self, most: int) -> int:
        if isinstance(self.by_cost, KvrelayError):
            raise self.by_cost
        return most if self.by_cost is None else min(self.by_cost, most)

    async def _lease(self, asked: TransferRequest) -> Cache:
        peer = self.peers.get(asked.source_worker)
        if peer is None:
            raise TransferFailed(f"unknown worker {asked.source_worker!r}; known: {', '.join(self.peers) or 'none'}")
        until = time.monotonic() + asked.deadline_ms / 1000
        while peer.is_frozen:
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"{peer.name} did not answer in time")
            await asyncio.sleep(0.01)
        source = peer.stored.find(asked.cache_id, asked.tenant_salt)
        if source.provenance != "exact":
            raise CacheMismatch(f"{source.cache_id} is {source.provenance}; a source must be exact")
        return source

    async def _drop(self, request: Request) -> Response:
        async def dropped(body: Body) -> Body:
            if self.caches.pop(request.path_params["cache_id"], None) is None:
                raise CacheNotFound(f"{request.path_params['cache_id']} is not known here")
            return {}

        return await self._reply(request, "drop", dropped)

    async def _chat(self, request: Request) -> Response:
        body = await request.body()
        cached = (orjson.loads(body).get("kv_transfer_params") or {}).get("cache_id")
        return await self._reply(request, "cached_chat" if cached else "chat", self._begin_answer)

    async def _begin_answer(self, body: Body) -> Response:
        asked = parse(ChatRequest, body)
        if asked.top_logprobs and not asked.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.response_format is not None and asked.response_format.type not in self.response_formats:
            raise InvalidRequest(f"{self.model} has no {asked.response_format.type}", param="response_format.type")
        tokens = render(asked.messages)
        self._check_length(tokens)
        answer = Answer(self, asked, tokens, self._look_up(asked, tokens))
        return StreamingResponse(answer.frames(), media_type="text/event-stream")

    async def _complete(self, request: Request) -> Response:
        body = await request.body()
        cached = (orjson.loads(body).get("kv_transfer_params") or {}).get("cache_id")
        return await self._reply(request, "cached_complete" if cached else "complete", self._begin_text)

    async def _begin_text(self, body: Body) -> Response:
        asked = parse(CompletionRequest, body)
        tokens = str(asked.prompt).split()
        self._check_length(tokens)
        answer = TextAnswer(self, asked, tokens, self._look_up(asked, tokens))
        return StreamingResponse(answer.frames(), media_type="text/event-stream")

    def _look_up(self, asked: ChatRequest | CompletionRequest, tokens: list[str]) -> KVUsage:
        """What of the prompt stands in a cache."""
        params = asked.kv_transfer_params or KVTransferParams()
        if params.cache_id is not None:
            return self._over(self.stored.find(params.cache_id, asked.tenant_salt), params, tokens)
        known = self.stored.longest_exact(tokens, asked.tenant_salt) if params.reuse else 0
        return KVUsage(
            epoch=self.stored.epoch,
            path="exact" if known else "prefill",
            cached_tokens=known,
            prefill_ms=(len(tokens) - known) * MS_PER_TOKEN,
        )

    def _over(self, cache: Cache, params: KVTransferParams, tokens: list[str]) -> KVUsage:
        shared = common(cache.tokens, tokens)
        if params.require_exact and cache.provenance != "exact":
            raise CacheMismatch(f"{cache.cache_id} is {cache.provenance}; an exact one is required")
        if shared == 0:
            raise CacheMismatch(f"{cache.cache_id} holds other tokens than this prompt begins with")
        mapped = min(cache.num_mapped, shared)
        return KVUsage(
            epoch=self.stored.epoch,
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
                f"the prompt has {len(tokens)} tokens; {self.model} takes {self.max_model_len}", param="messages"
            )

    # Calls

    async def _reply(self, request: Request, name: str, work: Work) -> Response:
        raw = await request.body()
        body: Body = orjson.loads(raw) if raw else {}
        if name == "livez":
            return json_reply({})
        self.calls.append(Call(name, body))
        try:
            if name != "readyz" and request.headers.get(SECRET_HEADER) != self.secret:
                raise Unauthorized("the cluster secret is missing or wrong")
            reply = await self._until_gone(request, self.with_faults(name, work, body))
        except KvrelayError as error:
            retry = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
            return json_reply(error.body(), error.status, retry)
        return reply if isinstance(reply, Response) else json_reply(reply)

    async def _until_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work; when the caller hangs up first, the work is cancelled and the hang-up counted."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(until_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.num_hang_ups += 1
                raise KvrelayError("the caller is gone")
            return task.result()
        finally:
            for one in (task, gone):
                await cancel_and_wait(one)
