"""One answer, from a prompt's tokens to the cache that is stored of it.

async with generations.open(job) as generation:    1 hold the named cache, or the longest exact prefix
                                                   2 wait for a slot among the running requests
                                                   3 load what is in the pool, prefill the rest
    async for chunk in generation.chunks():        4 decode
        ...
    usage = await generation.finish()              5 store the whole sequence and report
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog

from workers.api.errors import DeadlineExceeded, KvrelayError
from workers.api.schemas import KVTransferParams, KVUsage
from workers.engines.base import Engine, Sampling, Token, TokenSequence
from workers.engines.scheduling import Claim
from workers.engines.tokenizer import PromptTokens, TextWriter
from workers.metrics import WorkerMetrics
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.idle import UsageCounts
from workers.serving.reuse import Recaller, Reuse, find_reuse, page_in, page_out
from workers.serving.shadow import ServedAnswer, Shadow

log = structlog.get_logger()

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
CAPACITY_AHEAD = 256  # answer tokens for which working memory is allocated at the start


@dataclass
class JobProgress:
    """`phase` is one of those above."""

    phase: str = QUEUE


@dataclass(frozen=True)
class GenerationJob:
    """What to answer, and how. `arrived` and `deadline` are instants of `time.monotonic()`. `progress` is updated while
    the job runs."""

    prompt: PromptTokens
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    params: KVTransferParams
    salt: str
    arrived: float
    deadline: float | None = None
    priority: int = 0
    progress: JobProgress = field(default_factory=JobProgress, compare=False)


@dataclass(frozen=True)
class GenerationChunk:
    """Text that can be sent, and its tokens."""

    text: str
    tokens: tuple[Token, ...]


class GenerationService:
    """Answers jobs with one engine, over one pool."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        metrics: WorkerMetrics,
        usage_counts: UsageCounts,
        shadow: Shadow,
        recaller: Recaller,
    ):
        self.usage_counts = usage_counts
        self.shadow = shadow
        self.engine = engine
        self.pool = pool
        self.metrics = metrics
        self.recaller = recaller

    @asynccontextmanager
    async def open(self, job: GenerationJob) -> AsyncIterator[Generation]:
        """Prefill the prompt and yield the generation. Leaving the block, in whichever way, frees everything."""
        token_ids, metrics = job.prompt.token_ids, self.metrics
        capacity = len(token_ids) + min(job.max_tokens, CAPACITY_AHEAD)
        await self.recaller.for_prompt(token_ids, job.salt, job.params, priority=job.priority, deadline=job.deadline)
        with find_reuse(self.pool, token_ids, job.salt, job.params) as reuse:
            async with (
                self.engine.admit(priority=job.priority, deadline=job.deadline) as claim,
                self.engine.sequence(claim, capacity) as sequence,
            ):
                job.progress.phase, started = PREFILL, time.monotonic()
                reuse = await page_in(self.pool, sequence, token_ids, reuse)
                prefill_s = time.monotonic() - started
                metrics.prompt_tokens.inc(len(token_ids))
                metrics.prefix_queries.inc(len(token_ids))
                metrics.prefix_hits.inc(reuse.cached_tokens)
                metrics.mapped_tokens.inc(reuse.mapped_tokens)
                metrics.prefill.observe(prefill_s)
                job.progress.phase = DECODE
                yield Generation(self, job, reuse, claim, sequence, prefill_s)


