"""The fake model: tokens are words, a cache is a list of words, an answer is a stream of frames."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from workers.api.errors import CacheMismatch, CacheNotFound, KvrelayError
from workers.api.schemas import ChatRequest, CompletionRequest, KVTransferParams, KVUsage, Message, Prompt

if TYPE_CHECKING:
    from tools.fake_worker.worker import FakeWorker


# Tokens


def render(messages: Sequence[Message]) -> list[str]:
    """Return the prompt's tokens: role and words of each message, then the assistant's marker."""
    tokens = []
    for message in messages:
        tokens += [f"<{message.role}>", *(message.text.split() if message.text else [])]
    return [*tokens, "<assistant>"]


def tokenize(prompt: Prompt) -> list[str]:
    return render(prompt.messages) if prompt.messages is not None else (prompt.prefix or "").split()


def common_length(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common prefix."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


# Caches


@dataclass(frozen=True)
class FakeCache:
    cache_id: str
    tokens: list[str]
    salt: str
    provenance: str
    num_mapped: int
    expires_at: float
    is_hybrid: bool = False


class FakePool:
    """The caches of one epoch, under the contract's rules: salts, expiry, exact and mapped."""

    def __init__(self) -> None:
        self.by_id: dict[str, FakeCache] = {}
        self.epoch = ""
        self.restart()

    def restart(self) -> None:
        self.epoch = secrets.token_hex(8)
        self.by_id.clear()

    def find(self, cache_id: str, salt: str) -> FakeCache:
        """Raises `CacheNotFound`, `CacheMismatch`."""
        cache = self.by_id.get(cache_id)
        if cache is None or cache.expires_at <= time.time():
            raise CacheNotFound(f"unknown cache {cache_id}")
        if cache.salt != salt:
            raise CacheMismatch(f"{cache_id} belongs to another tenant")
        return cache

    def store(
        self, tokens: list[str], salt: str, provenance: str, num_mapped: int, ttl_s: float, is_hybrid: bool = False
    ) -> FakeCache:
        cache_id, expires_at = f"kvc-{secrets.token_hex(16)}", time.time() + ttl_s
        cache = FakeCache(cache_id, tokens, salt, provenance, num_mapped, expires_at, is_hybrid)
        self.by_id[cache.cache_id] = cache
        return cache

    def longest_exact(self, tokens: Sequence[str], salt: str) -> int:
        """Return the length of the longest prefix in an exact cache of this tenant."""
        candidates = [cache for cache in self.by_id.values() if cache.salt == salt and cache.provenance == "exact"]
        return max((common_length(cache.tokens, tokens) for cache in candidates), default=0)

    def describe(self, cache: FakeCache) -> dict[str, Any]:
        """Return the contract's fields of a cache."""
        return {
            "cache_id": cache.cache_id,
            "num_tokens": len(cache.tokens),
            "digest": hashlib.sha256(f"{cache.salt} {' '.join(cache.tokens)}".encode()).hexdigest(),
            "epoch": self.epoch,
            "expires_at": cache.expires_at,
            "provenance": cache.provenance,
        }


# Answers


