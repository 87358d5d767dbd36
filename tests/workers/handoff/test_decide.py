"""The decision by cost, on its own and in a handoff; and blocks shared with earlier handoffs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import pytest

from mappers.cache import KVCache
from tests.workers.handoff.support import Pair, random_mapper, request
from tests.workers.pool.support import SALT, ManualClock, random_kv
from workers.api.errors import KvrelayError, NoTime, PrefillCheaper, from_reply
from workers.api.schemas import LeaseRequest
from workers.handoff.plan import CostQuery, HandoffHistory, HandoffPlan, decide
from workers.pool.entries import Span
from workers.rates import FRESH_S, Costs, RateMeter

QUERY = CostQuery(head=4, reused=0, end=1984, source_tokens=2048, block_tokens=32, remaining_s=5.0, share=0.125)
COSTS = Costs(prefill={0: 300.0}, handoff={1024: 6000.0})  # 6.8 s to prefill all, 0.33 s to map, 0.21 s for the tail


def test_unmeasured_costs_map_as_requested() -> None:
    for costs in (Costs(), Costs(prefill={0: 1.0}), Costs(handoff={1024: 1.0})):
        assert decide(QUERY, costs) == decide(QUERY, Costs())
        assert (decide(QUERY, costs).kind, decide(QUERY, costs).end) == ("map", QUERY.end)


def test_hybrid_uses_the_allowed_share_for_a_longer_tail() -> None:
    decision = decide(QUERY, COSTS)
    assert decision.kind == "hybrid" and decision.end % 32 == 0

    def total_s(end: int) -> float:
        return COSTS.handoff_s(end - 4) + COSTS.prefill_s(end, 2048)

    allowed_s = 0.125 * COSTS.prefill_s(0, 2048)
    assert total_s(decision.end) <= allowed_s < total_s(decision.end - 32)


@pytest.mark.parametrize(
    ("changes", "kind", "end"),
    [
        ({"share": 0.0}, "map", 1984),
        ({"share": 0.05}, "map", 1984),  # the mapping alone takes longer: as requested
        ({"share": 1.0}, "hybrid", 32),  # as long as a prefill: down to the head's block
        ({"share": 1.0, "reused": 960}, "hybrid", 960),  # blocks mapped earlier are kept
        ({"remaining_s": 0.3}, "late", 1984),
        ({"reused": 1920, "remaining_s": 0.3}, "hybrid", 1920),
    ],
)
def test_share_and_remaining_time_decide(changes: dict[str, float], kind: str, end: int) -> None:
    decision = decide(replace(QUERY, **changes), COSTS)  # type: ignore[arg-type]
    assert (decision.kind, decision.end) == (kind, end)


def test_short_prefix_is_prefilled() -> None:
    costs = Costs(prefill={0: 300.0}, handoff={32: 200.0, 1024: 6000.0})
    short = replace(QUERY, end=40, source_tokens=104)
    assert decide(short, costs).kind == "prefill"
    assert decide(replace(short, reused=32), costs).kind == "map"  # 8 more tokens are worth mapping


def test_costs_depend_on_length_and_expire() -> None:
    clock = ManualClock()
    meter = RateMeter(clock)
    for before, rate in ((0, 400.0), (256, 300.0), (512, 200.0), (768, 200.0)):
        meter.record("prefill", 256, 256 / rate, length=before)
    meter.record("handoff", 1000, 0.5, length=1000)
    costs = meter.costs
    assert costs.prefill_s(0, 1024) == pytest.approx(256 / 400 + 256 / 300 + 512 / 200)
    assert costs.prefill_s(900, 1000) == pytest.approx(100 / 200)
    assert costs.handoff_s(500) == pytest.approx(0.25)
    assert costs.prefill == {0: 400.0, 256: 300.0, 512: 200.0} and costs.handoff == {512: 2000.0}
    clock.now += FRESH_S + 1
    assert not meter.costs.are_measured and meter.rate("prefill") == 250.0


# -- in a handoff ---------------------------------------------------------------------------------------------------


async def test_handoff_by_cost_maps_less(pair: Pair) -> None:
    costs = Costs(prefill={0: 100.0}, handoff={64: 10_000.0})
    pair.adjust(costs=lambda: costs, native_share=0.5)
    entry = pair.source_cache(100)
    reply = await pair.handoffs.transfer(request(entry, num_tokens=90, by_cost=True), peer=pair.local_peer)
    cache = pair.target.pool.get(reply.cache_id, SALT)
    assert (reply.decision, reply.num_tokens, reply.reason) == ("hybrid", 56, "time_for_a_longer_tail")
    assert cache.mapped == Span(4, 56) and cache.is_hybrid and cache.digest == reply.digest
    mapped = await pair.handoffs.transfer(request(entry, num_tokens=90), peer=pair.local_peer)
    assert (mapped.decision, mapped.num_tokens) == ("map", 90)


@pytest.mark.parametrize(
    ("costs", "error", "code", "message"),
    [
        (Costs(prefill={0: 1e6}, handoff={64: 1e3}), PrefillCheaper, "prefill_cheaper", "would take .* s, a prefill"),
        (Costs(prefill={0: 1e-3}, handoff={64: 1e-2}), NoTime, "no_time", "would take .* s; .* are left"),
    ],
)
async def test_handoff_by_cost_is_declined(
    pair: Pair, costs: Costs, error: type[KvrelayError], code: str, message: str
) -> None:
    """The error differs from a failure."""
    pair.adjust(costs=lambda: costs)
    entry = pair.source_cache(100)
    with pytest.raises(error, match=message) as declined:
        await pair.handoffs.transfer(request(entry, by_cost=True), peer=pair.local_peer)
    assert (declined.value.status, declined.value.code) == (409, code)
    assert type(from_reply(409, declined.value.body())) is error
    await pair.handoffs.aclose()
    assert pair.num_used == 0 and pair.source.stats.num_leases == 0
    assert (await pair.handoffs.transfer(request(entry), peer=pair.local_peer)).num_tokens == 100


# -- a longer conversation -------------------------------------------------------------------------------------------


def offline(num_tokens: int) -> KVCache:
    return random_mapper().map(random_kv(0, 200).slice(4, num_tokens))


async def test_longer_handoff_maps_only_new_blocks(pair: Pair) -> None:
    kv = random_kv(0, 200)
    short = pair.source.store(range(100), kv.slice(0, 100), SALT, ttl_s=600)
    first = await pair.handoffs.transfer(request(short, num_tokens=90), peer=pair.local_peer)
    with pair.source.hold(short.cache_id, SALT) as held:
        grown = pair.source.store(range(180), kv.slice(100, 180), SALT, ttl_s=600, prefix=held)
    more = await pair.handoffs.transfer(request(grown, num_tokens=170), peer=pair.local_peer)
    assert (first.reused_tokens, more.reused_tokens) == (0, 88)  # blocks of 8
    assert more.bytes == first.bytes * (170 - 88) // (90 - 4)
    pool = pair.target.pool
    one, two = (pool.get(reply.cache_id, SALT) for reply in (first, more))
    assert two.blocks[:11] == one.blocks[:11] and two.mapped == Span(4, 170)
    with pool.hold(more.cache_id, SALT) as held:
        found = pool.gather(held.blocks, 4, 170)
    for mine, theirs in zip(found.keys + found.values, offline(170).keys + offline(170).values, strict=True):
        assert (mine - theirs).abs().max() < 1e-5
    pool.drop(first.cache_id, SALT)
    assert pool.get(more.cache_id, SALT).blocks == two.blocks  # shared blocks are kept for their users


@pytest.mark.parametrize("changes", [{"native_head": 8}, {"token": 1}, {"dropped": 1}], ids=["head", "tokens", "gone"])
async def test_different_cache_is_mapped_again(pair: Pair, changes: dict[str, int]) -> None:
    """It has another head or other tokens, or the earlier cache was evicted."""
    first = await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.local_peer)
    if changes.pop("dropped", None):
        pair.target.pool.drop(first.cache_id, SALT)
    ids = [changes.pop("token", 0), *range(1, 150)]
    entry = pair.source.store(ids, random_kv(0, 150), SALT, ttl_s=600)
    reply = await pair.handoffs.transfer(request(entry, **changes), peer=pair.local_peer)
    assert reply.reused_tokens == 0 and reply.num_tokens == 150


async def test_tenants_do_not_share_mapped_blocks(pair: Pair) -> None:
    await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.local_peer)
    other = "cd" * 16
    entry = pair.source.store(range(150), random_kv(0, 150), other, ttl_s=600)
    reply = await pair.handoffs.transfer(request(entry, tenant_salt=other), peer=pair.local_peer)
    assert reply.reused_tokens == 0


class CountingTokens(list[int]):
    """Counts the tokens that are accessed."""

    num_seen = 0

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        found = super().__getitem__(at)
        self.num_seen += len(found) if isinstance(found, list) else 1
        return found


@dataclass(frozen=True)
class CountingPlan(HandoffPlan):
    tokens: CountingTokens = field(default_factory=CountingTokens)

    @property
    def token_ids(self) -> list[int]:
        return self.tokens


@pytest.mark.parametrize(
    ("last", "max_compared", "shared", "max_seen"),
    [
        (None, 10_000, 120, 120),  # the longest first; the others cannot share more
        (999, 10_000, 112, 3 * 120),  # the three longest differ in the last token and share equally much
        (999, 130, 112, 2 * 120),  # the budget ends the comparison after the second
    ],
)
async def test_history_compares_few_tokens(
    pair: Pair, last: int | None, max_compared: int, shared: int, max_seen: int
) -> None:
    pool, mapper = pair.target.pool, random_mapper()
    history = HandoffHistory(pool, max_compared_tokens=max_compared)
    for num_tokens in (40, 80, 120, 120, 120):
        ids = [*range(num_tokens - 1), last or num_tokens - 1]
        with pool.allocate(num_tokens // 8) as fresh:
            mapped = Span(4, num_tokens)
            provenance = f"mapped:{mapper.bundle_id}"
            history.add(pool.put(fresh.blocks, ids, SALT, ttl_s=60, provenance=provenance, mapped=mapped))
    entry = pair.source_cache(160)
    ticket = await pair.local_peer.lease(entry.cache_id, LeaseRequest(ttl_s=60, tenant_salt=SALT), timeout_s=1)
    plan = CountingPlan(ticket, mapper, 4, 160, tokens=CountingTokens(range(160)))
    hold, found = history.longest(plan, SALT)
    with hold:
        assert found == shared and len(hold.blocks) == 15
    assert plan.tokens.num_seen <= max_seen
