"""What a handoff makes of what is asked, by cost: the decision alone, and as the caller meets it."""

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

ASK = CostQuery(head=4, reused=0, end=1984, standing=2048, block_tokens=32, remaining_s=5.0, share=0.125)
COSTS = Costs(prefill={0: 300.0}, handoff={1024: 6000.0})  # 6.8 s to read all, 0.33 s to map, 0.21 s for the tail


def test_what_was_not_measured_is_tried_as_asked() -> None:
    for costs in (Costs(), Costs(prefill={0: 1.0}), Costs(handoff={1024: 1.0})):
        assert decide(ASK, costs) == decide(ASK, Costs())
        assert (decide(ASK, costs).kind, decide(ASK, costs).end) == ("map", ASK.end)


def test_a_longer_tail_is_read_natively_as_far_as_the_share_allows() -> None:
    decision = decide(ASK, COSTS)
    assert decision.kind == "hybrid" and decision.end % 32 == 0

    def total_s(end: int) -> float:
        return COSTS.handoff_s(end - 4) + COSTS.prefill_s(end, 2048)

    allowed_s = 0.125 * COSTS.prefill_s(0, 2048)
    assert total_s(decision.end) <= allowed_s < total_s(decision.end - 32)


@pytest.mark.parametrize(
    ("changes", "kind", "end"),
    [
        ({"share": 0.0}, "map", 1984),
        ({"share": 0.05}, "map", 1984),  # the mapping alone takes longer: as asked
        ({"share": 1.0}, "hybrid", 32),  # all time of a prefill: down to the head's block, no further
        ({"share": 1.0, "reused": 960}, "hybrid", 960),  # what is mapped already stays so
        ({"remaining_s": 0.3}, "late", 1984),
        ({"reused": 1920, "remaining_s": 0.3}, "hybrid", 1920),
    ],
)
def test_what_the_share_and_the_time_left_decide(changes: dict[str, float], kind: str, end: int) -> None:
    decision = decide(replace(ASK, **changes), COSTS)  # type: ignore[arg-type]
    assert (decision.kind, decision.end) == (kind, end)


def test_a_prefix_too_short_to_pay_is_read() -> None:
    costs = Costs(prefill={0: 300.0}, handoff={32: 200.0, 1024: 6000.0})
    short = replace(ASK, end=40, standing=104)
    assert decide(short, costs).kind == "prefill"
    assert decide(replace(short, reused=32), costs).kind == "map"  # 8 more tokens are worth it


def test_costs_depend_on_length_and_forget() -> None:
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


# -- as its caller meets it -------------------------------------------------------------------------------------------


async def test_by_cost_a_handoff_maps_less(pair: Pair) -> None:
    costs = Costs(prefill={0: 100.0}, handoff={64: 10_000.0})
    pair.adjust(costs=lambda: costs, native_share=0.5)
    entry = pair.source_cache(100)
    reply = await pair.handoffs.transfer(request(entry, num_tokens=90, by_cost=True), peer=pair.office)
    cache = pair.target.pool.get(reply.cache_id, SALT)
    assert (reply.decision, reply.num_tokens, reply.reason) == ("hybrid", 56, "time_for_a_longer_tail")
    assert cache.mapped == Span(4, 56) and cache.is_hybrid and cache.digest == reply.digest
    asked = await pair.handoffs.transfer(request(entry, num_tokens=90), peer=pair.office)
    assert (asked.decision, asked.num_tokens) == ("map", 90)


@pytest.mark.parametrize(
    ("costs", "error", "code", "says"),
    [
        (Costs(prefill={0: 1e6}, handoff={64: 1e3}), PrefillCheaper, "prefill_cheaper", "to read them: read them"),
        (Costs(prefill={0: 1e-3}, handoff={64: 1e-2}), NoTime, "no_time", "are predicted, .* are left"),
    ],
)
async def test_by_cost_a_handoff_is_not_made(
    pair: Pair, costs: Costs, error: type[KvrelayError], code: str, says: str
) -> None:
    """Its caller can tell it from a failure."""
    pair.adjust(costs=lambda: costs)
    entry = pair.source_cache(100)
    with pytest.raises(error, match=says) as declined:
        await pair.handoffs.transfer(request(entry, by_cost=True), peer=pair.office)
    assert (declined.value.status, declined.value.code) == (409, code)
    assert type(from_reply(409, declined.value.body())) is error
    await pair.handoffs.aclose()
    assert pair.num_used == 0 and pair.source.stats.num_leases == 0
    assert (await pair.handoffs.transfer(request(entry), peer=pair.office)).num_tokens == 100


