"""On every path the answer equals plain transformers, over the native cache or the offline replay."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import Messages, conversation, next_turn
from tests.e2e.running import ACCEPTING, NUM_TOKENS, Cluster, Reply
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL
from workers.reference import LOGPROB_TOLERANCE, Reference, Step


def differ(left: Sequence[Step], right: Sequence[Step]) -> bool:
    """Whether `Reference.check` would distinguish the two answers."""
    return len(left) != len(right) or any(
        one.token != other.token or abs(one.logprob - other.logprob) > 2 * LOGPROB_TOLERANCE
        for one, other in zip(left, right, strict=True)
    )


def test_forced_escalation_equals_the_replay(cluster: Cluster, reference: Reference, assert_right: AssertRight) -> None:
    messages = conversation("Rosalind")
    reply = cluster.client.escalate(messages)
    assert (reply.path, reply.report["tier"], reply.report["forced"]) == ("mapped", "large", True)
    num_prompt = len(reference.prompt(messages))
    assert reply.body["usage"]["prompt_tokens"] == num_prompt
    assert reply.report["handoff_tokens"] == num_prompt - TAIL
    assert reply.report["mapped_tokens"] == num_prompt - TAIL - HEAD
    assert reply.report["mapper"] == reference.mapper.bundle_id
    assert_right(reply, messages)
    # A mapped answer differs from a native one, or the line above would prove nothing.
    mapped = reference.handed_over(messages, reply.report["mapped_tokens"], NUM_TOKENS)
    assert differ(mapped, reference.native("large", messages, NUM_TOKENS))


def test_next_turn_uses_the_mapped_cache(cluster: Cluster, reference: Reference, assert_right: AssertRight) -> None:
    messages = conversation("Orlando")
    first = cluster.client.escalate(messages)
    after = next_turn(messages, first.text)
    second = cluster.client.escalate(after)
    assert (second.path, second.report["handoff_tokens"]) == ("mapped", None), "its own cache, not a new handoff"
    assert second.report["mapped_tokens"] == first.report["mapped_tokens"]
    assert_right(second, after)


def test_large_model_by_name(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Viola")
    for path in ("prefill", "exact"):
        reply = cluster.client.ask(messages, "large")
        assert (reply.path, reply.report["tier"]) == (path, "large")
        assert_right(reply, messages)
    assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_exact_cache_is_preferred_to_a_handoff(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Portia")
    cluster.client.ask(messages, "large")
    reply = cluster.client.escalate(messages)
    assert (reply.path, reply.report["handoff_tokens"], reply.report["mapped_tokens"]) == ("exact", None, 0)
    assert_right(reply, messages)


@pytest.mark.parametrize("option", ["exact", "no_cache"])
def test_exact_and_no_cache_never_use_a_mapped_cache(cluster: Cluster, assert_right: AssertRight, option: str) -> None:
    messages = conversation(f"Malvolio {option}")
    after = next_turn(messages, cluster.client.escalate(messages).text)
    for model, wanted in (("auto", messages), ("auto", after), ("large", after)):
        reply = cluster.client.ask(wanted, model, **{option: True})
        assert reply.report["mapped_tokens"] in (0, None)
        assert reply.path in ("prefill", "exact")
        assert_right(reply, wanted)
    forced = cluster.client.escalate(after, **{option: True})
    assert (forced.path in ("prefill", "exact"), forced.report["tier"]) == (True, "large")
    assert_right(forced, after)


def test_large_model_by_name_never_uses_a_mapped_cache(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Olivia")
    after = next_turn(messages, cluster.client.escalate(messages).text)
    for wanted in (messages, after):
        reply = cluster.client.ask(wanted, "large")
        assert reply.path in ("prefill", "exact")
        assert_right(reply, wanted)


def test_confident_small_answer_is_accepted(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Falstaff")
    for path in ("prefill", "exact"):
        reply = cluster.client.ask(messages)
        assert (reply.report["tier"], reply.path, reply.report["reason"]) == ("small", path, "confident")
        assert_right(reply, messages)


def test_unsure_small_answer_escalates(cluster: Cluster, reference: Reference, assert_right: AssertRight) -> None:
    with cluster.gateway("never-accepting", policy=ACCEPTING | {"threshold": 0.0}) as client:
        for name in ("Shallow", "Silence", "Mouldy"):
            messages = conversation(name)
            reply = client.ask(messages)
            assert (reply.report["tier"], reply.report["reason"]) == ("large", "unsure")
            assert reply.report["confidence"] < 0
            # This machine's measured rates decide which.
            max_mapped = len(reference.prompt(messages)) - TAIL - HEAD
            mapped = {"mapped": [max_mapped], "hybrid": range(1, max_mapped), "prefill": [0]}
            assert reply.report["mapped_tokens"] in mapped[reply.path]
            assert_right(reply, messages)


def test_escalation_hands_over_the_whole_history(
    cluster: Cluster, reference: Reference, assert_right: AssertRight
) -> None:
    messages = conversation("Perdita", num_words=120)
    for number in range(6):
        reply = cluster.client.ask(messages)
        assert reply.report["tier"] == "small"
        messages = next_turn(messages, reply.text, f"And what did the captain say in year {number}?")
    moved = cluster.client.escalate(messages)
    num_prompt = len(reference.prompt(messages))
    assert (moved.path, moved.report["mapped_tokens"]) == ("mapped", num_prompt - TAIL - HEAD)
    assert_right(moved, messages)


def test_short_prompt_is_prefilled(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = [{"role": "user", "content": "What is the password of Puck?"}]
    reply = cluster.client.escalate(messages)
    assert (reply.path, reply.report["tier"]) == ("prefill", "large")
    assert_right(reply, messages)


def test_bundle_for_other_weights_is_not_used(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Prospero")
    reply = cluster.client.escalate(messages, max_tier="misfit")
    assert (reply.path, reply.report["tier"]) == ("fallback:no_bundle", "misfit")
    assert_right(reply, messages)


def test_answer_comes_from_its_own_document(cluster: Cluster, reference: Reference, assert_right: AssertRight) -> None:
    """Two documents about one name with different facts, and the same question."""
    messages = [conversation("Ophelia", secret) for secret in ("silver river", "broken crown")]
    replies = [cluster.client.escalate(one) for one in messages]
    expected = []
    for one, reply in zip(messages, replies, strict=True):
        assert reply.path == "mapped"
        assert_right(reply, one)
        expected.append(reference.handed_over(one, reply.report["mapped_tokens"], NUM_TOKENS))
    assert differ(*expected), "the other document's cache would give another answer"


def test_concurrent_answers_equal_sequential_ones(cluster: Cluster, assert_right: AssertRight) -> None:
    kinds = {"handed over": {}, "again": {}, "exact": {"exact": True}, "stored nowhere": {"no_cache": True}}
    prompts = {kind: conversation(f"Horatio {'handed over' if kind == 'again' else kind}") for kind in kinds}

    def ask(kind: str) -> Reply:
        if kind in kinds:
            return cluster.client.escalate(prompts[kind], **kinds[kind])
        return cluster.client.ask(prompts[kind], kind)

    prompts |= {model: conversation(f"Horatio {model}") for model in ("small", "large")}
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = dict(zip(prompts, pool.map(ask, prompts), strict=True))
    for kind, reply in together.items():
        assert_right(reply, prompts[kind])
        alone = ask(kind)
        assert_right(alone, prompts[kind])
        assert alone.report["tier"] == reply.report["tier"]
        if alone.report["mapped_tokens"] == reply.report["mapped_tokens"]:
            assert alone.text == reply.text
    assert together["handed over"].path == together["again"].path == "mapped"


def test_same_prompt_six_times_at_once(cluster: Cluster, assert_right: AssertRight) -> None:
    messages: Messages = conversation("Banquo")
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: cluster.client.escalate(messages), range(6)))
    for reply in replies:
        assert reply.path == "mapped"
        assert_right(reply, messages)
    assert len({reply.text for reply in replies}) == 1
    assert len(replies[0].tokens) <= NUM_TOKENS
