"""One answer, from a prompt's tokens to the KV that is kept of it.

    async with answerer.open(job) as answer:       1 the cache it names, or the longest exact prefix, is held
                                                   2 a place among the running requests
                                                   3 what stands in the pool is loaded, the rest is read
        async for piece in answer.pieces():        4 tokens are written
            ...
        usage = await answer.settle()              5 everything read and written is kept, and told

How well an answer's model agrees with itself: the next tokens it expects over the cache that served the answer,
against those it writes after reading the same prompt in full."""

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
CAPACITY_AHEAD = 256  # tokens of an answer that working memory has room for from the start


@dataclass
class JobProgress:
    """How far an answer has come: `phase` is one of those above."""

    phase: str = QUEUE


@dataclass(frozen=True)
class GenerationJob:
    """What to answer, and how. `arrived` and `deadline` are instants of `time.monotonic()`; `progress` is kept by who
    answers."""

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
    """Text that may be told, and the tokens told with it."""

    text: str
    tokens: tuple[Token, ...]


class GenerationService:
    """Answers jobs with one engine, over one pool."""

    def __init__(
        self, engine: Engine, pool: Pool, metrics: WorkerMetrics, uses: UsageCounts, shadow: Shadow, recalls: Recaller
    ):
        self.uses = uses
        self.shadow = shadow
        self.engine = engine
        self.pool = pool
        self.metrics = metrics
        self.recalls = recalls

    @asynccontextmanager
    async def open(self, job: GenerationJob) -> AsyncIterator[Generation]:
        """The prompt is read when the block is entered; leaving it frees everything, however it is left."""
        token_ids = job.prompt.token_ids
        capacity = len(token_ids) + min(job.max_tokens, CAPACITY_AHEAD)
        await self.recalls.for_prompt(token_ids, job.salt, job.params, priority=job.priority, deadline=job.deadline)
        with find_reuse(self.pool, token_ids, job.salt, job.params) as reuse:
            async with (
                self.engine.admit(priority=job.priority, deadline=job.deadline) as claim,
                self.engine.sequence(claim, capacity) as sequence,
            ):
                job.progress.phase, began = PREFILL, time.monotonic()
                reuse = await page_in(self.pool, sequence, token_ids, reuse)
                prefill_s = time.monotonic() - began
                self._count_prompt(len(token_ids), reuse, prefill_s)
                job.progress.phase = DECODE
                yield Generation(self, job, reuse, claim, sequence, prefill_s)

    def _count_prompt(self, num_tokens: int, reuse: Reuse, prefill_s: float) -> None:
        self.metrics.prompt_tokens.inc(num_tokens)
        self.metrics.prefix_queries.inc(num_tokens)
        self.metrics.prefix_hits.inc(reuse.cached_tokens)
        self.metrics.mapped_tokens.inc(reuse.mapped_tokens)
        self.metrics.prefill.observe(prefill_s)


