"""A request's prefixes in the registry: what is known of them, what turns out to be lost, what is filed for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.metrics import Metrics
from gateway.prefix import Chain
from gateway.state.registry import Entry, Registry
from gateway.state.tenants import Tenant
from gateway.turn import Found, Known, Turn
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Stream
from workers.api.errors import InvalidRequest
from workers.api.schemas import CacheReply, KVUsage

TEXT = "text"  # told apart from a chat of one message: no template is put around a text


class Prefixes:
    """Between a turn and the registry. What is found is a hint: its worker has the last word."""

    def __init__(self, registry: Registry, metrics: Metrics):
        self._registry = registry
        self._metrics = metrics

    async def look_up(self, turn: Turn, tiers: Sequence[Tier]) -> None:
        """One question, over the chains of every tier that this request may use, longest first."""
        chains = {tier.name: chain_of(turn, tier) for tier in tiers}
        keys = [key for chain in chains.values() for key in chain.longest_first()]
        entries = dict(zip(keys, await self._registry.get_many(keys), strict=True))
        for tier in tiers:
            chain = chains[tier.name]
            known = turn.known[tier.name] = Known(chain, _usable(turn, tier, chain, entries))
            self._metrics.prefix_lookups.labels(tier.name).inc()
            self._metrics.prefix_lookup_hits.labels(tier.name).inc(bool(known.found))

    async def forget(self, turn: Turn, tier: str, lost: Found) -> None:
        """The worker does not hold it: a miss after all, for this request too."""
        turn.known[tier] = turn.known[tier].without(lost)
        self._metrics.prefix_lookup_stale.labels(tier).inc()
        await self._registry.forget(lost.key, lost.entry)

    async def file_prompt(self, turn: Turn, tier: str, worker: str, reply: CacheReply) -> None:
        """The whole prompt, as a worker has just read it."""
        key = turn.known[tier].chain.hashes[-1]
        await self._registry.put_many({key: entry_of(turn.tenant, worker, reply.num_tokens, reply.expires_at, reply)})

    async def file_answer(self, turn: Turn, stream: Stream) -> None:
        """The cache of prompt and answer, for the turn after.

        A chat's under the messages with the reply. An exact one also under the prompt alone and under its stable part,
        where others may find it; a mapped one is for this conversation only, and must not hide an exact one.
        """
        usage, known = stream.answer.kv, turn.known.get(stream.worker.tier)
        if usage is None or usage.cache_id is None or usage.expires_at is None or known is None:
            return
        hashes = known.chain.hashes
        counts = {}
        if turn.request.is_chat:
            counts[known.chain.extended(stream.answer.message).hashes[-1]] = usage.num_tokens
        if usage.provenance == "exact":
            counts[hashes[-1]] = stream.answer.num_prompt_tokens
            if turn.num_stable and usage.stable_tokens:
                counts[hashes[turn.num_stable]] = usage.stable_tokens
        worker, expires_at, most = stream.worker.id, usage.expires_at, usage.num_tokens
        await self._registry.put_many(
            {key: entry_of(turn.tenant, worker, min(count, most), expires_at, usage) for key, count in counts.items()}
        )


def _usable(turn: Turn, tier: Tier, chain: Chain, entries: Mapping[str, Entry | None]) -> tuple[Found, ...]:
    """Less what is another tenant's, or on a worker that is to be left alone, is unknown or has restarted. That stays
    filed: another gateway may know of the worker, or of its restart, sooner."""
    found = []
    for num_messages in range(chain.num_messages, 0, -1):
        key = chain.hashes[num_messages]
        entry = entries.get(key)
        if entry is None or entry.tenant != turn.tenant.name:
            continue
        worker = tier.workers.get(entry.worker)
        if worker is not None and not worker.is_drained and worker.epoch in (None, entry.epoch):
            found.append(Found(key, num_messages, entry))
    return tuple(found)


def chain_of(turn: Turn, tier: Tier) -> Chain:
    """Raises `InvalidRequest` for tools that cannot be written down."""
    tools, model = turn.request.offered_tools, tier.model if turn.request.is_chat else f"{tier.model} {TEXT}"
    try:
        return Chain.over(turn.messages, model=model, tools=tools, salt=turn.tenant.salt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"tools and messages must be plain JSON: {error}", param="tools") from error


def entry_of(tenant: Tenant, worker: str, num_tokens: int, expires_at: float, cache: CacheReply | KVUsage) -> Entry:
    assert cache.cache_id is not None
    return Entry(
        cache_id=cache.cache_id,
        worker=worker,
        epoch=cache.epoch,
        tenant=tenant.name,
        num_tokens=num_tokens,
        digest=cache.digest,
        provenance=cache.provenance,
        expires_at=expires_at,
    )
