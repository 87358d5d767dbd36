"""`PromptEncoder`: prompts to token ids. `Prefiller`: prefixes prefilled ahead of the requests that share them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from workers.api.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from workers.api.schemas import ChatRequest, CompletionRequest, KVTransferParams, PrefillReply, PrefillRequest, Prompt
from workers.digest import token_digest
from workers.engines.base import Engine
from workers.engines.tokenizer import PromptTokens
from workers.metrics import WorkerMetrics
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.reuse import Recaller, find_reuse, page_in, page_out
from workers.sharing import SharedWork

RETRY_AFTER_S = 1.0
DEFAULT_DEADLINE_S = 3600.0  # for prefills without a deadline


class PromptEncoder:
    """Tokenises for one engine on a thread of its own, so that neither the event loop nor the compute thread waits.

    Raises `InvalidRequest` for prompts that the model cannot take, `Overloaded` if too many prompts wait. For use on
    one event loop.
    """

    def __init__(self, engine: Engine, *, max_waiting: int):
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.model.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, prompt: Prompt) -> PromptTokens:
        """Encode any of a prompt's three forms."""
        tokenizer = self._tokenizer
        if prompt.messages is not None:
            return await self._run(
                partial(
                    tokenizer.encode_chat, prompt.messages, tools=prompt.tools, stable_messages=prompt.stable_messages
                )
            )
        if prompt.token_ids is not None:
            return await self._run(partial(tokenizer.check_ids, prompt.token_ids))
        return await self._run(partial(tokenizer.encode, prompt.prefix or ""))

    async def encode_stable(self, prompt: Prompt) -> list[int]:
        """Encode the part of a prompt that later requests share: up to the boundary, or all of it if none is marked."""
        tokens = await self.encode(prompt)
        if prompt.stable_messages is None:
            return tokens.token_ids
        if not tokens.stable_tokens:
            raise InvalidRequest(
                f"the first {prompt.stable_messages} messages have no stable tokens: rendered alone, they begin "
                "differently than in the whole conversation",
                param="stable_messages",
            )
        return tokens.token_ids[: tokens.stable_tokens]

    async def encode_chat(self, request: ChatRequest) -> PromptTokens:
        if (request.stable_messages or 0) > len(request.messages):
            raise InvalidRequest(
                f"stable_messages is {request.stable_messages}, but there are {len(request.messages)} messages",
                param="stable_messages",
            )
        return await self._run(
            partial(
                self._tokenizer.encode_chat,
                request.messages,
                tools=request.tools,
                stable_messages=request.stable_messages,
            )
        )

    async def encode_completion(self, request: CompletionRequest) -> PromptTokens:
        if not request.prompt:
            raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
        if isinstance(request.prompt, str):
            return await self._run(partial(self._tokenizer.encode, request.prompt))
        return await self._run(partial(self._tokenizer.check_ids, request.prompt, param="prompt"))

    def check_length(self, num_prompt: int, num_answer: int) -> None:
        """Raise `ContextLengthExceeded` unless prompt and answer fit into the context together."""
        if num_prompt + num_answer > self._max_model_len:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and {num_answer} answer tokens are {num_prompt + num_answer}; "
                f"the context length is {self._max_model_len}",
                param="max_tokens" if num_prompt < self._max_model_len else "messages",
            )

    def close(self) -> None:
        self._thread.shutdown()

    async def _run(self, encode: Callable[[], PromptTokens]) -> PromptTokens:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._num_waiting} prompts are waiting for the tokenizer; the limit is {self._max_waiting}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            # If the caller is cancelled, at most the running encoding is wasted.
            return await asyncio.wrap_future(self._thread.submit(encode))
        finally:
            self._num_waiting -= 1


@dataclass(frozen=True)
class _PrefillResult:
    entry: CacheEntry
    cached_tokens: int
    prefill_s: float


class Prefiller:
    """Prefills prefixes into the pool. Equal prefills at the same time share one."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        prompts: PromptEncoder,
        metrics: WorkerMetrics,
        recaller: Recaller,
        max_jobs: int,
    ):
        self._engine = engine
        self._pool = pool
        self._prompts = prompts
        self._metrics = metrics
        self._recaller = recaller
        self._work: SharedWork[_PrefillResult] = SharedWork(max_jobs=max_jobs)

    async def aclose(self) -> None:
        await self._work.aclose()

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        """Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`."""
        token_ids, salt, ttl_s = await self._prompts.encode_stable(request), request.tenant_salt, request.ttl_s
        max_tokens = self._engine.model.max_model_len
        if len(token_ids) > max_tokens:
            raise ContextLengthExceeded(f"the prefix has {len(token_ids)} tokens; the context length is {max_tokens}")
        deadline_s = DEFAULT_DEADLINE_S if request.deadline_ms is None else request.deadline_ms / 1e3
        result = await self._work.run(
            (token_digest(token_ids, salt), ttl_s),
            time.monotonic() + deadline_s,
            lambda job: self._prefill(token_ids, salt, ttl_s),
        )
        return PrefillReply(
            cache_id=result.entry.cache_id,
            num_tokens=result.entry.num_tokens,
            digest=result.entry.digest,
            epoch=self._pool.epoch,
            expires_at=result.entry.expires_at,
            cached_tokens=result.cached_tokens,
            prefill_ms=result.prefill_s * 1e3,
        )

    async def _prefill(self, token_ids: Sequence[int], salt: str, ttl_s: float) -> _PrefillResult:
        params = KVTransferParams()
        await self._recaller.for_prompt(token_ids, salt, params)
        with find_reuse(self._pool, token_ids, salt, params) as reuse:
            async with self._engine.admit() as claim, self._engine.sequence(claim, len(token_ids)) as sequence:
                started = time.monotonic()
                reuse = await page_in(self._pool, sequence, token_ids, reuse)
                prefill_s = time.monotonic() - started
                entry = await page_out(self._engine, self._pool, claim, sequence, reuse, salt=salt, ttl_s=ttl_s)
        self._metrics.prefill.observe(prefill_s)
        self._metrics.prefix_queries.inc(len(token_ids))
        self._metrics.prefix_hits.inc(reuse.cached_tokens)
        return _PrefillResult(entry, reuse.cached_tokens, prefill_s)
