"""Both sides of the connector without vLLM: what is loaded, what is published, and what happens when it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from mappers.cache import KVCache, KVChunk
from mappers.mapper import Mapper, Sink
from tests.vllm.support import MAX_TOKENS, PAGED_TOKENS, Engine, Request, engine, paged_cache, params, read
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
    with engine() as made:
        yield made


def report_of(vllm: Engine, request: Request, *, is_whole: bool = True) -> TransferReport:
    return TransferReport.model_validate(vllm.scheduler.finish(request.request_id, is_whole=is_whole))


def lent(ticket: Ticket) -> KVCache:
    sources = PoolReaders()
    kv = sources.reader(ticket).read(ticket.blocks, ticket.generations, 0, ticket.num_tokens)
    copy = KVCache(tuple(k.clone() for k in kv.keys), tuple(v.clone() for v in kv.values))
    sources.close()
    return copy


def test_our_own_kv_is_loaded_as_it_is_but_for_the_tail(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    assert vllm.arrive(request) is not None
    assert not vllm.step(request)
    assert request.num_computed_tokens == len(IDS)
    assert_same(read(vllm.cache, vllm.blocks["r"], len(IDS)), kv)
    assert report_of(vllm, request) == TransferReport(loaded_tokens=len(IDS))


def test_the_native_head_goes_before_what_is_mapped(vllm: Engine) -> None:
    head, own = vllm.ticket("large", IDS[:HEAD], seed=1)
    source, kv = vllm.ticket("small", IDS, seed=2)
    request = Request("r", PROMPT, params(head, source))
    vllm.arrive(request)
    assert not vllm.step(request)
    found, mapped = read(vllm.cache, vllm.blocks["r"], len(IDS)), random_mapper().map(kv)
    assert_same(found.slice(0, HEAD), own)
    for left, right in zip(found.keys + found.values, mapped.keys + mapped.values, strict=True):
        torch.testing.assert_close(left[:, HEAD:], right[:, HEAD:])


def test_at_least_one_token_is_left_to_compute(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", IDS, params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", 0) == len(IDS) - 1


def test_what_vllm_has_already_is_not_loaded_again(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request, num_computed=16)
    found = read(vllm.cache, vllm.blocks["r"], len(IDS))
    assert torch.isnan(found.keys[0][:, :16]).all()
    assert torch.equal(found.keys[0][:, 16:], kv.keys[0][:, 16:])
    assert report_of(vllm, request).loaded_tokens == len(IDS)


def test_what_vllm_has_all_but_a_few_tokens_of_is_completed(vllm: Engine) -> None:
    """Read natively, those few would make another answer than the same request got before."""
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", len(IDS) - 2) == 2


def test_prompts_that_differ_later_take_what_they_share(vllm: Engine) -> None:
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
def test_what_cannot_be_understood_is_reported_and_never_raised(vllm: Engine, bad: Any) -> None:
    request = Request("r", PROMPT, bad)
    assert vllm.arrive(request) is None
    assert vllm.scheduler.num_loadable("r", 0) == 0
    vllm.step(request)
    report = report_of(vllm, request)
    assert report.refused and not report.loaded_tokens
    assert vllm.scheduler.num_open == 0


def changed(ticket: Ticket, **changes: Any) -> Ticket:
    return ticket.model_copy(update=changes)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: params(changed(t, token_ids=[9, *t.token_ids[1:]])), "digest"),
        (lambda t: params(t) | {"tenant_salt": OTHER_SALT}, "digest"),
        (lambda t: params(changed(t, blocks=t.blocks[1:])), "blocks"),
        (lambda t: params(changed(t, fingerprint="00" * 32)), "no usable bundle"),
        (lambda t: params(changed(t, pool=t.pool.model_copy(update={"kind": "tcp"}))), "within a step"),
        (lambda t: params(changed(t, layout=t.layout.model_copy(update={"head_dim": 4}))), "head_dim"),
        (lambda t: params(t, t), "from 40 on"),
    ],
)
def test_a_ticket_that_may_not_serve_the_prompt_is_refused(vllm: Engine, spoil: Any, reason: str) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, spoil(ticket))
    assert vllm.arrive(request) is None
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert reason in (report_of(vllm, request).refused or "")


@pytest.mark.parametrize("shared", [0, 1, MIN_LOADED_TOKENS - 1])
def test_a_few_tokens_in_common_are_no_match(vllm: Engine, shared: int) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", [*IDS[:shared], *range(200, 240)], params(ticket))
    vllm.arrive(request)
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert report_of(vllm, request).refused


def test_what_is_loaded_has_a_salt_of_its_own(vllm: Engine) -> None:
    def salt(cache: Ticket, own: str | None = None, prompt: Sequence[int] = PROMPT, **part: Any) -> str | None:
        load = [{"ticket": cache.model_dump()} | part]
        request = Request("r", list(prompt), params(load=load), cache_salt=own)
        given = vllm.arrive(request)
        vllm.scheduler.finish("r", is_whole=False)
        return given

    first, _ = vllm.ticket("small", IDS, seed=1)
    second, _ = vllm.ticket("small", IDS, seed=2)
    bundle = random_mapper().bundle_id
    found = [salt(first), salt(second), salt(first, "own"), salt(first, num_tokens=20), salt(first, mapper=bundle)]
    found.append(salt(first, prompt=IDS))  # its last token is computed
    assert None not in found and len(set(found)) == 6
    assert salt(first) == salt(first)
    assert vllm.arrive(Request("plain", PROMPT, None)) is None
    assert vllm.arrive(Request("publishing", PROMPT, params(publish=True))) is None


def test_looking_again_and_again_looks_nothing_up(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    vllm.arrive(Request("r", PROMPT, params(ticket)))
    vllm.pools["large"].close()  # whoever looked there now would raise
    assert {vllm.scheduler.num_loadable("r", 0) for _ in range(100)} == {len(IDS)}


def test_a_load_that_fails_is_told_block_by_block_and_not_offered_again(vllm: Engine) -> None:
    head, own = vllm.ticket("large", IDS[:17], seed=1)
    source, _ = vllm.ticket("small", IDS, seed=2)
    request = Request("r", PROMPT, params(head, source, publish=True))
    vllm.arrive(request)
    vllm.pools["small"].close()
    failed = vllm.step(request)
    assert failed == set(vllm.blocks["r"][17 // PAGED_TOKENS :])  # what is computed behind it in this step as well
    assert vllm.settle(failed) == [request]
    assert vllm.scheduler.num_loadable("r", 0) == 0
    assert not vllm.step(request, num_computed=16)  # vLLM computes from the first block that is missing on
    vllm.settle(set())
    report = report_of(vllm, request)
    assert report.loaded_tokens == 16
    assert "read" in (report.refused or "")
    assert report.ticket is not None and report.ticket.provenance == "exact"  # of the other part nothing was loaded
    assert_same(read(vllm.cache, vllm.blocks["r"], 16), own.slice(0, 16))


class MeddledMapper(Mapper):
    """Somebody writes a block of the source while it maps."""

    def __init__(self, arena: Arena, block: int):
        like = random_mapper()
        super().__init__(like.manifest, like.weights)
        self._arena, self._block = arena, block

    def map_into(self, chunk: KVChunk, sink: Sink) -> None:
        super().map_into(chunk, sink)
        with self._arena.writing([self._block]):
            pass


def test_a_source_that_changes_while_it_is_mapped_is_a_load_that_fails(vllm: Engine) -> None:
    head, _ = vllm.ticket("large", IDS[:17], seed=1)
    source, _ = vllm.ticket("small", IDS, seed=2)
    mapper = MeddledMapper(vllm.pools["small"].arena, source.blocks[-1])
    vllm.worker = WorkerSide(vllm.cache, [mapper], TARGET_LAYOUT)
    request = Request("r", PROMPT, params(head, source))
    vllm.arrive(request)
    assert vllm.step(request) == set(vllm.blocks["r"][17 // PAGED_TOKENS :])
    vllm.worker.close()


@pytest.mark.parametrize(("lost", "provenance"), [(0, "exact"), (4, "exact"), (24, "mapped:")])
def test_what_was_not_loaded_is_neither_told_nor_lent_as_loaded(vllm: Engine, lost: int, provenance: str) -> None:
    """The head is this model's own, what follows is mapped; the workers fail from token `lost` on."""
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


