"""An answer of a `FakeWorker`, as the frames of its stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.api.errors import KvrelayError
from workers.api.fake.caches import render
from workers.api.fake.wire import frame
from workers.api.schemas import ChatRequest, KVTransferParams, KVUsage

if TYPE_CHECKING:
    from workers.api.fake.worker import FakeWorker


class Cut(Exception):
    """The stream ends here, as if the process had died."""


@dataclass(frozen=True)
class Answer:
    """What is answered: the request, its prompt's tokens, and what of them stood in a cache."""

    worker: FakeWorker
    asked: ChatRequest
    tokens: list[str]
    usage: KVUsage

    @property
    def kind(self) -> str:
        params = self.asked.kv_transfer_params
        return "cached_chat" if params and params.cache_id else "chat"

    async def frames(self) -> AsyncGenerator[bytes, None]:
        words = self._words()
        try:
            yield frame(self._opening())
            async for word in self._written(words):
                yield frame({"choices": [_delta({"content": word}, self._logprobs(word))]})
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

    def _opening(self) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [_delta({"role": "assistant", "content": ""})]}
        return chunk | ({"kv_transfer_params": self.usage.model_dump()} if self.worker.tells_early else {})

    def _words(self) -> list[str]:
        limit = self.asked.max_tokens or self.asked.max_completion_tokens
        return self.worker.says(self.asked.messages).split(" ")[:limit]

    def _logprobs(self, word: str) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        told = {"token": word, "logprob": self.worker.logprob, "bytes": None, "top_logprobs": self._likeliest(word)}
        return {"content": [told]}

    def _likeliest(self, word: str) -> list[dict[str, Any]]:
        """The word and one other, which has all the rest."""
        rest = max(1e-9, 1 - math.exp(self.worker.logprob))
        both = [(self.worker.logprob, word), (math.log(rest), "~")]
        return [{"token": text, "logprob": logprob} for logprob, text in sorted(both)[::-1][: self.asked.top_logprobs]]

    async def _written(self, words: Sequence[str]) -> AsyncGenerator[str, None]:
        for index, word in enumerate(words):
            if index == self.worker.stalls.get(self.kind):
                await asyncio.sleep(3600)
            if index == self.worker.cut_after:
                raise Cut
            if index == self.worker.break_after:
                raise KvrelayError("the model broke off")
            await self.worker.thawed()
            await asyncio.sleep(self.worker.token_s)
            yield word if index == 0 else f" {word}"

    def _endings(self, words: list[str]) -> list[dict[str, Any]]:
        read, written = len(self.tokens), len(words)
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        finish = "tool_calls" if self.worker.tool_call else "stop"
        return [
            {"choices": [_delta({}) | {"finish_reason": finish}]},
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
        stable = len(render(asked.messages[: asked.stable_messages or 0])) - 1
        return usage.model_copy(update=caches.told(cache) | {"stable_tokens": stable})


def _delta(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
