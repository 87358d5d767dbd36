"""Shadow comparison of mapped with native caches in idle time, and the bundles it switches off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import LlamaForCausalLM

import mappers
from mappers.manifest import QualityGate
from mappers.models import run
from tests.workers.engines import tiny
from tests.workers.server.support import SALT, TALK, ServedWorker, bundle, content, serving, transfer_request, until
from tests.workers.server.test_upgrade import WatchedCompute
from workers.api.errors import BundleUnusable, CacheNotFound, PoolFull
from workers.api.schemas import DEFAULT_NATIVE_TAIL, BundleInfo, Message, PrefillRequest, TransferReply
from workers.bundles import Comparison, ComparisonWindow
from workers.engines.transformers.engine import TransformersEngine
from workers.serving.idle import STEP_TOKENS
from workers.serving.shadow import MAX_WAITING, Shadow, compare

HEAD, TAIL, NUM = 4, 16, 12
WINDOW = 3
IDLE_S = 0.05
OVER = f"over the last {WINDOW} answers compared in service"

Pair = tuple[ServedWorker, ServedWorker]


@pytest.fixture(scope="session")
def good_bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle from a model to itself, whose mapped caches are exact."""
    return bundle(folder, folder, tmp_path_factory.mktemp("bundles") / "good")


@asynccontextmanager
async def serving_pair(source: Path, target: Path, bundle: Path, **changes: Any) -> AsyncIterator[Pair]:
    """Serve a pair like the conftest's `pair`; the large worker compares only when a test calls it."""
    fields = {"shadow_idle_s": 3600.0, "shadow_window": WINDOW} | changes
    async with (
        serving(source, id="small") as small,
        serving(target, id="large", peers={"small": small.app}, bundles=[bundle], **fields) as large,
    ):
        yield small, large


async def hand_over(pair: Pair, messages: Sequence[Message] = TALK, *, whole: bool = False) -> TransferReply:
    small, large = pair
    ids = small.prompt(messages)
    prefilled = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)
    num_tokens = None if whole else len(ids) - TAIL
    request = transfer_request(prefilled.cache_id, num_tokens=num_tokens, native_head=HEAD)
    return await large.client.transfer(request, timeout_s=60)


async def mapped_answer(pair: Pair, **changes: Any) -> dict[str, Any]:
    moved = await hand_over(pair)
    fields: dict[str, Any] = {"cache_id": moved.cache_id, "max_tokens": NUM, "shadow": True} | changes
    return await pair[1].chat(**fields)


def replace_shadow(large: ServedWorker) -> Shadow:
    """Replace the worker's shadow by one with a short idle time."""
    worker = large.worker
    shadow = Shadow(worker.engine, worker.pool, worker.bundles, worker.transfers, worker.metrics, IDLE_S)
    worker.generations.shadow = shadow
    return shadow


async def bundle_info(large: ServedWorker) -> BundleInfo:
    return (await large.client.info(timeout_s=5)).bundles[0]


@pytest.mark.parametrize(
    ("comparisons", "objection"),
    [
        ([(10, 0.0)] * 3, None),
        ([(0, 9.0)] * 2, None),  # the window is not full yet
        ([(5, 0.0)] * 3, f"top-1 agreement 0.500 {OVER} is below the gate's 0.8"),
        ([(10, 5.0)] * 3, f"perplexity ratio 1.649 {OVER} is above the gate's 1.25"),
        ([(0, 9.0)] * 2 + [(10, 0.0)] * 3, None),  # outside the window
    ],
)
def test_full_window_below_the_gate_objects(comparisons: list[tuple[int, float]], objection: str | None) -> None:
    window = ComparisonWindow(QualityGate(), WINDOW)
    for num_agreed, kl_sum in comparisons:
        window.add(Comparison(10, num_agreed, kl_sum))
    assert window.objection == objection


def test_distributions_are_compared_by_position() -> None:
    native = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    mapped = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    comparison = compare(native, mapped)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert (comparison.num_tokens, comparison.num_agreed) == (2, 1)
    assert comparison.kl_sum == pytest.approx(expected, rel=1e-6)


