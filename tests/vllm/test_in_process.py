"""The connector inside vLLM, in one process: loaded KV answers like prefilled KV, and reaches no other request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mappers.models import prefill
from tests.vllm.conftest import BLOCK_TOKENS as BLOCK
from tests.vllm.support import Peer, params, peer_of, replay_answer
from tests.workers.engines import tiny
from tests.workers.engines.tiny import random_tokens
from tests.workers.pool.support import SALT
from workers.engines.vllm.plan import TransferReport
from workers.engines.vllm.worker import PoolReaders

NUM = 6
TOLERANCE = 1e-4  # float32 sums in another order

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    report: TransferReport
    num_cached: int


@pytest.fixture
def ask(llm: Any) -> Any:
    from vllm import SamplingParams

    def answer(prompt: Sequence[int], transfer: Any = None, num: int = NUM, salt: str | None = None) -> Answer:
        extra = {"kv_transfer_params": transfer} if transfer is not None else None
        sampling = SamplingParams(
            temperature=0, max_tokens=num, logprobs=0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        given: dict[str, Any] = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        output = llm.generate([given], sampling, use_tqdm=False)[0]
        completion = output.outputs[0]
        return Answer(
            list(completion.token_ids),
            [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)],
            TransferReport.model_validate(output.kv_transfer_params or {}),
            output.num_cached_tokens,
        )

    return answer


_salts = itertools.count()


def fresh_salt() -> str:
    """A salt under which vLLM has cached nothing."""
    return f"fresh-{next(_salts)}"


@pytest.fixture
def small(small_folder: Path) -> Iterator[Peer]:
    peer = peer_of(small_folder, 2, block_tokens=20)
    yield peer
    peer.pool.close()


@pytest.fixture
def large(folder: Path) -> Iterator[Peer]:
    peer = peer_of(folder, 3, block_tokens=16)
    yield peer
    peer.pool.close()


def assert_answers_alike(left: Answer, right: Answer) -> None:
    assert left.token_ids == right.token_ids
    assert left.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("num_tokens", [BLOCK + 5, 8 * BLOCK, 300])
def test_published_kv_is_native_and_answers_like_prefill(ask: Any, folder: Path, num_tokens: int) -> None:
    ids = random_tokens(num_tokens + 40, seed=num_tokens)
    native = ask(ids, salt=fresh_salt())
    published = ask(ids[:num_tokens], params(publish=True), num=1).report.ticket
    assert published is not None and published.num_tokens == num_tokens
    sources = PoolReaders()
    kv = sources.reader(published).read(published.blocks, published.generations, 0, num_tokens)
    expected = prefill(tiny.reference(folder), ids[:num_tokens])
    for actual, native_kv in zip(kv.keys + kv.values, expected.keys + expected.values, strict=True):
        torch.testing.assert_close(actual, native_kv, atol=TOLERANCE, rtol=0)
    sources.close()
    loaded = ask(ids, params(published))
    assert loaded.report.loaded_tokens == num_tokens
    assert_answers_alike(loaded, native)


@pytest.mark.parametrize("num_tokens", [3 * BLOCK, 3 * BLOCK + 7])
def test_loaded_kv_never_reaches_an_exact_request(ask: Any, large: Peer, folder: Path, num_tokens: int) -> None:
    ids, other = random_tokens(num_tokens, seed=1), random_tokens(num_tokens, seed=2)
    question = random_tokens(20, seed=3)
    wrong_ticket = large.ticket(ids, prefill(tiny.reference(folder), other))
    poisoned = ask([*ids, *question], params(wrong_ticket))
    native = ask([*ids, *question])
    again = ask([*ids, *question], params(wrong_ticket))
    assert poisoned.report.loaded_tokens == num_tokens
    assert poisoned.logprobs != pytest.approx(native.logprobs, abs=0.1)
    assert_answers_alike(again, poisoned)
    reference = tiny.greedy(tiny.reference(folder), [*ids, *question], NUM)
    assert native.token_ids[: len(reference)] == reference


@pytest.mark.parametrize(("head", "dtype"), [(4, "float32"), (BLOCK + 1, "float32"), (4, "bfloat16")])
def test_native_head_and_mapped_rest_match_replay(
    ask: Any, small_folder: Path, folder: Path, bundle: Path, head: int, dtype: str
) -> None:
    ids, tail = random_tokens(150, seed=7), 30
    handed = len(ids) - tail
    model, source_model = tiny.reference(folder), tiny.reference(small_folder).to(getattr(torch, dtype))
    small = peer_of(small_folder, 2, block_tokens=20, dtype=dtype)
    source = small.ticket(ids[:handed], prefill(source_model, ids[:handed]))
    head_ticket = ask(ids[:head], params(publish=True), num=1).report.ticket
    answer = ask(ids, params(head_ticket, source))
    small.pool.close()
    assert answer.report.loaded_tokens == handed
    assert answer.token_ids == replay_answer(bundle, source_model, model, ids, handed, head, NUM)


@pytest.mark.parametrize("lost", ["all", "later blocks"])
def test_unreadable_source_is_recomputed_without_retries(
    ask: Any, large: Peer, small: Peer, small_folder: Path, folder: Path, lost: str
) -> None:
    ids = random_tokens(200, seed=11)
    reference = prefill(tiny.reference(folder), ids[:96])
    first = large.ticket(ids[:96], reference)
    closed = small.ticket(ids[:180], prefill(tiny.reference(small_folder), ids[:180]))
    small.pool.close()
    given = params(closed) if lost == "all" else params(first, closed)
    answer = ask(ids, given)
    again = ask(ids, given)  # must not find the prefilled blocks as if they were loaded
    assert_answers_alike(answer, ask(ids, salt=fresh_salt()))
    assert_answers_alike(again, answer)
    assert answer.report.loaded_tokens == again.report.loaded_tokens == (0 if lost == "all" else 96)
    assert answer.report.refused and again.report.refused
    assert answer.num_cached >= answer.report.loaded_tokens  # vLLM also counts failed loads; the report does not


@pytest.mark.parametrize("bad", [{"cache_id": 5}, {"tenant_salt": SALT, "load": 5}, {"tenant_salt": None}], ids=str)
def test_bad_parameters_are_reported_and_answered(ask: Any, bad: Any) -> None:
    ids = random_tokens(60, seed=13)
    answer = ask(ids, bad)
    assert answer.report.refused
    assert_answers_alike(answer, ask(ids, salt=fresh_salt()))


def test_fully_cached_prompt_computes_one_token(ask: Any, large: Peer, folder: Path) -> None:
    ids = random_tokens(4 * BLOCK, seed=17)
    answer = ask(ids, params(large.ticket(ids, prefill(tiny.reference(folder), ids))))
    assert answer.report.loaded_tokens == len(ids) - 1
    assert_answers_alike(answer, ask(ids, salt=fresh_salt()))


def test_requests_with_different_caches_run_in_one_batch(llm: Any, large: Peer, folder: Path) -> None:
    from vllm import SamplingParams

    prompts = [random_tokens(140 + 9 * i, seed=20 + i) for i in range(4)]
    model = tiny.reference(folder)
    tickets = [large.ticket(ids[:-20], prefill(model, ids[:-20])) for ids in prompts]
    samplings = [
        SamplingParams(
            temperature=0,
            max_tokens=NUM,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params(ticket)},
        )
        for ticket in tickets
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], samplings, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.kv_transfer_params["loaded_tokens"] == len(ids) - 20
        expected = tiny.greedy(model, ids, NUM)
        assert list(output.outputs[0].token_ids)[: len(expected)] == expected
