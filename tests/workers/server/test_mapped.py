"""Mapped caches: served as the offline replay says, told apart from exact ones, used by id only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import mappers
from mappers.models import run
from tests.workers.engines import tiny
from tests.workers.server.support import (
    OTHER_SALT,
    QUESTION,
    SALT,
    TALK,
    Served,
    bundle,
    content,
    serving,
    transfer_request,
)
from workers.api.errors import BundleUnusable, CacheMismatch, InvalidRequest, ModelNotFound
from workers.api.schemas import TRANSFER_PHASES, Message, PrefillRequest, TransferReply

HEAD, TAIL, NUM = 4, 16, 12

Pair = tuple[Served, Served]


async def handed_over(pair: Pair, num_tokens: int | None = None, **changes: Any) -> TransferReply:
    """The whole prompt but the tail, read by the small worker, mapped by the large one."""
    small, large = pair
    ids = small.prompt()
    read = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)
    fields = {"num_tokens": num_tokens or len(ids) - TAIL, "native_head": HEAD} | changes
    return await large.client.transfer(transfer_request(read.cache_id, **fields), timeout_s=60)


def replayed(
    folder: Path, small_folder: Path, bundle: Path, prompt: list[int], handed: int, num: int, head: int = HEAD
) -> list[int]:
    """Greedy tokens of the large model over a replayed handoff of the first `handed` tokens."""
    model: LlamaForCausalLM = tiny.reference(folder)
    cache = mappers.replay(mappers.load(bundle), tiny.reference(small_folder), model, prompt, handed, head)
    written: list[int] = []
    for _ in range(num):
        _, hidden = run(model, (prompt + written)[handed:], cache)
        written.append(int(model.lm_head(hidden[-1]).argmax()))
    return written


async def test_a_mapped_answer_is_the_replay(pair: Pair, folder: Path, small_folder: Path, bundle: Path) -> None:
    _, large = pair
    moved = await handed_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage, handed = reply["kv_transfer_params"], len(large.prompt()) - TAIL
    expected = replayed(folder, small_folder, bundle, large.prompt(), handed, NUM)
    assert content(reply) == large.text(expected)
    assert expected != tiny.greedy(tiny.reference(folder), large.prompt(), NUM)  # the map is not exact: it shows
    assert usage["path"] == "mapped" and usage["mapped_tokens"] == handed - HEAD
    assert usage["provenance"] == moved.provenance == f"mapped:{moved.mapper}"
    assert usage["cached_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_worker_declines_what_it_predicts_to_be_late_and_refuses_more_than_its_context(
    pair: Pair, folder: Path, bundle: Path
) -> None:
    """Neither is a failure of the worker's: both are told by 4xx, and not to be tried again."""
    small, _ = pair
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], max_model_len=64) as large:
        large.worker.engine.rates.record("prefill", 1000, 1e6)
        large.worker.engine.rates.record("handoff", 64, 1e3, length=64)
        read = await small.client.prefill(PrefillRequest(token_ids=small.prompt(), tenant_salt=SALT), timeout_s=60)
        for fields, status, code in (
            ({"num_tokens": 60, "by_cost": True}, 409, "no_time"),
            ({"num_tokens": 65}, 400, "invalid_request"),
        ):
            asked = transfer_request(read.cache_id, **fields).model_dump()
            reply = await large.http.post("/v1/cache/transfer", json=asked)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert reply.headers["x-should-retry"] == "false"


async def test_a_hybrid_answer_is_the_replay_with_its_longer_tail(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path
) -> None:
    small, _ = pair
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], native_share=0.5) as large:
        large.worker.engine.rates.record("prefill", 1000, 10.0)
        large.worker.engine.rates.record("handoff", 64, 0.01, length=64)
        moved = await handed_over((small, large), by_cost=True)
        reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
        usage, prompt = reply["kv_transfer_params"], large.prompt()
    assert moved.decision == usage["path"] == "hybrid" and moved.num_tokens < len(prompt) - TAIL
    assert usage["mapped_tokens"] == moved.num_tokens - HEAD
    expected = replayed(folder, small_folder, bundle, prompt, moved.num_tokens, NUM)
    assert content(reply) == large.text(expected)