class Generation:
    """An answer in progress. Its prompt has been prefilled."""

    def __init__(
        self,
        service: GenerationService,
        job: GenerationJob,
        reuse: Reuse,
        claim: Claim,
        sequence: TokenSequence,
        prefill_s: float,
    ):
        self.job = job
        self.num_generated = 0
        self.finish_reason: Literal["stop", "length"] = "length"
        self._service = service
        self._reuse = reuse
        self._claim = claim
        self._sequence = sequence
        self._prefill_s = prefill_s
        self._ttft_s = 0.0
        self._last_token_at = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.job.prompt.token_ids)

    @property
    def reuse(self) -> Reuse:
        """What the prompt was loaded from, as far as the engine could load it until now."""
        return self._reuse.limited(self._sequence.num_loaded)

    @property
    def usage(self) -> KVUsage:
        """What is known before the sequence is stored: where the prompt came from, and the times so far."""
        return KVUsage(
            epoch=self._service.pool.epoch,
            path=self.reuse.path,
            provenance=self.reuse.provenance,
            cached_tokens=self.reuse.cached_tokens,
            mapped_tokens=self.reuse.mapped_tokens,
            stable_tokens=self.job.prompt.stable_tokens,
            queue_ms=self._claim.waited_s * 1e3,
            prefill_ms=self._prefill_s * 1e3,
            ttft_ms=self._ttft_s * 1e3,
        )

    async def chunks(self) -> AsyncGenerator[GenerationChunk, None]:
        """Generate up to an end token, a stop string or `max_tokens`."""
        engine = self._service.engine
        writer = TextWriter(engine.tokenizer, self.job.stops)
        pending: list[Token] = []
        async with aclosing(self._sequence.generate(self.job.sampling, self.job.max_tokens)) as tokens:
            async for token in tokens:
                self._time_token()
                if token.id in engine.model.eos_ids:
                    self.finish_reason = "stop"
                    break
                pending.append(token)
                if text := writer.push(token.id):
                    yield GenerationChunk(text, tuple(pending))
                    pending = []
                if writer.stopped:
                    self.finish_reason = "stop"
                    break
        if (rest := writer.flush()) or pending:
            yield GenerationChunk(rest, tuple(pending))

    async def finish(self) -> KVUsage:
        """Store the sequence, run a requested agreement probe, and return the final usage."""
        service, params = self._service, self.job.params
        service.metrics.e2e.observe(time.monotonic() - self.job.arrived)
        service.metrics.generation_tokens.inc(self.num_generated)
        service.metrics.answered(self.reuse.path)
        usage = self.usage
        entry = await self._store()
        if params.shadow and params.cache_id is not None and self.reuse.mapped_tokens:
            tokens = tuple(self._sequence.token_ids)
            service.shadow.add(ServedAnswer(params.cache_id, tokens, self.num_prompt, self.job.salt))
        service.usage_counts.count(self.reuse.hold.entry if self.reuse.hold else None, entry)
        if entry:
            stored = ("cache_id", "num_tokens", "digest", "expires_at", "provenance")
            usage = usage.model_copy(update={name: getattr(entry, name) for name in stored})
        if agreement := await self._probe():
            usage = usage.model_copy(update=vars(agreement))
        return usage

    def _time_token(self) -> None:
        now, metrics = time.monotonic(), self._service.metrics
        if self.num_generated:
            metrics.inter_token.observe(now - self._last_token_at)
        else:
            self._ttft_s = now - self.job.arrived
            metrics.ttft.observe(self._ttft_s)
        self.num_generated += 1
        self._last_token_at = now

    async def _store(self) -> CacheEntry | None:
        """Store the sequence. The answer matters more: without room or time, it goes without a cache."""
        if not self.job.params.store:
            return None
        try:
            return await page_out(
                self._service.engine,
                self._service.pool,
                self._claim,
                self._sequence,
                self.reuse,
                salt=self.job.salt,
                ttl_s=self.job.params.ttl_s,
            )
        except KvrelayError as error:
            self._service.metrics.not_stored.labels(error.code).inc()
            log.warning("answer_not_stored", reason=error.code, num_tokens=self._sequence.num_tokens)
            return None

    async def _probe(self) -> Agreement | None:
        num_tokens = self.job.params.agreement_probe
        if not num_tokens:
            return None
        try:
            return await probe_agreement(
                self._service.engine, self._claim, self._sequence, self.job.prompt.token_ids, num_tokens
            )
        except DeadlineExceeded:
            return None  # the answer is complete without it


# -- agreement probe ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """`top1_agreement` is the share of teacher-forced tokens for which both caches predict the same next one.
    `full_prefill_ms` is the time of the native prefill up to its first token."""

    top1_agreement: float
    full_prefill_ms: float


async def probe_agreement(
    engine: Engine, claim: Claim, served: TokenSequence, prompt: Sequence[int], num_tokens: int
) -> Agreement:
    """Compare predictions over the served cache with a native greedy continuation of up to `num_tokens` tokens.

    `served` must begin with the prompt. It is truncated to it, and then holds the probe's tokens.
    """
    num_tokens = min(num_tokens, engine.model.max_model_len - len(prompt))
    native: list[int] = []
    first_ms = 0.0
    async with engine.sequence(claim, len(prompt) + num_tokens) as sequence:
        started = time.perf_counter()
        await sequence.prefill(prompt)
        async for token in sequence.generate(Sampling(), num_tokens):
            first_ms = first_ms or (time.perf_counter() - started) * 1e3
            native.append(token.id)
            if token.id in engine.model.eos_ids:
                break
    served.truncate(len(prompt) - 1)
    predicted = await served.predict([prompt[-1], *native[:-1]])
    num_equal = sum(ours == theirs for ours, theirs in zip(predicted, native, strict=True))
    return Agreement(num_equal / len(native), first_ms)
