"""`PromptEncoder`: prompts to token ids, on a thread of its own: neither the event loop nor the compute thread waits.

Reading a prefix ahead of the requests that share it."""

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


class PromptEncoder:
    """Tokenises for one engine, on one event loop. Raises `InvalidRequest` for what its model cannot read, and
    `Overloaded` when too many prompts wait."""

    def __init__(self, engine: Engine, *, max_waiting: int):
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.model.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(self, prompt: Prompt) -> PromptTokens:
        """Any of a prompt's three forms."""
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

    async def read_stable(self, prompt: Prompt) -> list[int]:
        """The part of a prompt that later requests share: up to the boundary, or everything if none is marked."""
        tokens = await self.read(prompt)
        if prompt.stable_messages is None:
            return tokens.token_ids
        if not tokens.stable_tokens:
            raise InvalidRequest(
                f"the first {prompt.stable_messages} messages have no stable tokens: rendered alone, they share no "
                "beginning with the whole conversation",
                param="stable_messages",
            )
        return tokens.token_ids[: tokens.stable_tokens]

    async def read_chat(self, request: ChatRequest) -> PromptTokens:
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

    async def read_completion(self, request: CompletionRequest) -> PromptTokens:
        if not request.prompt:
            raise InvalidRequest("prompt is empty; at least one token is needed", param="prompt")
        if isinstance(request.prompt, str):
            return await self._run(partial(self._tokenizer.encode, request.prompt))
        return await self._run(partial(self._tokenizer.check_ids, request.prompt, param="prompt"))

    def check_length(self, num_prompt: int, num_answer: int) -> None:
        """Raise `ContextLengthExceeded` unless prompt and answer fit together."""
        if num_prompt + num_answer > self._max_model_len:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and {num_answer} to write are {num_prompt + num_answer}; "
                f"the context length is {self._max_model_len}",
                param="max_tokens" if num_prompt < self._max_model_len else "messages",
            )

    def close(self) -> None:
        self._thread.shutdown()

    async def _run(self, encode: Callable[[], PromptTokens]) -> PromptTokens:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} prompts wait for the tokenizer already", retry_after_s=RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            # A caller who has gone leaves at most the text that is being read just then.
            return await asyncio.wrap_future(self._thread.submit(encode))
        finally:
            self._num_waiting -= 1


PATIENCE_S = 3600.0  # of a caller who names no deadline


@dataclass(frozen=True)
class _PrefillResult:
    entry: CacheEntry
    cached_tokens: int
    prefill_s: float


class Prefiller:
    """Reads prefixes into the pool. The same prefix asked for twice at once is read once."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        prompts: PromptEncoder,
        metrics: WorkerMetrics,
        recalls: Recaller,
        max_jobs: int,
    ):
        self._engine = engine
        self._pool = pool
        self._prompts = prompts
        self._metrics = metrics
        self._recalls = recalls
        self._work: SharedWork[_PrefillResult] = SharedWork(max_jobs=max_jobs)

    async def aclose(self) -> None:
        await self._work.aclose()

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        """Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`."""
        token_ids = await self._prompts.read_stable(request)
        if len(token_ids) > self._engine.model.max_model_len:
            raise ContextLengthExceeded(
                f"{len(token_ids)} tokens to read; the context length is {self._engine.model.max_model_len}"
            )
        done = await self._shared(token_ids, request)
        return PrefillReply(
            cache_id=done.entry.cache_id,
            num_tokens=done.entry.num_tokens,
            digest=done.entry.digest,
            epoch=self._pool.epoch,
            expires_at=done.entry.expires_at,
            cached_tokens=done.cached_tokens,
            prefill_ms=done.prefill_s * 1e3,
        )

    async def _shared(self, token_ids: Sequence[int], request: PrefillRequest) -> _PrefillResult:
        patience_s = PATIENCE_S if request.deadline_ms is None else request.deadline_ms / 1e3
        key = (token_digest(token_ids, request.tenant_salt), request.ttl_s)
        return await self._work.run(
            key,
            time.monotonic() + patience_s,
            lambda job: self._read(token_ids, request.tenant_salt, request.ttl_s),
        )

    async def _read(self, token_ids: Sequence[int], salt: str, ttl_s: float) -> _PrefillResult:
        params = KVTransferParams()
        await self._recalls.for_prompt(token_ids, salt, params)
        with find_reuse(self._pool, token_ids, salt, params) as reuse:
            async with self._engine.admit() as claim, self._engine.sequence(claim, len(token_ids)) as sequence:
                began = time.monotonic()
                reuse = await page_in(self._pool, sequence, token_ids, reuse)
                prefill_s = time.monotonic() - began
                entry = await page_out(self._engine, self._pool, claim, sequence, reuse, salt=salt, ttl_s=ttl_s)
        self._metrics.prefill.observe(prefill_s)
        self._metrics.prefix_queries.inc(len(token_ids))
        self._metrics.prefix_hits.inc(reuse.cached_tokens)
        return _PrefillResult(entry, reuse.cached_tokens, prefill_s)