async def test_comparison_matches_replay_of_the_handoff(
    folder: Path, small_folder: Path, bundle: Path, reference: LlamaForCausalLM
) -> None:
    async with serving_pair(small_folder, folder, bundle) as (small, large):
        shadow, prompt = replace_shadow(large), large.prompt()
        reply = await mapped_answer((small, large))
        assert await shadow.compare_one()
        info = (await bundle_info(large)).shadow
        ids = list(large.worker.pool.peek(reply["kv_transfer_params"]["cache_id"]).token_ids)
    handed = len(prompt) - TAIL
    cache = mappers.replay(mappers.load(bundle), tiny.reference(small_folder), reference, prompt, handed, HEAD)
    _, hidden = run(reference, ids[handed:], cache)
    mapped = reference.lm_head(hidden).log_softmax(-1)[TAIL - 1 :]
    native = reference(torch.tensor([ids])).logits[0].log_softmax(-1)[len(prompt) - 1 :]
    expected = compare(native, mapped)
    assert info is not None and info.num_answers == 1
    assert info.top1 == expected.num_agreed / expected.num_tokens
    assert info.ppl_ratio == pytest.approx(math.exp(expected.kl_mean), rel=1e-3)


async def test_good_bundle_stays_on(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as (small, large):
        shadow = replace_shadow(large)
        for _ in range(WINDOW + 1):
            await mapped_answer((small, large))
            assert await shadow.compare_one()
        info = await bundle_info(large)
        assert info.usable and info.shadow is not None and (info.shadow.num_answers, info.shadow.top1) == (WINDOW, 1.0)
        assert info.shadow.ppl_ratio == pytest.approx(1.0, abs=1e-4)
        metrics = (await large.http.get("/metrics")).text
        assert f'kvrelay_mapper_usable{{bundle="{info.bundle_id}"}} 1.0' in metrics
        assert f'kvrelay_mapper_shadow_kl_count{{bundle="{info.bundle_id}"}} {WINDOW + 1}.0' in metrics
        assert f'kvrelay_mapper_shadow_top1_total{{bundle="{info.bundle_id}",result="other"}} 0.0' in metrics


async def test_poor_bundle_is_switched_off(folder: Path, small_folder: Path, bundle: Path) -> None:
    """The bundle's evaluation claims perfection, but it passes another model's values through."""
    async with serving_pair(small_folder, folder, bundle) as (small, large):
        shadow = replace_shadow(large)
        for _ in range(WINDOW):
            assert (await bundle_info(large)).usable
            served = await mapped_answer((small, large))
            assert await shadow.compare_one()
        info = await bundle_info(large)
        assert not info.usable and info.reason is not None and OVER in info.reason
        with pytest.raises(BundleUnusable, match=f"refused: {info.bundle_id}: .* compared in service is"):
            await mapped_answer((small, large))
        with pytest.raises(CacheNotFound):  # earlier mapped caches are dropped
            await large.chat(cache_id=served["kv_transfer_params"]["cache_id"])
        assert not large.worker.pool.mapped_caches()
        assert f'kvrelay_mapper_usable{{bundle="{info.bundle_id}"}} 0.0' in (await large.http.get("/metrics")).text


def test_trials_need_a_higher_score_than_service() -> None:
    service = ComparisonWindow(QualityGate(), WINDOW)
    trials = service.for_trials()
    for window in (service, trials):
        for number in range(WINDOW):
            window.add(Comparison(100, 82, 0.0, digest=str(number)))
    assert service.objection is None
    assert trials.objection == f"top-1 agreement 0.820 {OVER} is below the gate's 0.84"


def switch_off(large: ServedWorker) -> None:
    """Record poor comparisons until the bundle is off."""
    bundles = large.worker.bundles
    (info,) = bundles.infos
    for _ in range(WINDOW):
        assert bundles.usable()
        large.worker.shadow.record(info.bundle_id, Comparison(10, 0, 90.0))
    assert not bundles.usable()


async def expect_refusal(pair: Pair, number: int = 0, **changes: Any) -> None:
    """Expect the handoff of a prompt with this number to be refused."""
    with pytest.raises(BundleUnusable):
        await hand_over(pair, [Message(role="system", content=f"Case {number}."), *TALK], **changes)


async def test_bundle_that_passes_its_trials_is_switched_on_again(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        for number in range(WINDOW):
            await expect_refusal(pair, number)
            assert await shadow.compare_one()
            assert not large.worker.pool.mapped_caches(), "a trial must leave no mapped cache"
            assert (await bundle_info(large)).usable == (number == WINDOW - 1)
        assert (await mapped_answer(pair))["kv_transfer_params"]["mapped_tokens"]
        info = await bundle_info(large)
        assert info.reason is None and info.shadow is None, "the window must start again"
        metrics = (await large.http.get("/metrics")).text
        assert f'kvrelay_mapper_usable{{bundle="{info.bundle_id}"}} 1.0' in metrics
        assert f'kvrelay_mapper_shadows_total{{result="tried"}} {WINDOW}.0' in metrics


async def test_trial_matches_replay_of_a_served_handoff(
    folder: Path, small_folder: Path, bundle: Path, reference: LlamaForCausalLM
) -> None:
    """A trial compares over the prompt's last tokens, with a native tail before them."""
    async with serving_pair(small_folder, folder, bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        with pytest.raises(BundleUnusable):
            await hand_over(pair)
        assert await shadow.compare_one()
        info, ids = (await bundle_info(large)).shadow, large.prompt()[:-TAIL]
    begin, handed = len(ids) - STEP_TOKENS, len(ids) - STEP_TOKENS - DEFAULT_NATIVE_TAIL
    cache = mappers.replay(mappers.load(bundle), tiny.reference(small_folder), reference, ids, handed, HEAD)
    _, hidden = run(reference, ids[handed:], cache)
    mapped = reference.lm_head(hidden).log_softmax(-1)[begin - handed :]
    native = reference(torch.tensor([ids])).logits[0].log_softmax(-1)[begin:]
    expected = compare(native, mapped)
    assert info is not None and info.top1 == expected.num_agreed / STEP_TOKENS
    assert info.ppl_ratio == pytest.approx(math.exp(expected.kl_mean), rel=1e-3)


async def test_bundle_that_fails_its_trials_stays_off(folder: Path, small_folder: Path, bundle: Path) -> None:
    async with serving_pair(small_folder, folder, bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        for number in range(WINDOW + 1):
            await expect_refusal(pair, number)
            assert await shadow.compare_one()
        info = await bundle_info(large)
        assert not info.usable and info.shadow is not None and info.shadow.num_answers == WINDOW


async def test_repeated_prompt_counts_as_one_trial(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        for number in (0, 1, 0, 1, 1, 2):
            info = await bundle_info(large)
            assert not info.usable and info.on_trial and (info.shadow is None or info.shadow.num_answers < WINDOW)
            await expect_refusal(pair, number)
            assert await shadow.compare_one()
        info = await bundle_info(large)
        assert info.usable and not info.on_trial


async def test_handoff_without_num_tokens_is_tried(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        await expect_refusal(pair, whole=True)
        assert await shadow.compare_one()
        assert (await bundle_info(large)).shadow is not None


async def test_answer_is_returned_but_not_stored_if_its_bundle_goes_off_meanwhile(
    folder: Path, good_bundle: Path
) -> None:
    async with serving_pair(folder, folder, good_bundle) as pair:
        _, large = pair
        moved = await hand_over(pair)
        answering = asyncio.create_task(large.chat(cache_id=moved.cache_id, max_tokens=150))
        await until(lambda: large.worker.engine.admission.num_running == 1)
        switch_off(large)
        reply = await answering
        usage = reply["kv_transfer_params"]
        assert content(reply) and usage["mapped_tokens"] and usage["cache_id"] is None
        assert not large.worker.pool.mapped_caches() and not large.worker.pool.stats.num_caches


async def test_bundle_rests_before_its_trials(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        await expect_refusal(pair)
        assert not await shadow.compare_one() and not (await bundle_info(large)).on_trial


async def test_operator_can_resume_a_bundle_without_trials(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as pair:
        large = pair[1]
        switch_off(large)
        await expect_refusal(pair)
        (off,) = large.worker.bundles.infos
        on = await large.client.resume_bundle(off.bundle_id)
        assert (off.usable, on.usable, on.reason, on.shadow) == (False, True, None, None)
        assert (await large.client.resume_bundle(off.bundle_id)).usable, "resuming twice changes nothing"
        assert f'kvrelay_mapper_usable{{bundle="{off.bundle_id}"}} 1.0' in (await large.http.get("/metrics")).text
        assert (await mapped_answer(pair))["kv_transfer_params"]["mapped_tokens"]
        with pytest.raises(BundleUnusable, match=f"unknown bundle 'other'; known: {off.bundle_id}"):
            await large.client.resume_bundle("other")


async def test_bundle_refused_at_startup_cannot_be_resumed(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle, gate={"min_documents": 10_000}) as (_, large):
        (info,) = large.worker.bundles.infos
        assert not info.usable
        with pytest.raises(BundleUnusable, match="was refused at the start: "):
            await large.client.resume_bundle(info.bundle_id)


async def test_trial_evicts_nothing(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle, shadow_rest_s=0.0) as pair:
        shadow, large = replace_shadow(pair[1]), pair[1]
        switch_off(large)
        await expect_refusal(pair)
        pool, kept = large.worker.pool, (await large.chat())["kv_transfer_params"]
        with pool.allocate(pool.stats.free_blocks), pytest.raises(PoolFull):
            await shadow.compare_one()
        assert pool.get(kept["cache_id"], SALT) and pool.stats.num_caches == 1


async def test_comparison_yields_to_requests_between_steps(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as (small, large):
        engine, release, working = large.worker.engine, asyncio.Event(), list[asyncio.Task[None]]()

        async def work() -> None:
            async with engine.admit():
                await release.wait()

        def begin(num_steps: int) -> None:
            if num_steps == 2:
                working.append(asyncio.create_task(work()))

        shadow = replace_shadow(large)
        await mapped_answer((small, large))
        engine.compute.close()
        engine.compute = watched = WatchedCompute(begin)
        running = asyncio.create_task(shadow.run())
        await until(lambda: bool(working))
        await asyncio.sleep(10 * IDLE_S)
        assert watched.num_background == 2 and (await bundle_info(large)).shadow is None
        release.set()
        await until(lambda: large.worker.bundles.infos[0].shadow is not None)
        running.cancel()


@pytest.mark.parametrize("changes", [{"shadow": False}, {"cache_id": None}])
async def test_only_marked_mapped_answers_are_compared(
    folder: Path, good_bundle: Path, changes: dict[str, Any]
) -> None:
    async with serving_pair(folder, folder, good_bundle) as pair:
        shadow = replace_shadow(pair[1])
        await mapped_answer(pair, **changes)
        assert not await shadow.compare_one()


async def test_engine_without_logprobs_is_not_compared(
    folder: Path, good_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersEngine, "supports_logprobs", False)
    async with serving_pair(folder, folder, good_bundle) as pair:
        shadow = replace_shadow(pair[1])
        assert content(await mapped_answer(pair))
        assert not await shadow.compare_one()
        assert pair[1].worker.metrics.shadows.labels("unsupported")._value.get() == 1


async def test_missing_caches_and_dropped_comparisons_are_counted(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as (small, large):
        shadow = replace_shadow(large)
        for _ in range(MAX_WAITING + 1):
            await mapped_answer((small, large), max_tokens=1)
        for entry in large.worker.pool.mapped_caches():
            large.worker.pool.drop(entry.cache_id, SALT)
        running = asyncio.create_task(shadow.run())
        gone = large.worker.metrics.shadows.labels("cache_not_found")
        await until(lambda: gone._value.get() == MAX_WAITING)
        running.cancel()
        assert 'kvrelay_mapper_shadows_total{result="dropped"} 1.0' in (await large.http.get("/metrics")).text


async def test_prompt_is_not_logged(folder: Path, good_bundle: Path) -> None:
    async with serving_pair(folder, folder, good_bundle) as (small, large):
        shadow = replace_shadow(large)
        with structlog.testing.capture_logs() as lines:
            reply = await mapped_answer((small, large))
            served = repr(shadow._waiting[0])
            assert await shadow.compare_one()
        assert [line["event"] for line in lines if line["event"] == "compared"]
        for text in (str(lines), served):
            assert "quick brown" not in text and content(reply)[:12] not in text and SALT not in text
            assert str(large.prompt()[5:8])[1:-1] not in text