def test_a_request_that_lost_its_source_tells_what_it_finds_when_it_begins_anew(vllm: Engine) -> None:
    ticket, _ = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request)
    vllm.settle(set(vllm.blocks["r"][4:]))
    vllm.step(request, num_computed=8)  # it was preempted, and of its loaded blocks two were still there
    vllm.settle(set())
    assert report_of(vllm, request).loaded_tokens == 8


def test_blocks_that_may_turn_out_not_to_be_loaded_are_not_shared(vllm: Engine) -> None:
    """vLLM finds blocks from the moment on that they are allocated. The salt is a request's own until they are full."""
    ticket, _ = vllm.ticket("large", IDS)
    first, second, third = (Request(name, PROMPT, params(ticket)) for name in "abc")
    salt = vllm.arrive(first)
    assert vllm.arrive(second) not in (salt, None)
    vllm.step(first)
    vllm.settle(set())
    assert vllm.arrive(third) == salt


def test_a_preempted_request_is_loaded_again(vllm: Engine) -> None:
    ticket, kv = vllm.ticket("large", IDS)
    request = Request("r", PROMPT, params(ticket))
    vllm.arrive(request)
    vllm.step(request)
    vllm.blocks["r"] = [block + 20 for block in vllm.blocks["r"]]
    vllm.step(request)
    assert_same(read(vllm.cache, vllm.blocks["r"], len(IDS)), kv)