@dataclass(frozen=True)
class ChatAnswer:
    """The answer to a chat completion: its request, its prompt tokens, and how many of them came from a cache."""

    worker: FakeWorker
    request: ChatRequest | CompletionRequest
    tokens: list[str]
    usage: KVUsage

    call = "chat"

    @property
    def messages(self) -> list[Message]:
        assert isinstance(self.request, ChatRequest)
        return self.request.messages

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Stream the answer as server-sent events: opening, one frame per word, tool call, end, usage."""
        worker, request = self.worker, self.request
        params = request.kv_transfer_params
        kind = f"cached_{self.call}" if params and params.cache_id else self.call
        limit = request.max_tokens or (request.max_completion_tokens if isinstance(request, ChatRequest) else None)
        words = worker.answer_to(self.messages).split(" ")[:limit]
        try:
            early = {"kv_transfer_params": self.usage.model_dump()} if worker.reports_early else {}
            yield frame({"choices": [self.opening()]} | early)
            for index, word in enumerate(words):
                while index == worker.stalls.get(kind):  # noqa: ASYNC110 - set from the test's thread
                    await asyncio.sleep(0.01)
                if index == worker.cuts.get(kind, worker.cut_after):
                    return
                if index == worker.breaks.get(kind, worker.break_after):
                    raise KvrelayError("the model broke off")
                await worker.wait_while_frozen()
                await asyncio.sleep(worker.token_s)
                logprobs = worker.first_logprobs
                logprob = logprobs[index] if index < len(logprobs) else worker.logprob
                yield frame({"choices": [self.piece(word if index == 0 else f" {word}", logprob)]})
        except KvrelayError as error:
            yield frame(error.body())
            return
        except (asyncio.CancelledError, GeneratorExit):
            worker.num_disconnects += 1
            raise
        if worker.tool_call is not None:
            yield frame({"choices": [_chat_choice({"tool_calls": [{"index": 0} | worker.tool_call]})]})
        yield frame({"choices": [self.closing() | {"finish_reason": "tool_calls" if worker.tool_call else "stop"}]})
        num_prompt, num_completion = len(self.tokens), len(words)
        counts = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
        yield frame({"choices": [], "usage": counts, "kv_transfer_params": self._final_usage(words).model_dump()})
        yield b"data: [DONE]\n\n"

    def opening(self) -> dict[str, Any]:
        return _chat_choice({"role": "assistant", "content": ""})

    def piece(self, word: str, logprob: float) -> dict[str, Any]:
        request = self.request
        logprobs = None
        if request.logprobs and isinstance(request, ChatRequest):
            top = _top_logprobs(word, logprob, request.top_logprobs)
            logprobs = {"content": [{"token": word, "logprob": logprob, "bytes": None, "top_logprobs": top}]}
        return _chat_choice({"content": word}, logprobs)

    def closing(self) -> dict[str, Any]:
        return _chat_choice({})

    def _final_usage(self, words: list[str]) -> KVUsage:
        """Store a cache of prompt and answer if the request asks for it. Return the usage with that cache."""
        request, usage, pool = self.request, self.usage, self.worker.pool
        params = request.kv_transfer_params or KVTransferParams()
        if not params.store:
            return usage
        tokens = [*self.tokens, *words]
        cache = pool.store(tokens, request.tenant_salt, usage.provenance, usage.mapped_tokens, params.ttl_s)
        stable = request.stable_messages or 0 if isinstance(request, ChatRequest) else 0
        stable_tokens = len(render(self.messages[:stable])) - 1 if stable else None
        return usage.model_copy(update=pool.describe(cache) | {"stable_tokens": stable_tokens})


@dataclass(frozen=True)
class TextAnswer(ChatAnswer):
    """The answer to a text completion."""

    call = "complete"

    @property
    def messages(self) -> list[Message]:
        assert isinstance(self.request, CompletionRequest)
        return [Message(role="user", content=str(self.request.prompt))]

    def opening(self) -> dict[str, Any]:
        return _text_choice("")

    def piece(self, word: str, logprob: float) -> dict[str, Any]:
        request = self.request
        logprobs = None
        if isinstance(request, CompletionRequest) and request.logprobs is not None:
            top = {one["token"]: one["logprob"] for one in _top_logprobs(word, logprob, request.logprobs)}
            logprobs = {"tokens": [word], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [0]}
        return _text_choice(word, logprobs)

    def closing(self) -> dict[str, Any]:
        return _text_choice("")


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"id": "fake", "object": "chat.completion.chunk"} | data) + b"\n\n"


def _chat_choice(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _text_choice(text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}


def _top_logprobs(word: str, logprob: float, limit: int) -> list[dict[str, Any]]:
    """Return the word and one other token, which has the remaining probability."""
    rest = math.log(max(1e-9, 1 - math.exp(logprob)))
    both = sorted([(logprob, word), (rest, "~")], reverse=True)
    return [{"token": text, "logprob": value} for value, text in both[:limit]]
