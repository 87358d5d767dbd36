"""Rendering, the stable boundary, and text that comes out a token at a time."""

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
def test_the_boundary_ends_the_first_messages(stable_messages: int) -> None:
    words = tokenizer()
    tokens = words.encode_chat(TALK, stable_messages=stable_messages)
    assert tokens.stable_tokens is not None
    stable = words.encode_chat(TALK[:stable_messages]).token_ids
    assert tokens.token_ids[: tokens.stable_tokens] == stable[: tokens.stable_tokens]
    assert words.decode(tokens.token_ids[: tokens.stable_tokens]).rstrip().endswith(TALK[stable_messages - 1].text)


def test_the_boundary_is_cut_where_fewer_messages_render_otherwise() -> None:
    words = tokenizer("last")
    tokens = words.encode_chat(TALK, stable_messages=2)
    assert tokens.stable_tokens is not None
    told = words.decode(tokens.token_ids[: tokens.stable_tokens])
    assert told.startswith(TALK[0].text) and "!" not in told and TALK[2].text not in told


def test_a_rendering_that_begins_otherwise_leaves_next_to_nothing_stable() -> None:
    tokens = tokenizer("counting").encode_chat(TALK, stable_messages=2)
    assert tokens.stable_tokens == 1  # BOS; "4 messages" and "2 messages" part there


def test_messages_that_the_template_cannot_render_alone_have_no_boundary() -> None:
    tokens = tokenizer("strict").encode_chat(TALK, stable_messages=1)
    assert tokens.stable_tokens is None and tokens.token_ids == tokenizer().encode_chat(TALK).token_ids


@pytest.mark.parametrize("is_chat", [True, False])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(is_chat: bool) -> None:
    words, endless = tokenizer(), "x" * 2**20
    with pytest.raises(ContextLengthExceeded, match=r"characters are more than \d+ tokens.*length is 1000"):
        words.encode_chat([Message(role="user", content=endless)]) if is_chat else words.encode(endless)


def test_bos_stands_once() -> None:
    words = tokenizer()
    assert words.encode_chat(TALK).token_ids.count(BOS_ID) == 1
    assert words.encode("The dog").token_ids.count(BOS_ID) == 1
    assert words.encode("<s>The dog").token_ids == words.encode("The dog").token_ids


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param", "says"),
    [
        ("strict", TALK[:1], None, "messages", "a user must speak last"),
        (None, TALK, None, "messages", "no chat template"),
        ("turns", TALK, TOOLS, "tools", "ignores them"),
    ],
)
def test_what_the_template_cannot_say_is_refused(
    template: str | None, messages: list[Message], tools: list[dict[str, Any]] | None, param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        tokenizer(template).encode_chat(messages, tools=tools)
    assert refused.value.param == param


def calling() -> list[Message]:
    call = ToolCall.model_validate({"id": "c1", "function": {"name": "look_up", "arguments": '{"word": "dog"}'}})
    return [*TALK[:2], Message(role="assistant", tool_calls=[call]), Message(role="tool", content="barks")]


def test_tools_and_calls_are_rendered_where_the_template_knows_them() -> None:
    words = tokenizer("tools")
    assert "look_up" in words.decode(words.encode_chat(TALK, tools=TOOLS).token_ids)
    said = words.decode(words.encode_chat(calling()).token_ids)
    assert '"word": "dog"' in said.replace('\\"', "'") and "None" not in said


def test_calls_that_the_template_would_drop_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_calls"):
        tokenizer().encode_chat(calling())


def test_content_parts_and_developer_messages_read_as_text_and_system() -> None:
    parts: list[Any] = [
        {"type": "text", "text": "A cache "},
        {"type": "text", "text": "holds keys.", "cache_control": {"a": 1}},
    ]
    spoken = [Message(role="developer", content=parts), *TALK[1:]]
    assert tokenizer().encode_chat(spoken).token_ids == tokenizer().encode_chat(TALK).token_ids


@pytest.mark.parametrize("bad", [-1, 400, 2**40])
def test_token_ids_that_do_not_exist_are_refused(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {bad} does not exist"):
        tokenizer().check_ids([5, bad])


@pytest.mark.parametrize("text", ["The dog.", "größer 東京は日本 🦊🦊 end", "🦊", " leading and  double "])
def test_told_text_is_the_text_and_never_half_a_character(text: str) -> None:
    words = tokenizer()
    ids = words.encode(text).token_ids[1:]
    detokenizer = Detokenizer(words)
    told = [detokenizer.push(i) for i in ids]
    assert "\ufffd" not in "".join(told)
    assert "".join(told) + detokenizer.flush() == text == words.decode(ids)


def test_an_incomplete_character_is_told_at_the_end_only() -> None:
    words = tokenizer()
    ids = words.encode("🦊").token_ids[1:-1]
    detokenizer = Detokenizer(words)
    assert [detokenizer.push(i) for i in ids] == [""] * len(ids)
    assert detokenizer.flush() == words.decode(ids) != ""
