"""Mapped caches: answers match the offline replay, are marked as mapped, and are used by id only."""

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
    ServedWorker,
    bundle,
    content,
    serving,
    transfer_request,
)
from workers.api.errors import BundleUnusable, CacheMismatch, InvalidRequest, ModelNotFound
from workers.api.schemas import TRANSFER_PHASES, Message, PrefillRequest, TransferReply

HEAD, TAIL, NUM = 4, 16, 12

Pair = tuple[ServedWorker, ServedWorker]


async def hand_over(pair: Pair, num_tokens: int | None = None, **changes: Any) -> TransferReply:
    """Prefill the prompt on the small worker and transfer all but its tail to the large one."""
    small, large = pair
    ids = small.prompt()
    prefilled = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)
    fields = {"num_tokens": num_tokens or len(ids) - TAIL, "native_head": HEAD} | changes
    return await large.client.transfer(transfer_request(prefilled.cache_id, **fields), timeout_s=60)


def replay_answer(
    folder: Path, small_folder: Path, bundle: Path, prompt: list[int], handed: int, num: int, head: int = HEAD
) -> list[int]:
    """The greedy tokens of the large model over a replayed handoff of the first `handed` tokens."""
    model: LlamaForCausalLM = tiny.reference(folder)
    cache = mappers.replay(mappers.load(bundle), tiny.reference(small_folder), model, prompt, handed, head)
    tokens: list[int] = []
    for _ in range(num):
        _, hidden = run(model, (prompt + tokens)[handed:], cache)
        tokens.append(int(model.lm_head(hidden[-1]).argmax()))
    return tokens


async def test_mapped_answer_matches_replay(pair: Pair, folder: Path, small_folder: Path, bundle: Path) -> None:
    _, large = pair
    moved = await hand_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage, handed = reply["kv_transfer_params"], len(large.prompt()) - TAIL
    expected = replay_answer(folder, small_folder, bundle, large.prompt(), handed, NUM)
    assert content(reply) == large.text(expected)
    assert expected != tiny.greedy(tiny.reference(folder), large.prompt(), NUM)  # the map is inexact
    assert usage["path"] == "mapped" and usage["mapped_tokens"] == handed - HEAD
    assert usage["provenance"] == moved.provenance == f"mapped:{moved.mapper}"
    assert usage["cached_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_late_or_too_long_transfer_is_declined_and_not_retryable(pair: Pair, folder: Path, bundle: Path) -> None:
    """Neither is a failure of the worker: both reply with 4xx and `x-should-retry: false`."""
    small, _ = pair
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], max_model_len=64) as large:
        large.worker.engine.rates.record("prefill", 1000, 1e6)
        large.worker.engine.rates.record("handoff", 64, 1e3, length=64)
        prefilled = await small.client.prefill(PrefillRequest(token_ids=small.prompt(), tenant_salt=SALT), timeout_s=60)
        for fields, status, code in (
            ({"num_tokens": 60, "by_cost": True}, 409, "no_time"),
            ({"num_tokens": 65}, 400, "invalid_request"),
        ):
            request = transfer_request(prefilled.cache_id, **fields).model_dump()
            reply = await large.http.post("/v1/cache/transfer", json=request)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert reply.headers["x-should-retry"] == "false"


async def test_hybrid_answer_matches_replay_with_longer_tail(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path
) -> None:
    small, _ = pair
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], native_share=0.5) as large:
        large.worker.engine.rates.record("prefill", 1000, 10.0)
        large.worker.engine.rates.record("handoff", 64, 0.01, length=64)
        moved = await hand_over((small, large), by_cost=True)
        reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
        usage, prompt = reply["kv_transfer_params"], large.prompt()
    assert moved.decision == usage["path"] == "hybrid" and moved.num_tokens < len(prompt) - TAIL
    assert usage["mapped_tokens"] == moved.num_tokens - HEAD
    expected = replay_answer(folder, small_folder, bundle, prompt, moved.num_tokens, NUM)
    assert content(reply) == large.text(expected)


async def test_mapped_caches_are_not_matched_by_prefix(pair: Pair) -> None:
    _, large = pair
    moved = await hand_over(pair)
    answer = await large.chat(cache_id=moved.cache_id)
    assert (await large.chat(store=False))["kv_transfer_params"]["path"] == "prefill"
    talk = [*TALK, Message(role="assistant", content=content(answer)), QUESTION]
    assert (await large.chat(talk, store=False))["kv_transfer_params"]["path"] == "prefill"


async def test_tokens_prefilled_over_mapped_cache_are_mapped(pair: Pair) -> None:
    _, large = pair
    moved = await hand_over(pair)
    first = await large.chat(cache_id=moved.cache_id)
    extended = first["kv_transfer_params"]
    assert extended["provenance"] == moved.provenance and extended["num_tokens"] > moved.num_tokens
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    second = (await large.chat(talk, cache_id=extended["cache_id"]))["kv_transfer_params"]
    assert (second["path"], second["provenance"]) == ("mapped", moved.provenance)
    assert second["mapped_tokens"] == moved.num_tokens - HEAD


async def test_require_exact_rejects_mapped_cache(pair: Pair) -> None:
    _, large = pair
    moved = await hand_over(pair)
    extended = (await large.chat(cache_id=moved.cache_id))["kv_transfer_params"]["cache_id"]
    for cache_id in (moved.cache_id, extended):
        with pytest.raises(CacheMismatch, match="exact"):
            await large.chat(cache_id=cache_id, require_exact=True)


