"""An answer of a `FakeWorker`, as the frames of its stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tools.fake_worker.caches import render
from tools.fake_worker.wire import frame
from workers.api.errors import KvrelayError
from workers.api.schemas import ChatRequest, CompletionRequest, KVTransferParams, KVUsage, Message

if TYPE_CHECKING:
    from tools.fake_worker.worker import FakeWorker


class Cut(Exception):
    """The stream ends here, as if the process had died."""


@dataclass(frozen=True)
class Answer:
    """What is answered: the request, its prompt's tokens, and what of them stood in a cache."""

    worker: FakeWorker
    asked: ChatRequest | CompletionRequest
    tokens: list[str]
    usage: KVUsage

    call: ClassVar[str] = "chat"

    @property
    def kind(self) -> str:
        params = self.asked.kv_transfer_params
        return f"cached_{self.call}" if params and params.cache_id else self.call

    @property
    def messages(self) -> list[Message]:
        return self.asked.messages if isinstance(self.asked, ChatRequest) else []

    async def frames(self) -> AsyncGenerator[bytes, None]:
        words = self._words()
        try:
            yield frame(self._opening())
            async for index, word in self._written(words):
                yield frame({"choices": [self._piece(word, self._logprob(index))]})
        except Cut:
            return
        except KvrelayError as error:
            yield frame(error.body())
            return
        except (asyncio.CancelledError, GeneratorExit):
            self.worker.num_hang_ups += 1
            raise
        if self.worker.tool_call is not None:
            yield frame({"choices": [_delta({"tool_calls": [{"index": 0} | self.worker.tool_call]})]})
        for last in self._endings(words):
            yield frame(last)
        yield b"data: [DONE]\n\n"

    def _logprob(self, index: int) -> float:
        first = self.worker.first_logprobs
        return first[index] if index < len(first) else self.worker.logprob

    def _piece(self, word: str, logprob: float) -> dict[str, Any]:
        return _delta({"content": word}, self._logprobs(word, logprob))

    def _first(self) -> dict[str, Any]:
        return _delta({"role": "assistant", "content": ""})

    def _opening(self) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [self._first()]}
        return chunk | ({"kv_transfer_params": self.usage.model_dump()} if self.worker.tells_early else {})

    def _words(self) -> list[str]:
        limit = self.asked.max_tokens
        if isinstance(self.asked, ChatRequest):
            limit = limit or self.asked.max_completion_tokens
        return self.worker.says(self.messages).split(" ")[:limit]

    def _logprobs(self, word: str, logprob: float) -> dict[str, Any] | None:
        if not self.asked.logprobs or not isinstance(self.asked, ChatRequest):
            return None
        top = self._likeliest(word, logprob, self.asked.top_logprobs)
        return {"content": [{"token": word, "logprob": logprob, "bytes": None, "top_logprobs": top}]}

    def _likeliest(self, word: str, logprob: float, most: int) -> list[dict[str, Any]]:
        """The word and one other, which has all the rest."""
        rest = math.log(max(1e-9, 1 - math.exp(logprob)))
        both = sorted([(logprob, word), (rest, "~")], reverse=True)
        return [{"token": text, "logprob": of} for of, text in both[:most]]

    async def _written(self, words: Sequence[str]) -> AsyncGenerator[tuple[int, str], None]:
        for index, word in enumerate(words):
            while index == self.worker.stalls.get(self.kind):  # noqa: ASYNC110 - set from the test's own thread
                await asyncio.sleep(0.01)
            if index == self.worker.cuts.get(self.kind, self.worker.cut_after):
                raise Cut
            if index == self.worker.breaks.get(self.kind, self.worker.break_after):
                raise KvrelayError("the model broke off")
            await self.worker.thawed()
            await asyncio.sleep(self.worker.token_s)
            yield index, word if index == 0 else f" {word}"

    def _endings(self, words: list[str]) -> list[dict[str, Any]]:
        read, written = len(self.tokens), len(words)
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        finish = "tool_calls" if self.worker.tool_call else "stop"
        return [
            {"choices": [self._piece_of_end() | {"finish_reason": finish}]},
            {"choices": [], "usage": counts, "kv_transfer_params": self._kept(words).model_dump()},
        ]

    def _kept(self, words: list[str]) -> KVUsage:
        """The usage, with the cache of everything read and written if it is to be kept."""
        asked, params = self.asked, self.asked.kv_transfer_params or KVTransferParams()
        if not params.store:
            return self.usage
        caches, usage = self.worker.stored, self.usage
        everything = [*self.tokens, *words]
        cache = caches.store(everything, asked.tenant_salt, usage.provenance, usage.mapped_tokens, params.ttl_s)
        stable = asked.stable_messages or 0 if isinstance(asked, ChatRequest) else 0
        told = caches.told(cache) | {"stable_tokens": len(render(self.messages[:stable])) - 1 if stable else None}
        return usage.model_copy(update=told)

    def _piece_of_end(self) -> dict[str, Any]:
        return _delta({})


@dataclass(frozen=True)
class TextAnswer(Answer):
    """The same as a text completion."""

    call: ClassVar[str] = "complete"

    @property
    def messages(self) -> list[Message]:
        assert isinstance(self.asked, CompletionRequest)
        return [Message(role="user", content=str(self.asked.prompt))]

    def _piece(self, word: str, logprob: float) -> dict[str, Any]:
        return self._text(word, self._text_logprobs(word, logprob))

    def _first(self) -> dict[str, Any]:
        return self._text("", None)

    def _piece_of_end(self) -> dict[str, Any]:
        return self._text("", None)

    def _text(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _text_logprobs(self, word: str, logprob: float) -> dict[str, Any] | None:
        asked = self.asked
        if not isinstance(asked, CompletionRequest) or asked.logprobs is None:
            return None
        top = {one["token"]: one["logprob"] for one in self._likeliest(word, logprob, asked.logprobs)}
        return {"tokens": [word], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [0]}


def _delta(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