@pytest.mark.parametrize("confirmed_first", [True, False])
def test_what_is_published_can_be_read_as_long_as_it_is_lent(vllm: Engine, confirmed_first: bool) -> None:
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
    assert_same(lent(report.ticket), kv)
    returned = {"cache_id": report.ticket.cache_id, "lease_id": report.ticket.lease_id}
    vllm.arrive(Request("next", PROMPT, params(release=[returned])))
    with pytest.raises(CacheStale):
        lent(report.ticket)
    vllm.scheduler.finish("next", is_whole=True)
    assert vllm.scheduler.num_open == 0
    assert vllm.scheduler.pool.stats.num_leases == 0


def test_a_save_that_fails_takes_back_what_was_lent(vllm: Engine) -> None:
    request = Request("r", PROMPT, params(publish=True))
    vllm.arrive(request)
    vllm.step(request)
    report = report_of(vllm, request)
    vllm.scheduler.end_step(set(), {"r": False})
    assert report.ticket is not None
    with pytest.raises(CacheStale):
        lent(report.ticket)


def test_blocks_of_a_request_that_ended_in_its_step_come_free_after_it(vllm: Engine) -> None:
    request = Request("r", PROMPT, params(publish=True))
    vllm.arrive(request)
    vllm.step(request)
    assert report_of(vllm, request, is_whole=False).ticket is None
    used = vllm.scheduler.pool.stats.used_blocks
    assert used and vllm.scheduler.num_open == 1
    vllm.settle(set())
    assert vllm.scheduler.num_open == 0
    with vllm.scheduler.pool.allocate(24):  # all there are
        pass


def test_an_exchange_that_is_full_publishes_nothing_and_answers(vllm: Engine) -> None:
    with vllm.scheduler.pool.allocate(24):
        request = Request("r", PROMPT, params(publish=True))
        vllm.arrive(request)
        vllm.step(request)
        report = report_of(vllm, request)
    assert report.ticket is None and "blocks" in (report.refused or "")


def test_a_prompt_longer_than_the_model_reads_no_ticket(vllm: Engine) -> None:
    ids = list(range(MAX_TOKENS + 10))
    source, _ = vllm.ticket("small", ids)
    request = Request("r", ids, params(source))
    assert vllm.arrive(request) is None
    assert "at most" in (report_of(vllm, request).refused or "")


@pytest.mark.parametrize(
    ("rank", "num_ranks", "heads", "expected"),
    [(0, 1, 3, (0, 3)), (1, 2, 8, (4, 8)), (3, 4, 4, (3, 4)), (5, 8, 2, (1, 2)), (2, 8, 2, (0, 1))],
)
def test_heads_are_shared_among_ranks(rank: int, num_ranks: int, heads: int, expected: tuple[int, int]) -> None:
    found = head_range(rank, num_ranks, heads)
    assert (found.begin, found.end) == expected


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="3 KV heads"):
        head_range(0, 2, 3)


def test_ranks_load_and_save_their_own_heads(vllm: Engine) -> None:
    """Three ranks of one head each fill the exchange that one rank of three heads would fill."""
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