async def test_mapped_cache_is_cut_to_common_tokens(pair: Pair, folder: Path) -> None:
    _, large = pair
    moved = await hand_over(pair)
    other = [Message(role="system", content=TALK[0].text[:40] + "but a dog does not."), QUESTION]
    usage = (await large.chat(other, cache_id=moved.cache_id))["kv_transfer_params"]
    assert usage["path"] == "mapped" and 0 < usage["mapped_tokens"] < moved.num_tokens - HEAD


async def test_probe_compares_with_native_answer(pair: Pair, folder: Path, small_folder: Path) -> None:
    _, large = pair
    moved = await hand_over(pair)
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


async def test_equal_tokens_have_equal_digests_on_both_workers(pair: Pair) -> None:
    small, large = pair
    ids = small.prompt()
    moved = await hand_over(pair)
    native = await large.client.prefill(
        PrefillRequest(token_ids=ids[: moved.num_tokens], tenant_salt=SALT), timeout_s=60
    )
    assert moved.digest == native.digest


async def test_transfers_are_counted(pair: Pair) -> None:
    _, large = pair
    moved = await hand_over(pair)
    metrics = (await large.http.get("/metrics")).text
    assert 'kvrelay_kv_transfer_total{result="ok"} 1.0' in metrics
    assert "kvrelay_kv_transfer_duration_seconds_count 1.0" in metrics
    assert metrics.count("kvrelay_kv_transfer_phase_seconds_count{phase=") == len(TRANSFER_PHASES)
    assert 'kvrelay_kv_transfer_phase_seconds_count{phase="map"} 1.0' in metrics
    assert f"kvrelay_kv_transfer_tokens_total {float(moved.num_tokens - HEAD)}" in metrics
    assert (await large.client.info()).rates.map_tokens_per_s


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source_worker": "http://127.0.0.1:1"}, InvalidRequest, "known peers: small"),
        ({"target_model": "another"}, ModelNotFound, "another"),
        ({"source_model": "another"}, CacheMismatch, "another"),
        ({"mapper": "0" * 16}, BundleUnusable, "0000000000000000"),
        ({"tenant_salt": OTHER_SALT}, CacheMismatch, "another tenant"),
        ({"native_head": 10_000}, InvalidRequest, "native_head"),
        ({"num_tokens": 10_000}, InvalidRequest, "num_tokens"),
    ],
)
async def test_invalid_transfers_are_rejected(
    pair: Pair, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await hand_over(pair, **changes)
    assert pair[1].worker.pool.stats.used_blocks == 0


async def test_failed_transfers_are_counted_by_reason(pair: Pair) -> None:
    with pytest.raises(BundleUnusable):
        await hand_over(pair, mapper="0" * 16)
    metrics = (await pair[1].http.get("/metrics")).text
    assert 'kvrelay_kv_transfer_total{result="no_bundle"} 1.0' in metrics
    assert "kvrelay_kv_transfer_duration_seconds_count 0.0" in metrics, "a refusal is not a transfer duration"


@pytest.mark.parametrize(
    ("ppl_ratio", "top1", "documents", "usable"),
    [(1.24, 0.81, 50, True), (1.26, 0.9, 50, False), (1.1, 0.79, 50, False), (1.1, 0.9, 1, False)],
)
async def test_bundle_below_the_gate_is_not_used(
    folder: Path, small_folder: Path, tmp_path: Path, ppl_ratio: float, top1: float, documents: int, usable: bool
) -> None:
    evaluated = bundle(small_folder, folder, tmp_path / "bundle", ppl_ratio=ppl_ratio, top1=top1, documents=documents)
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[evaluated]) as large,
    ):
        (info,) = (await large.client.info()).bundles
        assert (info.usable, info.reason is None) == (usable, usable)
        if usable:
            await hand_over((small, large))
            return
        with pytest.raises(BundleUnusable):
            await hand_over((small, large))


async def test_bundle_for_other_weights_is_not_used(folder: Path, small_folder: Path, tmp_path: Path) -> None:
    wrong = bundle(folder, small_folder, tmp_path / "bundle")  # source and target swapped
    async with serving(folder, bundles=[wrong]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "weights" in info.reason


async def test_bundle_for_another_chat_template_is_not_used(folder: Path, bundle: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    async with serving(other, bundles=[bundle]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "another tokenizer or chat template" in info.reason


async def test_bundle_overwritten_on_disk_affects_only_later_workers(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    """The file is overwritten in place, as a careless copy would."""
    small, _ = pair
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[copy]) as large:
        first = await hand_over((small, large))
        weights = copy / "weights.safetensors"
        with weights.open("r+b") as file:
            file.seek(weights.stat().st_size // 2)
            file.write(bytes(weights.stat().st_size // 4))
        ids = small.prompt()
        again = await hand_over((small, large), num_tokens=len(ids) - TAIL - 40, native_head=8)  # no reuse
        expected = replay_answer(folder, small_folder, bundle, ids, again.num_tokens, NUM, head=8)
        reply = await large.chat(cache_id=again.cache_id, max_tokens=NUM)
        assert again.mapper == first.mapper and again.reused_tokens == 0
        assert content(reply) == large.text(expected)
    async with serving(folder, bundles=[copy]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "digest" in info.reason


async def test_corrupt_bundle_is_reported_and_not_used(
    folder: Path, small_folder: Path, bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    weights = copy / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    async with serving(folder, bundles=[copy]) as large:
        (info,) = (await large.client.info()).bundles
        assert not info.usable and info.reason and "digest" in info.reason
