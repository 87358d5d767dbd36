"""Every path's answer is the right one: by plain transformers over the native cache, or over the offline replay."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Right
from tests.e2e.running import CONTENT, NUM_TOKENS, Cluster, Reply
from tests.e2e.talks import Talk, carried_on, talk
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL
from workers.reference import LOGPROB_TOLERANCE, Reference, Step


def differ(left: Sequence[Step], right: Sequence[Step]) -> bool:
    """Whether `Reference.check` would tell the two answers apart."""
    return len(left) != len(right) or any(
        one.token != other.token or abs(one.logprob - other.logprob) > 2 * LOGPROB_TOLERANCE
        for one, other in zip(left, right, strict=True)
    )


def test_a_forced_escalation_is_the_replay(cluster: Cluster, reference: Reference, right: Right) -> None:
    asked = talk("Rosalind")
    reply = cluster.client.escalate(asked)
    assert (reply.path, reply.told["tier"], reply.told["forced"]) == ("mapped", "large", True)
    num_prompt = len(reference.prompt(asked))
    assert reply.body["usage"]["prompt_tokens"] == num_prompt
    assert reply.told["handoff_tokens"] == num_prompt - TAIL
    assert reply.told["mapped_tokens"] == num_prompt - TAIL - HEAD
    assert reply.told["mapper"] == reference.mapper.bundle_id
    right(reply, asked)
    # What tells a mapped answer from a native one, so that the line above means something.
    mapped = reference.handed_over(asked, reply.told["mapped_tokens"], NUM_TOKENS)
    assert differ(mapped, reference.native("large", asked, NUM_TOKENS))


def test_a_mapped_cache_carries_the_turn_after(cluster: Cluster, reference: Reference, right: Right) -> None:
    asked = talk("Orlando")
    first = cluster.client.escalate(asked)
    after = carried_on(asked, first.text)
    second = cluster.client.escalate(after)
    assert (second.path, second.told["handoff_tokens"]) == ("mapped", None), "its own cache, not a new handoff"
    assert second.told["mapped_tokens"] == first.told["mapped_tokens"]
    right(second, after)


def test_the_large_model_by_name(cluster: Cluster, right: Right) -> None:
    asked = talk("Viola")
    for path in ("prefill", "exact"):
        reply = cluster.client.ask(asked, "large")
        assert (reply.path, reply.told["tier"]) == (path, "large")
        right(reply, asked)
    assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_its_exact_cache_is_preferred_to_a_handoff(cluster: Cluster, right: Right) -> None:
    asked = talk("Portia")
    cluster.client.ask(asked, "large")
    reply = cluster.client.escalate(asked)
    assert (reply.path, reply.told["handoff_tokens"], reply.told["mapped_tokens"]) == ("exact", None, 0)
    right(reply, asked)


@pytest.mark.parametrize("option", ["exact", "no_cache"])
def test_a_mapped_cache_never_serves_who_wants_none(cluster: Cluster, right: Right, option: str) -> None:
    asked = talk(f"Malvolio {option}")
    after = carried_on(asked, cluster.client.escalate(asked).text)
    for model, wanted in (("auto", asked), ("auto", after), ("large", after)):
        reply = cluster.client.ask(wanted, model, **{option: True})
        assert reply.told["mapped_tokens"] in (0, None)
        assert reply.path in ("prefill", "exact")
        right(reply, wanted)
    forced = cluster.client.escalate(after, **{option: True})
    assert (forced.path in ("prefill", "exact"), forced.told["tier"]) == (True, "large")
    right(forced, after)


def test_a_mapped_cache_is_not_found_by_asking_for_the_model(cluster: Cluster, right: Right) -> None:
    asked = talk("Olivia")
    after = carried_on(asked, cluster.client.escalate(asked).text)
    for wanted in (asked, after):
        reply = cluster.client.ask(wanted, "large")
        assert reply.path in ("prefill", "exact")
        right(reply, wanted)


def test_the_small_models_answer_is_found_good_enough(cluster: Cluster, right: Right) -> None:
    asked = talk("Falstaff")
    for path in ("prefill", "exact"):
        reply = cluster.client.ask(asked)
        assert (reply.told["tier"], reply.path, reply.told["reason"]) == ("small", path, "confident")
        right(reply, asked)


def test_the_small_models_answer_is_not_good_enough(cluster: Cluster, reference: Reference, right: Right) -> None:
    with cluster.gateway("never-content", policy=CONTENT | {"threshold": 0.0}) as client:
        for name in ("Shallow", "Silence", "Mouldy"):
            asked = talk(name)
            reply = client.ask(asked)
            assert (reply.told["tier"], reply.told["reason"]) == ("large", "unsure")
            assert reply.told["confidence"] < 0
            num_most = len(reference.prompt(asked)) - TAIL - HEAD
            mapped = {"mapped": [num_most], "hybrid": range(1, num_most), "prefill": [0]}  # as this machine's costs say
            assert reply.told["mapped_tokens"] in mapped[reply.path]
            right(reply, asked)


def test_a_conversation_moved_up_hands_its_whole_history_over(
    cluster: Cluster, reference: Reference, right: Right
) -> None:
    asked = talk("Perdita", num_words=120)
    for number in range(6):
        reply = cluster.client.ask(asked)
        assert reply.told["tier"] == "small"
        asked = carried_on(asked, reply.text, f"And what did the captain say in year {number}?")
    moved = cluster.client.escalate(asked)
    num_prompt = len(reference.prompt(asked))
    assert (moved.path, moved.told["mapped_tokens"]) == ("mapped", num_prompt - TAIL - HEAD)
    right(moved, asked)


def test_a_short_prompt_is_read_in_full(cluster: Cluster, right: Right) -> None:
    asked = [{"role": "user", "content": "What is the password of Puck?"}]
    reply = cluster.client.escalate(asked)
    assert (reply.path, reply.told["tier"]) == ("prefill", "large")
    right(reply, asked)


def test_a_bundle_for_other_weights_is_told_and_not_used(cluster: Cluster, right: Right) -> None:
    asked = talk("Prospero")
    reply = cluster.client.escalate(asked, max_tier="misfit")
    assert (reply.path, reply.told["tier"]) == ("fallback:no_bundle", "misfit")
    right(reply, asked)


def test_the_fact_comes_from_the_right_document(cluster: Cluster, reference: Reference, right: Right) -> None:
    """Two documents about one name, each with its own fact, and the same question at their ends."""
    asked = [talk("Ophelia", secret) for secret in ("silver river", "broken crown")]
    replies = [cluster.client.escalate(one) for one in asked]
    expected = []
    for one, reply in zip(asked, replies, strict=True):
        assert reply.path == "mapped"
        right(reply, one)
        expected.append(reference.handed_over(one, reply.told["mapped_tokens"], NUM_TOKENS))
    assert differ(*expected), "the other document's cache would have shown"


def test_many_at_once_answer_as_one_at_a_time(cluster: Cluster, right: Right) -> None:
    kinds = {"handed over": {}, "again": {}, "exact": {"exact": True}, "stored nowhere": {"no_cache": True}}
    talks = {kind: talk(f"Horatio {'handed over' if kind == 'again' else kind}") for kind in kinds}

    def ask(kind: str) -> Reply:
        if kind in kinds:
            return cluster.client.escalate(talks[kind], **kinds[kind])
        return cluster.client.ask(talks[kind], kind)

    talks |= {model: talk(f"Horatio {model}") for model in ("small", "large")}
    with ThreadPoolExecutor(len(talks)) as pool:
        together = dict(zip(talks, pool.map(ask, talks), strict=True))
    for kind, reply in together.items():
        right(reply, talks[kind])
        alone = ask(kind)
        right(alone, talks[kind])
        assert alone.told["tier"] == reply.told["tier"]
        if alone.told["mapped_tokens"] == reply.told["mapped_tokens"]:
            assert alone.text == reply.text
    assert together["handed over"].path == together["again"].path == "mapped"


def test_one_prompt_asked_six_times_at_once(cluster: Cluster, right: Right) -> None:
    asked: Talk = talk("Banquo")
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: cluster.client.escalate(asked), range(6)))
    for reply in replies:
        assert reply.path == "mapped"
        right(reply, asked)
    assert len({reply.text for reply in replies}) == 1
    assert len(replies[0].tokens) <= NUM_TOKENS