async def test_mapped_caches_are_never_found_by_their_tokens(pair: Pair) -> None:
    _, large = pair
    moved = await handed_over(pair)
    over_it = await large.chat(cache_id=moved.cache_id)
    assert (await large.chat(store=False))["kv_transfer_params"]["path"] == "prefill"
    talk = [*TALK, Message(role="assistant", content=content(over_it)), QUESTION]
    assert (await large.chat(talk, store=False))["kv_transfer_params"]["path"] == "prefill"


async def test_what_is_read_over_a_mapped_cache_is_mapped(pair: Pair) -> None:
    _, large = pair
    moved = await handed_over(pair)
    first = await large.chat(cache_id=moved.cache_id)
    extended = first["kv_transfer_params"]
    assert extended["provenance"] == moved.provenance and extended["num_tokens"] > moved.num_tokens
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    second = (await large.chat(talk, cache_id=extended["cache_id"]))["kv_transfer_params"]
    assert (second["path"], second["provenance"]) == ("mapped", moved.provenance)
    assert second["mapped_tokens"] == moved.num_tokens - HEAD


async def test_a_request_for_exact_caches_refuses_a_mapped_one(pair: Pair) -> None:
    _, large = pair
    moved = await handed_over(pair)
    extended = (await large.chat(cache_id=moved.cache_id))["kv_transfer_params"]["cache_id"]
    for cache_id in (moved.cache_id, extended):
        with pytest.raises(CacheMismatch, match="exact"):
            await large.chat(cache_id=cache_id, require_exact=True)


async def test_a_mapped_cache_is_cut_to_the_common_tokens(pair: Pair, folder: Path) -> None:
    _, large = pair
    moved = await handed_over(pair)
    other = [Message(role="system", content=TALK[0].text[:40] + "but a dog does not."), QUESTION]
    usage = (await large.chat(other, cache_id=moved.cache_id))["kv_transfer_params"]
    assert usage["path"] == "mapped" and 0 < usage["mapped_tokens"] < moved.num_tokens - HEAD


async def test_the_probe_compares_with_the_native_answer(pair: Pair, folder: Path, small_folder: Path) -> None:
    _, large = pair
    moved = await handed_over(pair)
    usage = (await large.chat(cache_id=moved.cache_id, agreement_probe=16))["kv_transfer_params"]
    native = tiny.greedy(tiny.reference(folder), large.prompt(), 16)
    forced = (large.prompt() + native[:-1])[moved.num_tokens :]
    model = tiny.reference(folder)
    cache = mappers.replay(
        large.worker.bundles.usable()[0], tiny.reference(small_folder), model, large.prompt(), moved.num_tokens, HEAD
    )
    logits = model.lm_head(run(model, forced, cache)[1][-len(native) :])
    agreed = (logits.argmax(-1) == torch.tensor(native)).float().mean()
    assert usage["top1_agreement"] == pytest.approx(float(agreed))
    assert usage["full_prefill_ms"] > 0


async def test_equal_tokens_have_one_digest_on_both_workers(pair: Pair) -> None:
    small, large = pair
    ids = small.prompt()
    moved = await handed_over(pair)
    native = await large.client.prefill(
        PrefillRequest(token_ids=ids[: moved.num_tokens], tenant_salt=SALT), timeout_s=60
    )
    assert moved.digest == native.digest


