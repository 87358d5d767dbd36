"""Chat templates, the stable boundary, and detokenising token by token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.engines import tiny
from workers.api.errors import ContextLengthExceeded, InvalidRequest
from workers.api.schemas import Message, ToolCall
from workers.engines.tokenizer import Detokenizer, Tokenizer

TALK = [
    Message(role="system", content="A cache holds keys."),
    Message(role="user", content="The quick brown fox?"),
    Message(role="assistant", content="Jumps over the dog."),
    Message(role="user", content="東京 and the dog?"),
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
BOS_ID = 0
MAX_TOKENS = 1000


def tokenizer(template: str | None = "turns") -> Tokenizer:
    words = tiny.tokenizer(template)
    return Tokenizer(words, model="tiny", vocab_size=len(words), max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("stable_messages", [1, 2, 3])
def test_boundary_is_end_of_stable_messages(stable_messages: int) -> None:
    words = tokenizer()
    tokens = words.encode_chat(TALK, stable_messages=stable_messages)
    assert tokens.stable_tokens is not None
    stable = words.encode_chat(TALK[:stable_messages]).token_ids
    assert tokens.token_ids[: tokens.stable_tokens] == stable[: tokens.stable_tokens]
    assert words.decode(tokens.token_ids[: tokens.stable_tokens]).rstrip().endswith(TALK[stable_messages - 1].text)


def test_boundary_is_common_prefix_of_renderings() -> None:
    words = tokenizer("last")
    tokens = words.encode_chat(TALK, stable_messages=2)
    assert tokens.stable_tokens is not None
    stable = words.decode(tokens.token_ids[: tokens.stable_tokens])
    assert stable.startswith(TALK[0].text) and "!" not in stable and TALK[2].text not in stable


def test_different_beginning_leaves_only_bos_stable() -> None:
    tokens = tokenizer("counting").encode_chat(TALK, stable_messages=2)
    assert tokens.stable_tokens == 1  # BOS; "4 messages" and "2 messages" differ there


def test_unrenderable_stable_messages_give_no_boundary() -> None:
    tokens = tokenizer("strict").encode_chat(TALK, stable_messages=1)
    assert tokens.stable_tokens is None and tokens.token_ids == tokenizer().encode_chat(TALK).token_ids


@pytest.mark.parametrize("is_chat", [True, False])
def test_overlong_text_is_rejected_before_tokenising(is_chat: bool) -> None:
    words, endless = tokenizer(), "x" * 2**20
    with pytest.raises(ContextLengthExceeded, match=r"characters are more than \d+ tokens.*length is 1000"):
        words.encode_chat([Message(role="user", content=endless)]) if is_chat else words.encode(endless)


def test_bos_appears_once() -> None:
    words = tokenizer()
    assert words.encode_chat(TALK).token_ids.count(BOS_ID) == 1
    assert words.encode("The dog").token_ids.count(BOS_ID) == 1
    assert words.encode("<s>The dog").token_ids == words.encode("The dog").token_ids


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param", "message"),
    [
        ("strict", TALK[:1], None, "messages", "a user must speak last"),
        (None, TALK, None, "messages", "no chat template"),
        ("turns", TALK, TOOLS, "tools", "ignores them"),
    ],
)
def test_unsupported_template_input_is_rejected(
    template: str | None, messages: list[Message], tools: list[dict[str, Any]] | None, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        tokenizer(template).encode_chat(messages, tools=tools)
    assert raised.value.param == param


def calling() -> list[Message]:
    call = ToolCall.model_validate({"id": "c1", "function": {"name": "look_up", "arguments": '{"word": "dog"}'}})
    return [*TALK[:2], Message(role="assistant", tool_calls=[call]), Message(role="tool", content="barks")]


def test_tools_and_calls_are_rendered_if_supported() -> None:
    words = tokenizer("tools")
    assert "look_up" in words.decode(words.encode_chat(TALK, tools=TOOLS).token_ids)
    rendered = words.decode(words.encode_chat(calling()).token_ids)
    assert '"word": "dog"' in rendered.replace('\\"', "'") and "None" not in rendered


def test_ignored_tool_calls_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="tool_calls"):
        tokenizer().encode_chat(calling())


def test_content_parts_and_developer_role_are_converted() -> None:
    parts: list[Any] = [
        {"type": "text", "text": "A cache "},
        {"type": "text", "text": "holds keys.", "cache_control": {"a": 1}},
    ]
    messages = [Message(role="developer", content=parts), *TALK[1:]]
    assert tokenizer().encode_chat(messages).token_ids == tokenizer().encode_chat(TALK).token_ids


@pytest.mark.parametrize("bad", [-1, 400, 2**40])
def test_unknown_token_ids_are_rejected(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {bad} does not exist"):
        tokenizer().check_ids([5, bad])


@pytest.mark.parametrize("text", ["The dog.", "größer 東京は日本 🦊🦊 end", "🦊", " leading and  double "])
def test_detokenizer_emits_whole_characters(text: str) -> None:
    words = tokenizer()
    ids = words.encode(text).token_ids[1:]
    detokenizer = Detokenizer(words)
    emitted = [detokenizer.push(i) for i in ids]
    assert "\ufffd" not in "".join(emitted)
    assert "".join(emitted) + detokenizer.flush() == text == words.decode(ids)


def test_incomplete_character_is_emitted_by_flush() -> None:
    words = tokenizer()
    ids = words.encode("🦊").token_ids[1:-1]
    detokenizer = Detokenizer(words)
    assert [detokenizer.push(i) for i in ids] == [""] * len(ids)
    assert detokenizer.flush() == words.decode(ids) != ""
