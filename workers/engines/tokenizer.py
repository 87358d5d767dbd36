"""`Tokenizer`: text and conversations to token ids and back. Blocking: not for the event loop.

It also finds where the stable part of a conversation ends:

    rendering of all messages          <|system|> ... <|user|> ... <|assistant|> ... <|user|> question <|assistant|>
    rendering of the first n messages  <|system|> ... <|user|> ... <|assistant|> ...|
                                       └──── longest common token prefix: stable ────┘
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from workers.api.errors import ContextLengthExceeded, InvalidRequest
from workers.api.schemas import Message
from workers.digest import common_prefix_len

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt. Later requests share the first `stable_tokens`; None if no boundary is marked."""

    token_ids: list[int]
    stable_tokens: int | None = None


class Tokenizer:
    """Wraps a Hugging Face tokenizer. `encode*` are for one thread at a time, `decode` and `piece` for any."""

    def __init__(self, hf: PreTrainedTokenizerBase, *, model: str, vocab_size: int, max_tokens: int):
        self._hf = hf
        self._model = model
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._longest_token = max(map(len, hf.get_vocab()))  # in characters, or bytes, which are no fewer
        hf.encode("")  # sets truncation and padding now, so that no later call changes the tokenizer

    def encode(self, text: str) -> PromptTokens:
        """Encode plain text with the tokenizer's special tokens, without repeating a BOS that the text begins with."""
        ids: list[int] = self._hf.encode(self._checked(text, "prompt"), add_special_tokens=True)
        bos = self._hf.bos_token_id
        return PromptTokens(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        stable_messages: int | None = None,
    ) -> PromptTokens:
        """Encode a conversation, rendered up to where the assistant's answer begins."""
        turns, tools = [_template_message(message) for message in messages], tools or None
        text = self._render(turns, tools, answer=True)
        self._check_nothing_ignored(text, turns, tools)
        token_ids = self._encode_rendered(text)
        if stable_messages is None:
            return PromptTokens(token_ids)
        try:
            stable = self._encode_rendered(self._render(turns[:stable_messages], tools, answer=False))
        except InvalidRequest:
            return PromptTokens(token_ids)  # the template cannot render these messages alone
        return PromptTokens(token_ids, common_prefix_len(token_ids, stable))

    def check_ids(self, token_ids: Sequence[int], *, param: str = "token_ids") -> PromptTokens:
        """Raise `InvalidRequest` for a token id that is not in the vocabulary."""
        wrong = next((i for i in token_ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"token id {wrong} does not exist; {self._model} has 0 to {self._vocab_size - 1}", param=param
            )
        return PromptTokens(list(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode an answer, without special tokens."""
        text: str = self._hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def piece(self, token_id: int) -> str:
        """Decode one token alone, special ones included. An incomplete character becomes U+FFFD."""
        text: str = self._hf.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _encode_rendered(self, text: str) -> list[int]:
        # The template has already written the special tokens, BOS included.
        ids: list[int] = self._hf.encode(self._checked(text, "messages"), add_special_tokens=False)
        return ids

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, answer: bool) -> str:
        if not self._hf.chat_template:
            raise InvalidRequest(f"{self._model} has no chat template; use /v1/completions", param="messages")
        try:
            text: str = self._hf.apply_chat_template(turns, tools=tools, add_generation_prompt=answer, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the chat template of {self._model} rejects the messages: {error}", param="messages"
            ) from error
        return text

    def _check_nothing_ignored(
        self, text: str, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> None:
        """Reject tools and tool calls that the template would silently drop."""
        if tools and self._render(turns, None, answer=True) == text:
            raise InvalidRequest(f"{self._model} does not support tools: its chat template ignores them", param="tools")
        if any(turn.get("tool_calls") for turn in turns):
            plain = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
            if self._render(plain, tools, answer=True) == text:
                raise InvalidRequest(
                    f"{self._model} does not support tool_calls: its chat template ignores them", param="messages"
                )

    def _checked(self, text: str, param: str) -> str:
        """Return the text if it can be encoded: not too long, since megabytes of one word take minutes to tokenise,
        and without halves of surrogate pairs, which JSON can spell and no tokenizer reads."""
        if len(text) > self._max_tokens * self._longest_token:
            raise ContextLengthExceeded(
                f"{len(text)} characters are more than {len(text) // self._longest_token} tokens; "
                f"the context length is {self._max_tokens}",
                param=param,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"character {error.start} is half of a surrogate pair", param=param) from error
        return text


class Detokenizer:
    """Decodes an answer token by token, never half a character.

    Decodes from a few tokens back, since the text of a token may depend on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = 0  # first token that the next decoding includes
        self._num_emitted = 0  # tokens whose text has been returned

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        return self._decode_new(final=False)

    def flush(self) -> str:
        """Return the rest, with an incomplete character as U+FFFD."""
        return self._decode_new(final=True)

    def _decode_new(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._num_emitted])
        after = self._tokenizer.decode(self._ids[self._begin :])
        if not final and (after.endswith(REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._begin, self._num_emitted = self._num_emitted, len(self._ids)
        return after[len(before) :]


class TextWriter:
    """Decodes an answer up to a stop string. `push` tokens, then `flush` once.

    Text that may be the beginning of a stop string is held back. `stopped` becomes true when a stop string is complete.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Return the text that can be sent now."""
        return self._release(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Return the remaining text; empty after a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.flush())
        rest, self._held = ("" if self.stopped else self._held), ""
        return text + rest

    def _release(self, text: str) -> str:
        text = self._held + text
        at = min((i for i in (text.find(stop) for stop in self._stops) if i >= 0), default=None)
        if at is not None:
            self.stopped, self._held = True, ""
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` that the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _template_message(message: Message) -> dict[str, Any]:
    """Convert a message for a chat template: text content, parsed call arguments, no None."""
    turn = message.model_dump(exclude_none=True, exclude={"content", "cache_control"})
    turn["content"] = message.text
    if turn["role"] == "developer":
        turn["role"] = "system"
    for call in turn.get("tool_calls", []):
        arguments = call["function"].get("arguments", "")
        try:
            call["function"]["arguments"] = json.loads(arguments)
        except json.JSONDecodeError:
            call["function"]["arguments"] = arguments
    return turn
