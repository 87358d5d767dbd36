"""`Shadow`: measures the quality of mapped caches in service. In idle time it compares answers with a native cache.

    served      |head|◄─── mapped ───►|◄─ tail ─►|◄─ answer ─►|
    native      |◄──────── full native prefill ─►|◄─ answer ─►|     a little at a time, none while others work
    compared                                     |◄ next token ►|

The comparison goes to the bundle, which it may switch off. The served cache is not pinned meanwhile: if it is gone, the
comparison is skipped. Tokens are dropped after the comparison, and never logged.

A bundle that was switched off is tried out on handoffs that are refused because of it. Its cache is made in idle time,
compared over the prompt's own last tokens, and dropped. No request is served from it.

    tried out   |head|◄─── mapped ───►|◄─ tail ─►|◄─ compared ─►|     all of it the prompt's
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import structlog
from torch import Tensor

from workers.api.errors import CacheNotFound, InvalidRequest
from workers.api.schemas import DEFAULT_NATIVE_TAIL, MAPPED, BundleInfo, KVTransferParams, TransferRequest
from workers.bundles import Bundles, Comparison
from workers.digest import token_digest
from workers.engines.base import Engine, TokenSequence
from workers.engines.scheduling import BACKGROUND, Claim
from workers.metrics import WorkerMetrics
from workers.pool.pool import Pool
from workers.serving.idle import MAX_WAIT_S, STEP_TOKENS, IdleTime
from workers.serving.reuse import find_reuse, load_reused
from workers.serving.transfer import Transfers

log = structlog.get_logger()

R = TypeVar("R")

MAX_WAITING = 4  # answers; the oldest is dropped first, as its cache is the likeliest to be gone


@dataclass(frozen=True)
class ServedAnswer:
    """An answer served over a mapped cache: the `num_prompt` tokens of the prompt, and the generated ones. Only the
    first `num_handed` tokens of the cache are used; None: all."""

    cache_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    num_prompt: int
    tenant_salt: str = field(repr=False)
    num_handed: int | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the compared ones."""
        return self.token_ids[: self.num_prompt - 1]

    @property
    def compared(self) -> tuple[int, ...]:
        """The prompt's last token and the generated ones. The predictions after each of them are compared."""
        return self.token_ids[self.num_prompt - 1 :][:STEP_TOKENS]


def compare(native: Tensor, mapped: Tensor) -> Comparison:
    """Compare log-probabilities `(T, vocab)` at the same positions."""
    native, mapped = native.double(), mapped.double()
    kl = (native.exp() * (native - mapped)).sum(dim=-1)  # (T,)
    agreed = native.argmax(dim=-1) == mapped.argmax(dim=-1)  # (T,)
    return Comparison(len(native), int(agreed.sum()), float(kl.sum()))