# -- a conversation that goes on --------------------------------------------------------------------------------------


def offline(num_tokens: int) -> KVCache:
    return random_mapper().map(random_kv(0, 200).slice(4, num_tokens))


async def test_of_a_source_that_grew_only_the_new_blocks_are_mapped(pair: Pair) -> None:
    kv = random_kv(0, 200)
    short = pair.source.store(range(100), kv.slice(0, 100), SALT, ttl_s=600)
    first = await pair.handoffs.transfer(request(short, num_tokens=90), peer=pair.office)
    with pair.source.hold(short.cache_id, SALT) as held:
        grown = pair.source.store(range(180), kv.slice(100, 180), SALT, ttl_s=600, prefix=held)
    more = await pair.handoffs.transfer(request(grown, num_tokens=170), peer=pair.office)
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
    assert pool.get(more.cache_id, SALT).blocks == two.blocks  # shared blocks stay for whoever uses them


@pytest.mark.parametrize("changes", [{"native_head": 8}, {"token": 1}, {"dropped": 1}], ids=["head", "tokens", "gone"])
async def test_what_is_not_the_same_is_mapped_anew(pair: Pair, changes: dict[str, int]) -> None:
    """Another head, other tokens, or a cache that was evicted."""
    first = await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.office)
    if changes.pop("dropped", None):
        pair.target.pool.drop(first.cache_id, SALT)
    ids = [changes.pop("token", 0), *range(1, 150)]
    entry = pair.source.store(ids, random_kv(0, 150), SALT, ttl_s=600)
    reply = await pair.handoffs.transfer(request(entry, **changes), peer=pair.office)
    assert reply.reused_tokens == 0 and reply.num_tokens == 150


async def test_another_tenant_shares_nothing_that_was_mapped(pair: Pair) -> None:
    await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.office)
    other = "cd" * 16
    entry = pair.source.store(range(150), random_kv(0, 150), other, ttl_s=600)
    reply = await pair.handoffs.transfer(request(entry, tenant_salt=other), peer=pair.office)
    assert reply.reused_tokens == 0


class CountedTokens(list[int]):
    """Counts the tokens that are looked at."""

    num_seen = 0

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        found = super().__getitem__(at)
        self.num_seen += len(found) if isinstance(found, list) else 1
        return found


@dataclass(frozen=True)
class CountedPlan(HandoffPlan):
    tokens: CountedTokens = field(default_factory=CountedTokens)

    @property
    def token_ids(self) -> list[int]:
        return self.tokens


@pytest.mark.parametrize(
    ("last", "max_compared", "shared", "most_seen"),
    [
        (None, 10_000, 120, 120),  # the longest first, and none that cannot share more
        (999, 10_000, 112, 3 * 120),  # the others differ in their last token: each is as good
        (999, 130, 112, 2 * 120),  # no more than so many tokens are compared, but for the one under way
    ],
)
async def test_few_tokens_are_compared_to_find_what_was_mapped(
    pair: Pair, last: int | None, max_compared: int, shared: int, most_seen: int
) -> None:
    pool, mapper = pair.target.pool, random_mapper()
    made = HandoffHistory(pool, max_compared_tokens=max_compared)
    for num_tokens in (40, 80, 120, 120, 120):
        ids = [*range(num_tokens - 1), last or num_tokens - 1]
        with pool.allocate(num_tokens // 8) as fresh:
            mapped = Span(4, num_tokens)
            provenance = f"mapped:{mapper.bundle_id}"
            made.note(pool.put(fresh.blocks, ids, SALT, ttl_s=60, provenance=provenance, mapped=mapped))
    entry = pair.source_cache(160)
    ticket = await pair.office.lease(entry.cache_id, LeaseRequest(ttl_s=60, tenant_salt=SALT), timeout_s=1)
    plan = CountedPlan(ticket, mapper, 4, 160, tokens=CountedTokens(range(160)))
    hold, found = made.longest(plan, SALT)
    with hold:
        assert found == shared and len(hold.blocks) == 15
    assert plan.tokens.num_seen <= most_seen
