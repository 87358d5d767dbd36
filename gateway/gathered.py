"""An answer put together from the chunks of its stream."""

from __future__ import annotations

from typing import Any

from gateway.policies import Token
from workers.api.schemas import KVUsage, Message

Chunk = dict[str, Any]

CHARS_PER_TOKEN = 8  # more than most have: nobody is charged for what was not written
MAX_LOGPROB = 1e-3  # rounding may leave a certain token's a little above 0
COUNTS = ("prompt_tokens", "completion_tokens")


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
            self.finish_reason = _string(choice.get("finish_reason")) or self.finish_reason
        if chunk.get("usage"):
            self.usage = _usage(chunk["usage"])
        if chunk.get("kv_transfer_params"):
            self.kv = KVUsage.model_validate(chunk["kv_transfer_params"])

    def _add_delta(self, delta: dict[str, Any]) -> None:
        text, calls = _string(delta.get("content")), delta.get("tool_calls") or ()
        if text:
            self._text.append(text)
            self._num_chars += len(text)
        for call in calls:
            self._add_call(call)
        self.has_content = self.has_content or bool(text or calls)
        self.num_pieces += bool(text or calls)

    def _add_call(self, part: dict[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(int(part.get("index", 0)), empty)
        function = part.get("function") or {}
        call["id"] = _string(part.get("id")) or call["id"]
        call["function"]["name"] += _string(function.get("name"))
        call["function"]["arguments"] += _string(function.get("arguments"))

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage["prompt_tokens"] if self.usage else 0

    @property
    def num_written(self) -> int:
        """Tokens so far: as the worker tells at the end, until then as they came, or by their length."""
        told = self.usage["completion_tokens"] if self.usage else 0
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
    top = tuple((str(one["token"]), _logprob(one)) for one in told.get("top_logprobs") or ())
    return Token(str(told["token"]), _logprob(told), top)


def _logprob(told: dict[str, Any]) -> float:
    logprob = float(told["logprob"])
    if logprob > MAX_LOGPROB:
        raise ValueError("a log-probability is at most 0")
    return logprob


def _usage(told: dict[str, Any]) -> dict[str, Any]:
    """As it was told, if it has what is charged by."""
    if not all(type(told[name]) is int and told[name] >= 0 for name in COUNTS):
        raise ValueError(f"{' and '.join(COUNTS)} are whole numbers from 0 on")
    return told


def _string(told: Any) -> str:
    """Empty for what is not told."""
    if told is not None and not isinstance(told, str):
        raise TypeError(f"a text is needed, not {type(told).__name__}")
    return told or ""
