"""An answer put together from the chunks of its stream."""

from __future__ import annotations

from typing import Any

from gateway.policies import Token
from workers.api.schemas import KVUsage, Message

Chunk = dict[str, Any]

CHARS_PER_TOKEN = 8  # more than most have: nobody is charged for what was not written


class Gathered:
    """What the chunks so far add up to. Raises `KeyError`, `TypeError`, `ValueError` or `AttributeError` for a chunk
    that is none."""

    def __init__(self) -> None:
        self.has_content = False
        self.num_pieces = 0  # of text or of a call
        self.logprobs: list[dict[str, Any]] = []  # OpenAI's, one a token
        self.tokens: list[Token] = []  # the same
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None  # OpenAI's
        self.kv: KVUsage | None = None
        self._text: list[str] = []
        self._num_chars = 0
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Chunk) -> None:
        for choice in chunk.get("choices") or ():
            self._add_delta(choice.get("delta") or {})
            for token in (choice.get("logprobs") or {}).get("content") or ():
                self.logprobs.append(token)
                self.tokens.append(_token(token))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = chunk.get("usage") or self.usage
        if chunk.get("kv_transfer_params"):
            self.kv = KVUsage.model_validate(chunk["kv_transfer_params"])

    def _add_delta(self, delta: dict[str, Any]) -> None:
        text, calls = delta.get("content"), delta.get("tool_calls") or ()
        if text:
            self._text.append(str(text))
            self._num_chars += len(self._text[-1])
        for call in calls:
            self._add_call(call)
        self.has_content = self.has_content or bool(text or calls)
        self.num_pieces += bool(text or calls)

    def _add_call(self, part: dict[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(int(part.get("index", 0)), empty)
        function = part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"]) if self.usage else 0

    @property
    def num_written(self) -> int:
        """Tokens so far: as the worker tells at the end, until then as they came, or by their length."""
        told = int(self.usage.get("completion_tokens") or 0) if self.usage else 0
        return told or max(len(self.tokens), self.num_pieces, self._num_chars // CHARS_PER_TOKEN)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, as the OpenAI API writes it; its content is null beside tool calls alone."""
        text, calls = "".join(self._text), [self._calls[index] for index in sorted(self._calls)]
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text or None, "tool_calls": calls}

    @property
    def as_turn(self) -> Message:
        """The same, as the client will send it back with the next turn."""
        return Message.model_validate(self.message)


def _token(told: dict[str, Any]) -> Token:
    top = tuple((str(one["token"]), float(one["logprob"])) for one in told.get("top_logprobs") or ())
    return Token(str(told["token"]), float(told["logprob"]), top)
