"""Both sides of the connector without vLLM: loads, publications and their failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from mappers.cache import KVCache, KVChunk
from mappers.mapper import Mapper, Sink
from tests.vllm.support import MAX_TOKENS, PAGED_TOKENS, Engine, Request, engine, paged_cache, params, read_cache
from tests.workers.handoff.support import TARGET_LAYOUT, random_mapper
from tests.workers.pool.support import OTHER_SALT, SALT, assert_same, random_kv
from workers.api.errors import CacheStale
from workers.api.schemas import Ticket
from workers.engines.base import MIN_LOADED_TOKENS
from workers.engines.vllm.paged import head_range
from workers.engines.vllm.plan import SaveOp, StepWork, TransferReport
from workers.engines.vllm.worker import PoolReaders, WorkerSide
from workers.pool.arena import Arena

IDS = list(range(3, 43))
HEAD, TAIL = 4, 9
PROMPT = [*IDS, *range(100, 100 + TAIL)]


@pytest.fixture
def vllm() -> Iterator[Engine]:
    with engine() as vllm:
        yield vllm


def report_of(vllm: Engine, request: Request, *, is_whole: bool = True) -> TransferReport:
    return TransferReport.model_validate(vllm.scheduler.finish(request.request_id, is_whole=is_whole))


def read_lent(ticket: Ticket) -> KVCache:
    sources = PoolReaders()
    kv = sources.reader(ticket).read(ticket.blocks, ticket.generations, 0, ticket.num_tokens)
    copy = KVCache(tuple(k.clone() for k in kv.keys), tuple(v.clone() for v in kv.values))
    sources.close()
    return copy


def test_native_kv_is_loaded_unchanged_without_the_tail(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    assert vllm.arrive(request) is not None
    assert not vllm.step(request)
    assert request.num_computed_tokens == len(IDS)
    assert_same(read_cache(vllm.cache, vllm.blocks["r"], len(IDS)), kv)
    assert report_of(vllm, request) == TransferReport(loaded_tokens=len(IDS))


def test_native_head_precedes_mapped_kv(vllm: Engine) -> None:
    head, head_kv = vllm.ticket("large", IDS[:HEAD], seed=1)
    source, kv = vllm.ticket("small", IDS, seed=2)
    request = Request("r", PROMPT, params(head, source))
    vllm.arrive(request)
    assert not vllm.step(request)
    found, mapped = read_cache(vllm.cache, vllm.blocks["r"], len(IDS)), random_mapper().map(kv)
    assert_same(found.slice(0, HEAD), head_kv)
    for left, right in zip(found.keys + found.values, mapped.keys + mapped.values, strict=True):
        torch.testing.assert_close(left[:, HEAD:], right[:, HEAD:])


def test_at_least_one_token_is_left_to_compute(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", IDS, params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", 0) == len(IDS) - 1


def test_tokens_cached_by_vllm_are_not_loaded_again(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request, num_computed=16)
    found = read_cache(vllm.cache, vllm.blocks["r"], len(IDS))
    assert torch.isnan(found.keys[0][:, :16]).all()
    assert torch.equal(found.keys[0][:, 16:], kv.keys[0][:, 16:])
    assert report_of(vllm, request).loaded_tokens == len(IDS)


def test_last_few_tokens_are_loaded_behind_vllms_cache(vllm: Engine) -> None:
    """Prefilling those few natively would change the answer that the same request got before."""
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", len(IDS) - 2) == 2


def test_differing_prompts_load_their_common_prefix(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    vllm.arrive(Request("r", [*IDS[:20], 999, *IDS[21:]], params(ticket)))
    assert vllm.scheduler.num_loadable("r", 0) == 20


BAD_PARAMS: list[Any] = [
    5,
    [],
    "kvc",
    {"cache_id": 5},
    {"tenant_salt": SALT, "load": "x"},
    {"tenant_salt": "short"},
    {"tenant_salt": SALT, "load": [{"ticket": {"cache_id": 5}}]},
    {"tenant_salt": SALT, "publish": {"ttl_s": -1}},
    {"tenant_salt": SALT, "release": [{"cache_id": "a"}]},
    {"tenant_salt": SALT, "loads": []},
]


@pytest.mark.parametrize("bad", BAD_PARAMS, ids=str)
def test_malformed_parameters_are_reported_and_not_raised(vllm: Engine, bad: Any) -> None:
    request = Request("r", PROMPT, bad)
    assert vllm.arrive(request) is None
    assert vllm.scheduler.num_loadable("r", 0) == 0
    vllm.step(request)
    report = report_of(vllm, request)
    assert report.refused and not report.loaded_tokens
    assert vllm.scheduler.num_open == 0


def copy_with(ticket: Ticket, **changes: Any) -> Ticket:
    return ticket.model_copy(update=changes)


@pytest.mark.parametrize(
    ("make_params", "reason"),
    [
        (lambda t: params(copy_with(t, token_ids=[9, *t.token_ids[1:]])), "digest"),
        (lambda t: params(t) | {"tenant_salt": OTHER_SALT}, "digest"),
        (lambda t: params(copy_with(t, blocks=t.blocks[1:])), "blocks"),
        (lambda t: params(copy_with(t, fingerprint="00" * 32)), "no usable bundle"),
        (lambda t: params(copy_with(t, pool=t.pool.model_copy(update={"kind": "tcp"}))), "within a step"),
        (lambda t: params(copy_with(t, layout=t.layout.model_copy(update={"head_dim": 4}))), "head_dim"),
        (lambda t: params(t, t), "from 40 on"),
    ],
)
def test_ticket_that_cannot_serve_the_prompt_is_rejected(vllm: Engine, make_params: Any, reason: str) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, make_params(ticket))
    assert vllm.arrive(request) is None
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert reason in (report_of(vllm, request).refused or "")


@pytest.mark.parametrize("shared", [0, 1, MIN_LOADED_TOKENS - 1])
def test_short_common_prefix_is_not_loaded(vllm: Engine, shared: int) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", [*IDS[:shared], *range(200, 240)], params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert report_of(vllm, request).refused


def test_loads_have_distinct_salts(vllm: Engine) -> None:
    def salt_of(cache: Ticket, own_salt: str | None = None, prompt: Sequence[int] = PROMPT, **part: Any) -> str | None:
        load = [{"ticket": cache.model_dump()} | part]
        request = Request("r", list(prompt), params(load=load), cache_salt=own_salt)
        salt = vllm.arrive(request)
        vllm.scheduler.finish("r", is_whole=False)
        return salt

    first, _ = vllm.ticket("small", IDS, seed=1)
    second, _ = vllm.ticket("small", IDS, seed=2)
    bundle = random_mapper().bundle_id
    found = [
        salt_of(first),
        salt_of(second),
        salt_of(first, "own"),
        salt_of(first, num_tokens=20),
        salt_of(first, mapper=bundle),
    ]
    found.append(salt_of(first, prompt=IDS))  # the last token is computed
    assert None not in found and len(set(found)) == 6
    assert salt_of(first) == salt_of(first)
    assert vllm.arrive(Request("plain", PROMPT, None)) is None
    assert vllm.arrive(Request("publishing", PROMPT, params(publish=True))) is None


def test_num_loadable_is_computed_once(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    vllm.arrive(Request("r", PROMPT, params(ticket)))
    vllm.pools["large"].close()  # a lookup there would raise from now on
    assert {vllm.scheduler.num_loadable("r", 0) for _ in range(100)} == {len(IDS)}


def test_failed_load_is_reported_by_block_and_not_offered_again(vllm: Engine) -> None:
    head, head_kv = vllm.ticket("large", IDS[:17], seed=1)
    source, _ = vllm.ticket("small", IDS, seed=2)
    request = Request("r", PROMPT, params(head, source, publish=True))
    vllm.arrive(request)
    vllm.pools["small"].close()
    failed = vllm.step(request)
    assert failed == set(vllm.blocks["r"][17 // PAGED_TOKENS :])  # and the blocks computed after it in this step
    assert vllm.settle(failed) == [request]
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert not vllm.step(request, num_computed=16)  # vLLM computes from the first missing block
    vllm.settle(set())
    report = report_of(vllm, request)
    assert report.loaded_tokens == 16
    assert "read" in (report.refused or "")
    assert report.ticket is not None and report.ticket.provenance == "exact"  # no mapped token was loaded
    assert_same(read_cache(vllm.cache, vllm.blocks["r"], 16), head_kv.slice(0, 16))


class OverwritingMapper(Mapper):
    """Writes a block of the source while it maps."""

    def __init__(self, arena: Arena, block: int):
        like = random_mapper()
        super().__init__(like.manifest, like.weights)
        self._arena, self._block = arena, block

    def map_into(self, chunk: KVChunk, sink: Sink) -> None:
        super().map_into(chunk, sink)
        with self._arena.writing([self._block]):
            pass


def test_source_overwritten_while_mapped_fails_the_load(vllm: Engine) -> None:
    head, _ = vllm.ticket("large", IDS[:17], seed=1)
    source, _ = vllm.ticket("small", IDS, seed=2)
    mapper = OverwritingMapper(vllm.pools["small"].arena, source.blocks[-1])
    vllm.worker = WorkerSide(vllm.cache, [mapper], TARGET_LAYOUT)
    request = Request("r", PROMPT, params(head, source))
    vllm.arrive(request)
    assert vllm.step(request) == set(vllm.blocks["r"][17 // PAGED_TOKENS :])
    vllm.worker.close()


@pytest.mark.parametrize(("lost", "provenance"), [(0, "exact"), (4, "exact"), (24, "mapped:")])
def test_unloaded_tokens_are_neither_reported_nor_published_as_loaded(vllm: Engine, lost: int, provenance: str) -> None:
    """The head is native, the rest mapped; loading fails from token `lost` on."""
    head, _ = vllm.ticket("large", IDS[:HEAD], seed=1)
    source, _ = vllm.ticket("small", IDS, seed=2)
    request = Request("r", PROMPT, params(head, source, publish=True))
    vllm.arrive(request)
    vllm.step(request)
    vllm.scheduler.end_step(set(vllm.blocks["r"][lost // PAGED_TOKENS :]), {"r": False})
    vllm.step(request, num_computed=lost)
    vllm.settle(set())
    report = report_of(vllm, request)
    assert report.loaded_tokens == lost and report.refused
    assert report.ticket is not None and report.ticket.provenance.startswith(provenance)


def test_restarted_request_reports_the_blocks_it_still_finds(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request)
    vllm.settle(set(vllm.blocks["r"][4:]))
    vllm.step(request, num_computed=8)  # after a preemption that kept two of its loaded blocks
    vllm.settle(set())
    assert report_of(vllm, request).loaded_tokens == 8


def test_blocks_are_not_shared_before_they_are_loaded(vllm: Engine) -> None:
    """vLLM matches blocks once they are allocated, so each request has its own salt until they are full."""
    ticket, _ = vllm.ticket("large", IDS)
    first, second, third = (Request(name, PROMPT, params(ticket)) for name in "abc")
    salt = vllm.arrive(first)
    assert vllm.arrive(second) not in (salt, None)
    vllm.step(first)
    vllm.settle(set())
    assert vllm.arrive(third) == salt


def test_preempted_request_is_loaded_again(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request)
    vllm.blocks["r"] = [block + 20 for block in vllm.blocks["r"]]
    vllm.step(request)
    assert_same(read_cache(vllm.cache, vllm.blocks["r"], len(IDS)), kv)


@pytest.mark.parametrize("confirmed_first", [True, False])
def test_published_kv_is_readable_until_released(vllm: Engine, confirmed_first: bool) -> None:
    request = Request("r", PROMPT, params(publish=True))
    vllm.arrive(request)
    kv = random_kv(0, len(PROMPT), seed=5, layout=TARGET_LAYOUT)
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        vllm.cache.write(vllm.blocks["r"], 0, layer, keys, values)
    vllm.step(request)
    if confirmed_first:
        vllm.settle(set())
    report = report_of(vllm, request)
    vllm.settle(set())
    assert report.ticket is not None
    assert (report.ticket.token_ids, report.ticket.provenance) == (PROMPT, "exact")
    assert_same(read_lent(report.ticket), kv)
    lease = {"cache_id": report.ticket.cache_id, "lease_id": report.ticket.lease_id}
    vllm.arrive(Request("next", PROMPT, params(release=[lease])))
    with pytest.raises(CacheStale):
        read_lent(report.ticket)
    vllm.scheduler.finish("next", is_whole=True)
    assert vllm.scheduler.num_open == 0
    assert vllm.scheduler.pool.stats.num_leases == 0


def test_failed_save_revokes_the_lease(vllm: Engine) -> None:
    request = Request("r", PROMPT, params(publish=True))
    vllm.arrive(request)
    vllm.step(request)
    report = report_of(vllm, request)
    vllm.scheduler.end_step(set(), {"r": False})
    assert report.ticket is not None
    with pytest.raises(CacheStale):
        read_lent(report.ticket)


def test_blocks_of_a_request_that_ended_in_its_step_are_freed_after_it(vllm: Engine) -> None:
    request = Request("r", PROMPT, params(publish=True))
    vllm.arrive(request)
    vllm.step(request)
    assert report_of(vllm, request, is_whole=False).ticket is None
    used = vllm.scheduler.pool.stats.used_blocks
    assert used and vllm.scheduler.num_open == 1
    vllm.settle(set())
    assert vllm.scheduler.num_open == 0
    with vllm.scheduler.pool.allocate(24):  # the whole pool
        pass


def test_full_exchange_publishes_nothing_and_answers(vllm: Engine) -> None:
    with vllm.scheduler.pool.allocate(24):
        request = Request("r", PROMPT, params(publish=True))
        vllm.arrive(request)
        vllm.step(request)
        report = report_of(vllm, request)
    assert report.ticket is None and "blocks" in (report.refused or "")


def test_prompt_longer_than_the_model_loads_nothing(vllm: Engine) -> None:
    ids = list(range(MAX_TOKENS + 10))
    source, _ = vllm.ticket("small", ids)
    request = Request("r", ids, params(source))
    assert vllm.arrive(request) is None
    assert "at most" in (report_of(vllm, request).refused or "")


@pytest.mark.parametrize(
    ("rank", "num_ranks", "heads", "expected"),
    [(0, 1, 3, (0, 3)), (1, 2, 8, (4, 8)), (3, 4, 4, (3, 4)), (5, 8, 2, (1, 2)), (2, 8, 2, (0, 1))],
)
def test_heads_are_split_among_ranks(rank: int, num_ranks: int, heads: int, expected: tuple[int, int]) -> None:
    found = head_range(rank, num_ranks, heads)
    assert (found.begin, found.end) == expected


def test_heads_that_cannot_be_split_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 KV heads"):
        head_range(0, 2, 3)


def test_ranks_load_and_save_their_own_heads(vllm: Engine) -> None:
    """Three ranks of one head each fill the exchange like one rank of three heads."""
    ticket, kv = vllm.ticket("large", IDS)
    vllm.arrive(Request("r", PROMPT, params(ticket)))
    vllm.scheduler.blocks_assigned("r", vllm.blocks["r"], len(IDS))
    work = vllm.scheduler.plan_step({"r": TAIL}, vllm.blocks.__getitem__)
    exchange = vllm.scheduler.pool
    with exchange.allocate(5) as hold:
        save = SaveOp("r", len(IDS), tuple(vllm.blocks["r"]), exchange.export(), hold.blocks)
        for rank in range(3):
            cache = paged_cache(TARGET_LAYOUT, head_range(rank, 3, TARGET_LAYOUT.num_kv_heads))
            side = WorkerSide(cache, [], TARGET_LAYOUT)
            side.load(work)
            side.save(StepWork(saves=(save,)))
            assert side.take_saved() == {"r": True}
            side.close()
        assert_same(exchange.gather(hold.blocks, 0, len(IDS)), kv)