async def test_transfers_are_counted(pair: Pair) -> None:
    _, large = pair
    moved = await handed_over(pair)
    told = (await large.http.get("/metrics")).text
    assert 'kvrelay_kv_transfer_total{result="ok"} 1.0' in told
    assert "kvrelay_kv_transfer_duration_seconds_count 1.0" in told
    assert told.count('kvrelay_kv_transfer_phase_seconds_count{phase=') == len(TRANSFER_PHASES)
    assert 'kvrelay_kv_transfer_phase_seconds_count{phase="map"} 1.0' in told
    assert f"kvrelay_kv_transfer_tokens_total {float(moved.num_tokens - HEAD)}" in told
    assert (await large.client.info()).rates.map_tokens_per_s


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"source_worker": "http://127.0.0.1:1"}, InvalidRequest, "configured peers: small"),
        ({"target_model": "another"}, ModelNotFound, "another"),
        ({"source_model": "another"}, CacheMismatch, "another"),
        ({"mapper": "0" * 16}, BundleUnusable, "0000000000000000"),
        ({"tenant_salt": OTHER_SALT}, CacheMismatch, "another tenant"),
        ({"native_head": 10_000}, InvalidRequest, "native_head"),
        ({"num_tokens": 10_000}, InvalidRequest, "num_tokens"),
    ],
)
async def test_transfers_that_cannot_be(
    pair: Pair, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await handed_over(pair, **changes)
    assert pair[1].worker.pool.stats.used_blocks == 0


async def test_failed_transfers_are_counted_by_what_failed(pair: Pair) -> None:
    with pytest.raises(BundleUnusable):
        await handed_over(pair, mapper="0" * 16)
    told = (await pair[1].http.get("/metrics")).text
    assert 'kvrelay_kv_transfer_total{result="no_bundle"} 1.0' in told
    assert "kvrelay_kv_transfer_duration_seconds_count 0.0" in told, "a refusal tells nothing of how long a move takes"


@pytest.mark.parametrize(
    ("ppl_ratio", "top1", "documents", "usable"),
    [(1.24, 0.81, 50, True), (1.26, 0.9, 50, False), (1.1, 0.79, 50, False), (1.1, 0.9, 1, False)],
)
async def test_a_bundle_below_the_gate_is_not_used(
    folder: Path, small_folder: Path, tmp_path: Path, ppl_ratio: float, top1: float, documents: int, usable: bool
) -> None:
    judged = bundle(small_folder, folder, tmp_path / "bundle", ppl_ratio=ppl_ratio, top1=top1, documents=documents)
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[judged]) as large,
    ):
        (info,) = (await large.client.info()).bundles
        assert (info.usable, info.reason is None) == (usable, usable)
        if usable:
            await handed_over((small, large))
            return
        with pytest.raises(BundleUnusable):
            await handed_over((small, large))


async def test_a_bundle_for_other_weights_is_not_used(folder: Path, small_folder: Path, tmp_path: Path) -> None:
    wrong = bundle(folder, small_folder, tmp_path / "bundle")  # the other way round
    async with serving(folder, bundles=[wrong]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "weights" in info.reason


async def test_a_bundle_for_another_chat_template_is_not_used(
    folder: Path, bundle: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    async with serving(other, bundles=[bundle]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "another tokenizer or chat template" in info.reason


async def test_a_bundle_swapped_on_disk_changes_no_running_worker_and_serves_no_later_one(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    """The file is overwritten in place, as a careless copy does."""
    small, _ = pair
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[copy]) as large:
        first = await handed_over((small, large))
        weights = copy / "weights.safetensors"
        with weights.open("r+b") as file:
            file.seek(weights.stat().st_size // 2)
            file.write(bytes(weights.stat().st_size // 4))
        ids = small.prompt()
        again = await handed_over((small, large), num_tokens=len(ids) - TAIL - 40, native_head=8)  # nothing is reused
        expected = replayed(folder, small_folder, bundle, ids, again.num_tokens, NUM, head=8)
        reply = await large.chat(cache_id=again.cache_id, max_tokens=NUM)
        assert again.mapper == first.mapper and again.reused_tokens == 0
        assert content(reply) == large.text(expected)
    async with serving(folder, bundles=[copy]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "digest" in info.reason


async def test_a_corrupt_bundle_is_told_and_not_used(
    folder: Path, small_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    weights = copy / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    async with serving(folder, bundles=[copy]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "digest" in info.reason
