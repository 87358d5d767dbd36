"""How good mapped caches are in service: in idle time, some answers are compared with what a native cache expects.

    served      |head|◄─── mapped ───►|◄─ tail ─►|◄─ answer ─►|
    native      |◄───────── read in full ───────►|◄─ answer ─►|     a little at a time, none while others work
    compared                                    |◄ next token ►|

What is found goes to the bundle, whose quality switch it is. Of what was served nothing is pinned meanwhile: a cache
that has gone is a comparison less. Tokens are forgotten once compared, and never logged.

A bundle that was switched off is tried out on the handoffs that are refused for it: what it would have made is made in
idle time, compared over the prompt's own last tokens, and dropped. Nobody is served from it.

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
from workers.serving.idle import PATIENCE_S, STEP_TOKENS, IdleTime
from workers.serving.reuse import find_reuse, load_reused
from workers.serving.transfer import Transfers

log = structlog.get_logger()

R = TypeVar("R")

MAX_WAITING = 4  # answers: the oldest gives way, as its cache is the likeliest to be gone


@dataclass(frozen=True)
class ServedAnswer:
    """An answer that was served over a mapped cache: the prompt's `num_prompt` tokens, and those written."""

    cache_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    num_prompt: int
    tenant_salt: str = field(repr=False)
    num_handed: int | None = None  # of the cache so many first tokens only; None: all

    @property
    def read(self) -> tuple[int, ...]:
        """What stands before the first place that is compared."""
        return self.token_ids[: self.num_prompt - 1]

    @property
    def compared(self) -> tuple[int, ...]:
        """The last token of the prompt, and those written: behind each, a next one is expected."""
        return self.token_ids[self.num_prompt - 1 :][:STEP_TOKENS]


def _check_length(num_tokens: int, refused: TransferRequest) -> None:
    if num_tokens <= refused.native_head + DEFAULT_NATIVE_TAIL + STEP_TOKENS:
        raise InvalidRequest(f"{num_tokens} tokens are too few to try a bundle out on")


def compare(native: Tensor, mapped: Tensor) -> Comparison:
    """Of log-probabilities `(T, vocab)` at the same places."""
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
        patience_s: float = PATIENCE_S,
    ):
        self._engine = engine
        self._pool = pool
        self._bundles = bundles
        self._transfers = transfers
        self._metrics = metrics
        self._idle = IdleTime(engine, idle_s, patience_s=patience_s)
        self._waiting: deque[ServedAnswer] = deque()
        self._follow_bundles()

    def note(self, served: ServedAnswer) -> None:
        """To be compared when there is time, if the engine tells what is needed for it."""
        if not self._engine.supports_logprobs:
            self._count("unsupported")
            return
        self._waiting.append(served)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._count("dropped")

    def resume(self, bundle_id: str) -> BundleInfo:
        """As `Bundles.resume`."""
        info = self._bundles.resume(bundle_id)
        self._follow_bundles()
        return info

    async def run(self) -> None:
        """For ever. What fails is counted and logged."""
        await self._idle.run(self.compare_one, "shadow", self._count)

    async def compare_one(self) -> bool:
        """Whether there was an answer to compare, or a bundle to try out."""
        if self._waiting:
            await self._compare(self._waiting.popleft())
            self._count("ok")
        elif (refused := self._transfers.take_refused()) is not None:
            await self._try_out(refused)
            self._count("tried")
        else:
            return False
        return True

    def found(self, bundle: str, comparison: Comparison) -> None:
        """Counted, and judged by."""
        agreed = comparison.num_agreed
        self._metrics.shadow_kl.labels(bundle).observe(comparison.kl_mean)
        self._metrics.shadow_top1.labels(bundle, "same").inc(agreed)
        self._metrics.shadow_top1.labels(bundle, "other").inc(comparison.num_tokens - agreed)
        log.info("compared", bundle=bundle, num_tokens=comparison.num_tokens, num_agreed=agreed, kl=comparison.kl_mean)
        if self._bundles.compared(bundle, comparison):
            self._follow_bundles()

    async def _try_out(self, refused: TransferRequest) -> None:
        """Raises `InvalidRequest` for a prompt too short to tell anything, and what `Transfers.try_out` raises."""
        if refused.num_tokens is not None:
            _check_length(refused.num_tokens, refused)
        made = await self._step(partial(self._transfers.try_out, refused))
        try:
            _check_length(made.num_tokens, refused)
            token_ids = self._pool.peek(made.cache_id).token_ids
            num_read = made.num_tokens - STEP_TOKENS
            num_handed = num_read - DEFAULT_NATIVE_TAIL
            await self._compare(ServedAnswer(made.cache_id, token_ids, num_read + 1, refused.tenant_salt, num_handed))
        finally:
            self._pool.discard_if_present(made.cache_id)  # an exact one that has taken its place is a user's

    async def _compare(self, served: ServedAnswer) -> None:
        params = KVTransferParams(cache_id=served.cache_id, num_tokens=served.num_handed)
        provenance, mapped = await self._expected(served, params)
        if not provenance.startswith(MAPPED):
            raise CacheNotFound(f"an exact cache has taken the place of {served.cache_id}")
        _, native = await self._expected(served, KVTransferParams())
        comparing = partial(self._engine.compute.run, partial(compare, native, mapped), priority=BACKGROUND)
        comparison = replace(await self._step(comparing), digest=token_digest(served.token_ids, served.tenant_salt))
        self.found(provenance.removeprefix(MAPPED), comparison)

    async def _expected(self, served: ServedAnswer, params: KVTransferParams) -> tuple[str, Tensor]:
        """Where the cache came from that `params` name (without an id: the longest exact prefix), and what is expected
        over it, as log-probabilities `(T, vocab)`."""
        async with self._engine.sequence(Claim(priority=BACKGROUND), len(served.token_ids)) as sequence:
            provenance = await self._step(partial(self._load, sequence, served, params))
            rest = served.read[sequence.num_tokens :]
            for begin in range(0, len(rest), STEP_TOKENS):
                await self._step(partial(sequence.prefill, rest[begin : begin + STEP_TOKENS]))
            return provenance, await self._step(partial(sequence.logprobs, served.compared))

    async def _load(self, sequence: TokenSequence, served: ServedAnswer, params: KVTransferParams) -> str:
        """What of the prompt stands in the pool; the cache that it came from is held no longer than that takes."""
        prompt = served.token_ids[: served.num_prompt]
        with find_reuse(self._pool, prompt, served.tenant_salt, params) as reuse:
            await load_reused(self._pool, sequence, served.read, reuse)
            return reuse.provenance

    async def _step(self, work: Callable[[], Awaitable[R]]) -> R:
        return await self._idle.step(work, "an answer was compared")

    def _follow_bundles(self) -> None:
        """Of a bundle that is off no cache is served or made, nor any that was read over such."""
        for info in self._bundles.infos:
            self._metrics.bundle_usable.labels(info.bundle_id).set(info.usable)
            follow = self._pool.unbar if info.usable else self._pool.bar
            follow(MAPPED + info.bundle_id)

    def _count(self, result: str) -> None:
        self._metrics.shadows.labels(result).inc()
