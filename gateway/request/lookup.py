"""Prefix lookup: a chain hash over the messages, and what the registry knows under it.

    h_0 = HMAC-SHA256(salt, "kvrelay-prefix-1" | canonical JSON of {model, tools})
    h_i = HMAC-SHA256(salt, h_{i-1} | canonical JSON of message_i)

A hash is a hint: a worker compares the digest of the tokens themselves before it uses a cache. The tenant's salt keeps
tenants apart, the model keeps models apart.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from gateway.metrics import Metrics
from gateway.schemas import MARK
from gateway.state.registry import Entry, Registry
from gateway.state.tenants import Tenant
from gateway.upstream.fleet import Fleet
from gateway.upstream.stream import AnswerStream
from gateway.upstream.tier import Tier
from workers.api.errors import InvalidRequest
from workers.api.schemas import CacheReply, KVUsage, Message

SEED = b"kvrelay-prefix-1"
TEXT = "text"  # keeps a text apart from a chat of one message, which gets a template
MAX_LOOKED_UP = 256  # hashes of one chain; a conversation grows by a few messages a turn


# Chains


@dataclass(frozen=True)
class Chain:
    """The hashes of one conversation for one model: `hashes[i]` names its first i messages."""

    mac: hmac.HMAC
    hashes: tuple[str, ...]

    @classmethod
    def over(cls, messages: Sequence[Message], *, model: str, tools: list[dict[str, Any]] | None, salt: str) -> Chain:
        """Raises `ValueError` (orjson's) for tools that are nested too deep."""
        mac = mac_of(salt)
        links = [_first(mac, model, tools) if tools else _first_without_tools(mac, model)]
        for message in messages:
            links.append(_next(mac, links[-1], canonical(message)))
        return cls(mac, tuple(links))

    def extended(self, reply: dict[str, Any]) -> Chain:
        """By an assistant's message in OpenAI's form: the `canonical` of what the client will send back."""
        link = _next(self.mac, self.hashes[-1], _canonical(reply, reply["content"] or ""))
        return Chain(self.mac, (*self.hashes, link))

    @property
    def num_messages(self) -> int:
        return len(self.hashes) - 1

    def longest_first(self, limit: int = MAX_LOOKED_UP) -> list[str]:
        """The hashes of the whole conversation, then of ever shorter prefixes, up to `limit`. Excludes h_0."""
        return list(self.hashes[:0:-1])[:limit]


def canonical(message: Message) -> bytes:
    """The message as every client writes it alike: sorted keys, text parts joined, no nulls, no empties, no mark."""
    return _canonical(message.plain, message.text)


def _canonical(fields: dict[str, Any], text: str) -> bytes:
    items = (fields | {"content": text}).items()
    kept = {key: value for key, value in items if key != MARK and value not in ("", [], {})}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


@lru_cache(maxsize=1024)
def mac_of(salt: str) -> hmac.HMAC:
    """A tenant's keyed hash. Only copies of it are updated: they share the work that depends on the key alone."""
    return hmac.new(bytes.fromhex(salt), digestmod="sha256")


def _digest(mac: hmac.HMAC, content: bytes) -> str:
    copy = mac.copy()
    copy.update(content)
    return copy.hexdigest()


def _first(mac: hmac.HMAC, model: str, tools: list[dict[str, Any]]) -> str:
    return _digest(mac, SEED + b"|" + orjson.dumps({"model": model, "tools": tools}, option=orjson.OPT_SORT_KEYS))


@lru_cache(maxsize=1024)
def _first_without_tools(mac: hmac.HMAC, model: str) -> str:
    return _first(mac, model, [])


def _next(mac: hmac.HMAC, before: str, content: bytes) -> str:
    return _digest(mac, bytes.fromhex(before) + b"|" + content)


# The registry


@dataclass(frozen=True)
class PrefixHit:
    """A registry entry for the first `num_messages` messages."""

    key: str
    num_messages: int
    entry: Entry


@dataclass(frozen=True)
class Lookup:
    """What the registry knows of one prompt for one tier. `hits` are sorted longest first."""

    chain: Chain
    hits: tuple[PrefixHit, ...] = ()

    def best(self, *, exact_only: bool = False) -> PrefixHit | None:
        return next((hit for hit in self.hits if hit.entry.is_exact or not exact_only), None)

    @property
    def whole(self) -> PrefixHit | None:
        """An exact cache of the whole prompt."""
        best = self.best(exact_only=True)
        return best if best is not None and best.num_messages == self.chain.num_messages else None

    def without(self, lost: PrefixHit) -> Lookup:
        return Lookup(self.chain, tuple(hit for hit in self.hits if hit != lost))


class Prefixes:
    """Between a request and the registry."""

    def __init__(self, registry: Registry, metrics: Metrics):
        self._registry = registry
        self._metrics = metrics

    async def look_up(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        tenant: Tenant,
        tiers: Sequence[Tier],
        *,
        is_chat: bool,
    ) -> dict[str, Lookup]:
        """By tier; one registry call for all chains, longest first. Raises `InvalidRequest` for tools that cannot be
        written as JSON."""
        try:
            chains = {
                tier.name: Chain.over(
                    messages, model=tier.model if is_chat else f"{tier.model} {TEXT}", tools=tools, salt=tenant.salt
                )
                for tier in tiers
            }
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"tools and messages must be plain JSON: {error}", param="tools") from error
        keys = [key for chain in chains.values() for key in chain.longest_first()]
        entries = dict(zip(keys, await self._registry.get_many(keys), strict=True))
        lookups = {}
        for tier in tiers:
            hits = _usable_hits(chains[tier.name], entries, tenant, tier)
            lookups[tier.name] = Lookup(chains[tier.name], hits)
            self._metrics.prefix_lookups.labels(tier.name).inc()
            self._metrics.prefix_lookup_hits.labels(tier.name).inc(bool(hits))
        return lookups

    async def forget(self, tier: str, lost: PrefixHit) -> None:
        """The worker no longer holds this cache."""
        self._metrics.prefix_lookup_stale.labels(tier).inc()
        await self._registry.forget(lost.key, lost.entry)

    async def file_prompt(self, tenant: Tenant, lookup: Lookup, worker: str, reply: CacheReply) -> None:
        """The whole prompt, after its prefill."""
        entry = entry_of(tenant, worker, reply.num_tokens, reply.expires_at, reply)
        await self._registry.put_many({lookup.chain.hashes[-1]: entry})

    async def file_answer(
        self, tenant: Tenant, lookup: Lookup, stream: AnswerStream, *, is_chat: bool, num_stable: int
    ) -> None:
        """The cache of prompt and answer, for the next turn.

        A chat's is filed under the messages with the reply. An exact one is also filed under the prompt alone and under
        its stable part, where other requests may find it. A mapped one serves this conversation only, and must not hide
        an exact one.
        """
        completion, usage = stream.completion, stream.completion.kv
        if usage is None or usage.cache_id is None or usage.expires_at is None:
            return
        hashes, counts = lookup.chain.hashes, {}
        if is_chat:
            counts[lookup.chain.extended(completion.message).hashes[-1]] = usage.num_tokens
        if usage.provenance == "exact":
            counts[hashes[-1]] = completion.num_prompt_tokens
            if num_stable and usage.stable_tokens:
                counts[hashes[num_stable]] = usage.stable_tokens
        worker, expires_at, limit = stream.worker.id, usage.expires_at, usage.num_tokens
        await self._registry.put_many(
            {key: entry_of(tenant, worker, min(count, limit), expires_at, usage) for key, count in counts.items()}
        )


