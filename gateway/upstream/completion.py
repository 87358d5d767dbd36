"""A model's answer, accumulated from the chunks of its stream: a chat's or a text's."""

from __future__ import annotations

from typing import Any

from gateway.policies import TokenLogprob
from workers.api.schemas import KVUsage, Message

Chunk = dict[str, Any]

CHARS_PER_TOKEN = 8  # above the average, so that no tenant is charged for text that was not written
MAX_LOGPROB = 1e-3  # rounding may lift the log-probability of a certain token slightly above 0
COUNTS = ("prompt_tokens", "completion_tokens")


class Completion:
    """A chat completion.

    For a malformed chunk `add` raises `KeyError`, `TypeError`, `ValueError` or `AttributeError`.
    """

    def __init__(self) -> None:
        self.has_content = False
        self.logprobs: list[dict[str, Any]] = []  # in OpenAI's form, one per token
        self.tokens: list[TokenLogprob] = []  # the same, as policies judge them
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None  # in OpenAI's form
        self.kv: KVUsage | None = None
        self._text: list[str] = []
        self._num_chars = 0
        self._num_pieces = 0
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Chunk) -> None:
        for choice in chunk.get("choices") or ():
            self._add_choice(choice)
            self.finish_reason = _string(choice.get("finish_reason")) or self.finish_reason
        if chunk.get("usage"):
            self.usage = _usage(chunk["usage"])
        if chunk.get("kv_transfer_params"):
            self.kv = KVUsage.model_validate(chunk["kv_transfer_params"])

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls") or ()
        self._add_text(_string(delta.get("content")), has_calls=bool(calls))
        for call in calls:
            self._add_call(call)
        for token in (choice.get("logprobs") or {}).get("content") or ():
            self.logprobs.append(token)
            top = tuple((str(one["token"]), _logprob(one["logprob"])) for one in token.get("top_logprobs") or ())
            self.tokens.append(TokenLogprob(str(token["token"]), _logprob(token["logprob"]), top))

    def _add_text(self, text: str, *, has_calls: bool = False) -> None:
        if text:
            self._text.append(text)
            self._num_chars += len(text)
        self._num_pieces += bool(text or has_calls)
        self.has_content = self._num_pieces > 0

    def _add_call(self, part: dict[str, Any]) -> None:
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(int(part.get("index", 0)), empty)
        function = part.get("function") or {}
        call["id"] = _string(part.get("id")) or call["id"]
        call["function"]["name"] += _string(function.get("name"))
        call["function"]["arguments"] += _string(function.get("arguments"))

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the worker reports its usage, at the end."""
        return self.usage["prompt_tokens"] if self.usage else 0

    @property
    def num_written(self) -> int:
        """Completion tokens so far: the worker's count at the end, until then counted from the chunks."""
        reported = self.usage["completion_tokens"] if self.usage else 0
        return reported or max(len(self.tokens), self._num_pieces, self._num_chars // CHARS_PER_TOKEN)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's form. Its content is null if there are only tool calls."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        if not calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}

    @property
    def as_turn(self) -> Message:
        """The message as the client will send it back with its next turn."""
        return Message.model_validate(self.message)


class TextCompletion(Completion):
    """A text completion. Its log-probabilities are OpenAI's parallel lists: tokens, token_logprobs, top_logprobs,
    text_offset."""

    def _add_choice(self, choice: dict[str, Any]) -> None:
        self._add_text(_string(choice.get("text")))
        if choice.get("logprobs"):
            self.tokens.extend(text_tokens(choice["logprobs"]))


def text_tokens(logprobs: dict[str, Any]) -> list[TokenLogprob]:
    """The tokens of a text chunk's log-probabilities, which are in OpenAI's form."""
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    return [
        TokenLogprob(str(token), _logprob(logprob), tuple((str(one), _logprob(value)) for one, value in top.items()))
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    ]


def text_logprobs(tokens: list[TokenLogprob], *, num_top: int, offset: int = 0) -> dict[str, Any]:
    """The log-probabilities of a text that begins `offset` characters into the answer, in OpenAI's form."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top[:num_top]) for token in tokens],
        "text_offset": offsets,
    }


def _logprob(value: Any) -> float:
    logprob = float(value)
    if logprob > MAX_LOGPROB:
        raise ValueError("a log-probability is at most 0")
    return logprob


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    if not all(type(usage[name]) is int and usage[name] >= 0 for name in COUNTS):
        raise ValueError(f"{' and '.join(COUNTS)} must be non-negative integers")
    return usage


def _string(value: Any) -> str:
    """Empty for null or absent."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"must be a string, not {type(value).__name__}")
    return value or ""