class Generation:
    """An answer in the making. Its prompt has been read."""

    def __init__(
        self,
        answerer: GenerationService,
        job: GenerationJob,
        reuse: Reuse,
        claim: Claim,
        sequence: TokenSequence,
        prefill_s: float,
    ):
        self.job = job
        self.num_written = 0
        self.finish_reason: Literal["stop", "length"] = "length"
        self._answerer = answerer
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
        """What the prompt was read from, as far as the engine could load it by now."""
        return self._reuse.cut(self._sequence.num_loaded)

    @property
    def usage(self) -> KVUsage:
        """What is known before anything is kept: where the prompt came from, and the times so far."""
        return KVUsage(
            epoch=self._answerer.pool.epoch,
            path=self.reuse.path,
            provenance=self.reuse.provenance,
            cached_tokens=self.reuse.cached_tokens,
            mapped_tokens=self.reuse.mapped_tokens,
            stable_tokens=self.job.prompt.stable_tokens,
            queue_ms=self._claim.waited_s * 1e3,
            prefill_ms=self._prefill_s * 1e3,
            ttft_ms=self._ttft_s * 1e3,
        )

    async def pieces(self) -> AsyncGenerator[GenerationChunk, None]:
        """The answer as it is written, up to an end token, a stop string or `max_tokens`."""
        engine = self._answerer.engine
        writer = TextWriter(engine.tokenizer, self.job.stops)
        untold: list[Token] = []
        async with aclosing(self._sequence.generate(self.job.sampling, self.job.max_tokens)) as tokens:
            async for token in tokens:
                self._time_token()
                if token.id in engine.model.eos_ids:
                    self.finish_reason = "stop"
                    break
                untold.append(token)
                if text := writer.push(token.id):
                    yield GenerationChunk(text, tuple(untold))
                    untold = []
                if writer.stopped:
                    self.finish_reason = "stop"
                    break
        if (rest := writer.flush()) or untold:
            yield GenerationChunk(rest, tuple(untold))

    async def settle(self) -> KVUsage:
        """Keep what was read and written, probe if asked to, and tell what the engine did."""
        self._answerer.metrics.e2e.observe(time.monotonic() - self.job.arrived)
        self._answerer.metrics.generation_tokens.inc(self.num_written)
        self._answerer.metrics.answered(self.reuse.path)
        usage = self.usage
        entry = await self._keep()
        self._note_for_shadow()
        self._answerer.uses.note(self.reuse.hold.entry if self.reuse.hold else None, entry)
        if entry:
            usage = usage.model_copy(update=_told(entry))
        if agreement := await self._probe():
            usage = usage.model_copy(update=vars(agreement))
        return usage

    def _note_for_shadow(self) -> None:
        params = self.job.params
        if params.shadow and params.cache_id is not None and self.reuse.mapped_tokens:
            tokens = tuple(self._sequence.token_ids)
            self._answerer.shadow.note(ServedAnswer(params.cache_id, tokens, self.num_prompt, self.job.salt))

    def _time_token(self) -> None:
        now, metrics = time.monotonic(), self._answerer.metrics
        if self.num_written:
            metrics.inter_token.observe(now - self._last_token_at)
        else:
            self._ttft_s = now - self.job.arrived
            metrics.ttft.observe(self._ttft_s)
        self.num_written += 1
        self._last_token_at = now

    async def _keep(self) -> CacheEntry | None:
        """The answer is worth more than its cache: when the pool has no room, or the time is over, it goes without."""
        if not self.job.params.store:
            return None
        try:
            return await page_out(
                self._answerer.engine,
                self._answerer.pool,
                self._claim,
                self._sequence,
                self.reuse,
                salt=self.job.salt,
                ttl_s=self.job.params.ttl_s,
            )
        except KvrelayError as error:
            self._answerer.metrics.not_stored.labels(error.code).inc()
            log.warning("answer_not_kept", reason=error.code, num_tokens=self._sequence.num_tokens)
            return None

    async def _probe(self) -> Agreement | None:
        if not self.job.params.agreement_probe:
            return None
        try:
            return await probe_agreement(
                self._answerer.engine,
                self._claim,
                self._sequence,
                self.job.prompt.token_ids,
                self.job.params.agreement_probe,
            )
        except DeadlineExceeded:
            return None  # the answer is there; only what was to be learnt of it is missing


def _told(entry: CacheEntry) -> dict[str, object]:
    """What `KVUsage` says of the cache that was kept."""
    return {
        "cache_id": entry.cache_id,
        "num_tokens": entry.num_tokens,
        "digest": entry.digest,
        "expires_at": entry.expires_at,
        "provenance": entry.provenance,
    }


@dataclass(frozen=True)
class Agreement:
    """`top1_agreement`: share of teacher-forced tokens on which both expect the same next one.
    `full_prefill_ms`: the native reading, up to its first token."""

    top1_agreement: float
    full_prefill_ms: float


async def probe_agreement(
    engine: Engine, claim: Claim, served: TokenSequence, prompt: Sequence[int], num_tokens: int
) -> Agreement:
    """Greedily continue the prompt natively by up to `num_tokens`, and teacher-force `served` with that.

    `served` must begin with the prompt; it is cut back to it and then holds the probe's tokens.
    """
    num_tokens = min(num_tokens, engine.model.max_model_len - len(prompt))
    native, full_prefill_ms = await _native_continuation(engine, claim, prompt, num_tokens)
    served.truncate(len(prompt) - 1)
    expected = await served.predict([prompt[-1], *native[:-1]])
    agreed = sum(mine == theirs for mine, theirs in zip(expected, native, strict=True))
    return Agreement(agreed / len(native), full_prefill_ms)


async def _native_continuation(
    engine: Engine, claim: Claim, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], float]:
    written: list[int] = []
    first_ms = 0.0
    async with engine.sequence(claim, len(prompt) + num_tokens) as sequence:
        began = time.perf_counter()
        await sequence.prefill(prompt)
        async for token in sequence.generate(Sampling(), num_tokens):
            first_ms = first_ms or (time.perf_counter() - began) * 1e3
            written.append(token.id)
            if token.id in engine.model.eos_ids:
                break
    return written, first_ms
