"""`Tokenizer`: text and conversations to token ids and back. Blocking; not for the event loop.

Knows one model's tokenizer and chat template. Where the stable part of a conversation ends is decided here:

    rendering of all messages          <|system|> ... <|user|> ... <|assistant|> ... <|user|> question <|assistant|>
    rendering of the first n messages  <|system|> ... <|user|> ... <|assistant|> ...|
                                       └──── longest common token prefix: stable ────┘

`TextWriter`: an answer's tokens as text, cut at a stop string, never half a character and never half a stop."""

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
    """A prompt as the model reads it. Its first `stable_tokens` are shared with later requests; None if unmarked."""

    token_ids: list[int]
    stable_tokens: int | None = None


class Tokenizer:
    """Wraps a Hugging Face tokenizer. `encode*` are for one thread at a time; `decode` and `piece` for any."""

    def __init__(self, hf: PreTrainedTokenizerBase, *, model: str, vocab_size: int, max_tokens: int):
        self._hf = hf
        self._model = model
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._longest_token = max(map(len, hf.get_vocab()))  # in characters, or in bytes, which are no fewer
        hf.encode("")  # settles truncation and padding now, so that no later call changes the tokenizer

    def encode(self, text: str) -> PromptTokens:
        """A plain text, with what the tokenizer puts around texts (once, if the text already begins with it)."""
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
        """A conversation, rendered up to where the assistant's answer begins."""
        turns = [_template_message(message) for message in messages]
        text = self._render(turns, tools or None, answer=True)
        self._check_rendered(text, turns, tools or None)
        token_ids = self._encode_rendered(text)
        if stable_messages is None:
            return PromptTokens(token_ids)
        return PromptTokens(token_ids, self._boundary(token_ids, turns[:stable_messages], tools or None))

    def check_ids(self, token_ids: Sequence[int], *, param: str = "token_ids") -> PromptTokens:
        """Token ids as a caller gives them. Raises `InvalidRequest` for one that the model does not have."""
        wrong = next((i for i in token_ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"token id {wrong} does not exist; {self._model} has 0 to {self._vocab_size - 1}", param=param
            )
        return PromptTokens(list(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        text: str = self._hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def piece(self, token_id: int) -> str:
        """One token on its own, special ones included; an incomplete character reads as U+FFFD."""
        text: str = self._hf.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _boundary(
        self, token_ids: list[int], turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> int | None:
        """Length of the common prefix with the rendering of `turns`; None if the template cannot render them alone."""
        try:
            stable = self._encode_rendered(self._render(turns, tools, answer=False))
        except InvalidRequest:
            return None
        return common_prefix_len(token_ids, stable)

    def _encode_rendered(self, text: str) -> list[int]:
        # The template has written the special tokens, BOS included: the tokenizer must not add them again.
        ids: list[int] = self._hf.encode(self._checked(text, "messages"), add_special_tokens=False)
        return ids

    def _render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, answer: bool) -> str:
        if not self._hf.chat_template:
            raise InvalidRequest(f"{self._model} has no chat template; use /v1/completions", param="messages")
        try:
            text: str = self._hf.apply_chat_template(turns, tools=tools, add_generation_prompt=answer, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template of {self._model} refuses it: {error}", param="messages") from error
        return text

    def _check_rendered(self, text: str, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        """Refuse what the template would drop in silence."""
        if tools and self._render(turns, None, answer=True) == text:
            raise InvalidRequest(f"{self._model} does not take tools: its chat template ignores them", param="tools")
        calling = [turn for turn in turns if turn.get("tool_calls")]
        if calling:
            plain = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
            if self._render(plain, tools, answer=True) == text:
                raise InvalidRequest(
                    f"{self._model} does not take tool_calls: its chat template ignores them", param="messages"
                )

    def _checked(self, text: str, param: str) -> str:
        """The text itself. Refuses what can't fit, since megabytes of one word take minutes to tokenise, and halves of
        surrogate pairs, which JSON can spell and no tokenizer reads."""
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
    """Turns an answer's tokens into text as they come: never half a character.

    Decodes from a few tokens back, since what a token reads as may depend on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # tokens before this one are of no concern any more
        self._told = 0  # tokens before this one have been told

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        return self._tell(final=False)

    def flush(self) -> str:
        """What is left, an incomplete character as U+FFFD."""
        return self._tell(final=True)

    def _tell(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._from : self._told])
        after = self._tokenizer.decode(self._ids[self._from :])
        if not final and (after.endswith(REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._from, self._told = self._told, len(self._ids)
        return after[len(before) :]


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates want it: text content, arguments of calls parsed, nothing that is None."""
    turn = message.model_dump(exclude_none=True, exclude={"content", "cache_control"})
    turn["content"] = message.text
    if turn["role"] == "developer":
        turn["role"] = "system"
    for call in turn.get("tool_calls", []):
        call["function"]["arguments"] = _parsed(call["function"].get("arguments", ""))
    return turn


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


class TextWriter:
    """`push` tokens, then `flush` once. Text that might be the beginning of a stop string is held back meanwhile."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that may be told now. `stopped` turns true when a stop string is complete."""
        return self._tell(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """What is left at the end; nothing after a stop string."""
        if self.stopped:
            return ""
        told = self._tell(self._detokenizer.flush())
        rest, self._held = ("" if self.stopped else self._held), ""
        return told + rest

    def _tell(self, text: str) -> str:
        text = self._held + text
        at = min((i for i in (text.find(stop) for stop in self._stops) if i >= 0), default=None)
        if at is not None:
            self.stopped, self._held = True, ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        told, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return told


def _overlap(text: str, stop: str) -> int:
    """How long a beginning of `stop` the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