class ClientCaches:
    """The caches that clients know by id. An id is filed under a hash with the tenant's salt: another tenant's id is
    unknown. A lost entry is a miss, and the worker decides in the end."""

    def __init__(self, registry: Registry):
        self._registry = registry

    async def file(self, tenant: Tenant, worker: str, reply: CacheReply) -> None:
        entry = entry_of(tenant, worker, reply.num_tokens, reply.expires_at, reply)
        await self._registry.put_many({_client_key(tenant, reply.cache_id): entry})

    async def find(self, tenant: Tenant, cache_id: str, fleet: Fleet) -> PrefixHit | None:
        """None if the tenant has no such cache, or its worker restarted since, left or is drained."""
        key = _client_key(tenant, cache_id)
        (entry,) = await self._registry.get_many([key])
        worker = fleet.worker(entry.worker) if entry is not None and entry.tenant == tenant.name else None
        if entry is None or worker is None or worker.is_drained or worker.epoch not in (None, entry.epoch):
            return None
        return PrefixHit(key, 0, entry)

    async def forget(self, lost: PrefixHit) -> None:
        await self._registry.forget(lost.key, lost.entry)


def _client_key(tenant: Tenant, cache_id: str) -> str:
    return hmac.new(bytes.fromhex(tenant.salt), f"client-cache|{cache_id}".encode(), hashlib.sha256).hexdigest()


def _usable_hits(
    chain: Chain, entries: Mapping[str, Entry | None], tenant: Tenant, tier: Tier
) -> tuple[PrefixHit, ...]:
    """Without other tenants' entries, and without those on a worker that is drained, unknown or restarted. They stay
    filed: another gateway may learn of the worker, or of its restart, sooner."""
    hits = []
    for num_messages in range(chain.num_messages, 0, -1):
        key = chain.hashes[num_messages]
        entry = entries.get(key)
        if entry is None or entry.tenant != tenant.name:
            continue
        worker = tier.workers.get(entry.worker)
        if worker is not None and not worker.is_drained and worker.epoch in (None, entry.epoch):
            hits.append(PrefixHit(key, num_messages, entry))
    return tuple(hits)


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
