"""Hash chains over messages, the stable prefix, and the messages sent to workers."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.lookup import Chain
from gateway.schemas import num_stable, plain
from workers.api.schemas import Message

SALT, OTHER_SALT = "0" * 64, "1" * 64
CONVERSATION = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And?"},
]


def messages(*bodies: dict[str, Any]) -> list[Message]:
    return [Message.model_validate(body) for body in bodies]


def hashes(*bodies: dict[str, Any], model: str = "m", tools: Any = None, salt: str = SALT) -> tuple[str, ...]:
    return Chain.over(messages(*bodies), model=model, tools=tools, salt=salt).hashes


def test_a_longer_conversation_extends_the_chain_of_the_shorter() -> None:
    assert hashes(*CONVERSATION)[:3] == hashes(*CONVERSATION[:2])


def test_a_link_is_an_hmac_of_the_previous_link_and_the_message() -> None:
    first, second = hashes(*CONVERSATION[:1])
    content = bytes.fromhex(first) + b'|{"content":"You help.","role":"system"}'
    assert second == hmac.digest(bytes.fromhex(SALT), content, "sha256").hex()


def test_extending_a_chain_equals_hashing_the_whole() -> None:
    chain = Chain.over(messages(*CONVERSATION[:3]), model="m", tools=None, salt=SALT)
    assert chain.extended(CONVERSATION[3]).hashes == hashes(*CONVERSATION)


def test_longest_first_excludes_the_empty_prefix() -> None:
    chain = Chain.over(messages(*CONVERSATION), model="m", tools=None, salt=SALT)
    assert chain.longest_first() == list(reversed(chain.hashes[1:]))
    assert chain.longest_first(2) == [chain.hashes[4], chain.hashes[3]]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"salt": OTHER_SALT},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=["model", "tenant", "tools"],
)
def test_model_tenant_and_tools_change_every_hash(other: dict[str, Any]) -> None:
    assert not set(hashes(*CONVERSATION)) & set(hashes(*CONVERSATION, **other))


def test_a_changed_message_changes_all_later_hashes() -> None:
    changed = [*CONVERSATION[:1], {"role": "user", "content": "Ho"}, *CONVERSATION[2:]]
    one, other = hashes(*CONVERSATION), hashes(*changed)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_message_boundaries_change_the_hash() -> None:
    assert (
        hashes({"role": "user", "content": "ab"})[-1]
        != hashes({"role": "user", "content": "a"}, {"role": "user", "content": "b"})[-1]
    )


@pytest.mark.parametrize(
    "echo",
    [
        {"content": "Hello", "role": "assistant"},
        {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Hello", "cache_control": {"type": "ephemeral"}},
    ],
    ids=["order", "nulls", "part", "parts", "mark"],
)
def test_equivalent_messages_have_the_same_hash(echo: dict[str, Any]) -> None:
    assert hashes(echo) == hashes({"role": "assistant", "content": "Hello"})


@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.lists(st.text(max_size=20), min_size=1, max_size=6))
def test_different_conversations_have_different_hashes(left: list[str], right: list[str]) -> None:
    one = hashes(*({"role": "user", "content": text} for text in left))
    other = hashes(*({"role": "user", "content": text} for text in right))
    assert (one[-1] == other[-1]) == (left == right)


@pytest.mark.parametrize(
    ("bodies", "stable"),
    [
        (CONVERSATION, 3),
        (CONVERSATION[:2], 1),
        ([{"role": "user", "content": "Hi"}], 0),
        ([{"role": "system", "content": "Hi"}], 1),
        ([{"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}, *CONVERSATION], 1),
        ([*CONVERSATION, {"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "1"}], 3),
        (
            [
                {"role": "user", "content": [{"type": "text", "text": "doc", "cache_control": {"type": "ephemeral"}}]},
                {"role": "user", "content": "q"},
                {"role": "user", "content": "q"},
            ],
            1,
        ),
    ],
)
def test_num_stable_counts_the_stable_messages(bodies: list[dict[str, Any]], stable: int) -> None:
    assert num_stable(messages(*bodies)) == stable


def test_plain_removes_marks_and_joins_parts() -> None:
    marked = {"type": "text", "text": "doc", "cache_control": {"type": "ephemeral"}}
    (message,) = messages({"role": "user", "name": "ann", "content": [marked], "cache_control": {"type": "x"}})
    assert plain(message).model_dump(exclude_none=True) == {"role": "user", "name": "ann", "content": "doc"}
