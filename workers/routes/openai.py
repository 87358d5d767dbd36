"""The shapes of the OpenAI API: a completion as one reply, and as chunks.

    chat         role chunk, content chunks, finish chunk, usage chunk on request
    completions  text chunks, finish chunk, usage chunk on request

`KVUsage` is under `kv_transfer_params`: of the whole reply, or of the first and the last chunk.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from workers.api.schemas import KVUsage
from workers.engines.base import Token
from workers.engines.tokenizer import Tokenizer
from workers.serving.generation import Generation, GenerationChunk

Body = dict[str, Any]


class Shape(ABC):
    """Base: the envelope. With `logprobs`, tokens come with their log-probabilities."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool):
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        request_id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._envelope = {"id": request_id, "created": int(time.time()), "model": model}

    def opening(self) -> list[Body]:
        """Chunks before the first piece."""
        return []

    def piece(self, piece: GenerationChunk) -> Body:
        return self._chunk(self._delta(piece.text), self._logprobs_of(piece.tokens) if self._logprobs else None, None)

    def finish(self, reason: str) -> Body:
        return self._chunk(self._delta(None), None, reason)

    def usage(self, generation: Generation) -> Body:
        return self._body(self.chunk_object, []) | {"usage": _usage(generation)}

    def whole(self, text: str, tokens: Sequence[Token], generation: Generation, usage: KVUsage) -> Body:
        choice = self._whole_choice(text) | {
            "index": 0,
            "logprobs": self._logprobs_of(tokens) if self._logprobs else None,
            "finish_reason": generation.finish_reason,
        }
        return self._body(self.whole_object, [choice]) | {
            "usage": _usage(generation),
            "kv_transfer_params": usage.model_dump(),
        }

    @abstractmethod
    def _delta(self, text: str | None) -> Body:
        """The part of a choice that carries new text; None in the finish chunk."""

    @abstractmethod
    def _whole_choice(self, text: str) -> Body:
        """The part of a choice that carries the whole text."""

    @abstractmethod
    def _logprobs_of(self, tokens: Sequence[Token]) -> Body:
        """Log-probabilities of these tokens."""

    def _chunk(self, delta: Body, logprobs: Body | None, finish_reason: str | None) -> Body:
        choice = {"index": 0, **delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._body(self.chunk_object, [choice])

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {**self._envelope, "object": kind, "choices": choices}


class ChatShape(Shape):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Body]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _delta(self, text: str | None) -> Body:
        return {"delta": {} if text is None else {"content": text}}

    def _whole_choice(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs_of(self, tokens: Sequence[Token]) -> Body:
        return {
            "content": [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
                for token in tokens
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> Body:
        text = self._tokenizer.piece(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionShape(Shape):
    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool):
        super().__init__(model, tokenizer, logprobs=logprobs)
        self._offset = 0

    def _delta(self, text: str | None) -> Body:
        return {"text": text or ""}

    def _whole_choice(self, text: str) -> Body:
        return {"text": text}

    def _logprobs_of(self, tokens: Sequence[Token]) -> Body:
        texts = [self._tokenizer.piece(token.id) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._tokenizer.piece(i): logprob for i, logprob in token.top} for token in tokens],
            "text_offset": [self._advance(len(text)) for text in texts],
        }

    def _advance(self, num_chars: int) -> int:
        at = self._offset
        self._offset += num_chars
        return at


def _usage(generation: Generation) -> Body:
    """OpenAI's usage; only exact prefix hits count as cached."""
    return {
        "prompt_tokens": generation.num_prompt,
        "completion_tokens": generation.num_generated,
        "total_tokens": generation.num_prompt + generation.num_generated,
        "prompt_tokens_details": {"cached_tokens": generation.reuse.cached_tokens},
    }