class Shadow:
    """Compares answers of one worker, one at a time, when the engine has been idle for `idle_s`."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        bundles: Bundles,
        transfers: Transfers,
        metrics: WorkerMetrics,
        idle_s: float,
        *,
        max_wait_s: float = MAX_WAIT_S,
    ):
        self._engine = engine
        self._pool = pool
        self._bundles = bundles
        self._transfers = transfers
        self._metrics = metrics
        self._idle = IdleTime(engine, idle_s, max_wait_s=max_wait_s)
        self._waiting: deque[ServedAnswer] = deque()
        self._apply_bundle_states()

    def add(self, served: ServedAnswer) -> None:
        """Queue an answer for comparison, if the engine supports it."""
        if not self._engine.supports_logprobs:
            self._count("unsupported")
            return
        self._waiting.append(served)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._count("dropped")

    def resume(self, bundle_id: str) -> BundleInfo:
        """Like `Bundles.resume`, and serve its caches again."""
        info = self._bundles.resume(bundle_id)
        self._apply_bundle_states()
        return info

    async def run(self) -> None:
        """Run forever. Failures are counted and logged."""
        await self._idle.run(self.compare_one, "shadow", self._count)

    async def compare_one(self) -> bool:
        """Compare one answer, or try out one bundle. Returns whether there was one."""
        if self._waiting:
            await self._compare(self._waiting.popleft())
            self._count("ok")
        elif (refused := self._transfers.take_refused()) is not None:
            await self._try_out(refused)
            self._count("tried")
        else:
            return False
        return True

    def record(self, bundle: str, comparison: Comparison) -> None:
        """Count a comparison, and let the bundle be judged by it."""
        agreed = comparison.num_agreed
        self._metrics.shadow_kl.labels(bundle).observe(comparison.kl_mean)
        self._metrics.shadow_top1.labels(bundle, "same").inc(agreed)
        self._metrics.shadow_top1.labels(bundle, "other").inc(comparison.num_tokens - agreed)
        log.info("compared", bundle=bundle, num_tokens=comparison.num_tokens, num_agreed=agreed, kl=comparison.kl_mean)
        if self._bundles.record(bundle, comparison):
            self._apply_bundle_states()

    async def _try_out(self, refused: TransferRequest) -> None:
        """Raises `InvalidRequest` if the prompt is too short, and what `Transfers.try_out` raises."""
        if refused.num_tokens is not None:
            _check_length(refused.num_tokens, refused)
        reply = await self._step(partial(self._transfers.try_out, refused))
        try:
            _check_length(reply.num_tokens, refused)
            token_ids = self._pool.peek(reply.cache_id).token_ids
            num_context = reply.num_tokens - STEP_TOKENS
            num_handed = num_context - DEFAULT_NATIVE_TAIL
            served = ServedAnswer(reply.cache_id, token_ids, num_context + 1, refused.tenant_salt, num_handed)
            await self._compare(served)
        finally:
            self._pool.discard_if_present(reply.cache_id)  # an exact cache that has replaced it is a user's

    async def _compare(self, served: ServedAnswer) -> None:
        params = KVTransferParams(cache_id=served.cache_id, num_tokens=served.num_handed)
        provenance, mapped = await self._predict(served, params)
        if not provenance.startswith(MAPPED):
            raise CacheNotFound(f"an exact cache has replaced {served.cache_id}")
        _, native = await self._predict(served, KVTransferParams())
        comparing = partial(self._engine.compute.run, partial(compare, native, mapped), priority=BACKGROUND)
        comparison = replace(await self._step(comparing), digest=token_digest(served.token_ids, served.tenant_salt))
        self.record(provenance.removeprefix(MAPPED), comparison)

    async def _predict(self, served: ServedAnswer, params: KVTransferParams) -> tuple[str, Tensor]:
        """Return the provenance of the cache that `params` names (without an id: the longest exact prefix), and the
        log-probabilities `(T, vocab)` over it."""
        async with self._engine.sequence(Claim(priority=BACKGROUND), len(served.token_ids)) as sequence:
            provenance = await self._step(partial(self._load, sequence, served, params))
            rest = served.context[sequence.num_tokens :]
            for begin in range(0, len(rest), STEP_TOKENS):
                await self._step(partial(sequence.prefill, rest[begin : begin + STEP_TOKENS]))
            return provenance, await self._step(partial(sequence.logprobs, served.compared))

    async def _load(self, sequence: TokenSequence, served: ServedAnswer, params: KVTransferParams) -> str:
        """Load what is in the pool; the cache is held only meanwhile. Returns its provenance."""
        prompt = served.token_ids[: served.num_prompt]
        with find_reuse(self._pool, prompt, served.tenant_salt, params) as reuse:
            await load_reused(self._pool, sequence, served.context, reuse)
            return reuse.provenance

    async def _step(self, work: Callable[[], Awaitable[R]]) -> R:
        return await self._idle.step(work, "compare an answer")

    def _apply_bundle_states(self) -> None:
        """Bar the caches of bundles that are off, and those computed over them."""
        for info in self._bundles.infos:
            self._metrics.bundle_usable.labels(info.bundle_id).set(info.usable)
            apply = self._pool.unbar if info.usable else self._pool.bar
            apply(MAPPED + info.bundle_id)

    def _count(self, result: str) -> None:
        self._metrics.shadows.labels(result).inc()


def _check_length(num_tokens: int, refused: TransferRequest) -> None:
    needed = refused.native_head + DEFAULT_NATIVE_TAIL + STEP_TOKENS + 1
    if num_tokens < needed:
        raise InvalidRequest(f"{num_tokens} tokens are too few to try a bundle out; at least {needed} are needed")
