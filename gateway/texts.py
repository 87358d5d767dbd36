"""Chunks of text completions, made alike to those of chats for the way through the gateway, and back again at its end.

    worker:  {text, logprobs: {tokens, token_logprobs, top_logprobs: [{token: logprob}], text_offset}}
    within:  {delta: {content}, logprobs: {content: [{token, logprob, top_logprobs: [{token, logprob}]}]}}
"""

from __future__ import annotations

from typing import Any

from gateway.gathered import Chunk
from workers.api.client import Chunks
from workers.api.errors import WorkerUnavailable


class ChatChunks:
    """Those of a text completion, as a chat's."""

    def __init__(self, chunks: Chunks):
        self._chunks = chunks

    @property
    def has_ended(self) -> bool:
        return self._chunks.has_ended

    async def read(self, within_s: float | None = None) -> list[Chunk]:
        """Raises `WorkerUnavailable` for a chunk that is none."""
        chunks = await self._chunks.read(within_s)
        try:
            return [chunk | {"choices": list(map(_as_chat_choice, chunk.get("choices") or ()))} for chunk in chunks]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WorkerUnavailable(f"the worker sent a chunk that is none ({type(error).__name__})") from error

    async def aclose(self) -> None:
        await self._chunks.aclose()


def as_text_logprobs(tokens: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Those of one piece of text that begins `offset` characters into the answer."""
    texts = [str(token["token"]) for token in tokens]
    begins = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
    tops = [{str(one["token"]): one["logprob"] for one in token.get("top_logprobs") or ()} for token in tokens]
    logprobs = [token["logprob"] for token in tokens]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": begins}


def _as_chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    told = choice.get("logprobs")
    return {
        "index": 0,
        "delta": {"content": choice["text"]} if choice.get("text") else {},
        "logprobs": told and {"content": _as_chat_logprobs(told)},
        "finish_reason": choice.get("finish_reason"),
    }


def _as_chat_logprobs(told: dict[str, Any]) -> list[dict[str, Any]]:
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    return [
        {"token": token, "logprob": logprob, "top_logprobs": [{"token": one, "logprob": of} for one, of in top.items()]}
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    ]
