"""`PromptReader`: prompts to token ids, on a thread of its own: neither the event loop nor the compute thread waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from workers.api.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from workers.api.schemas import ChatRequest, CompletionRequest, Prompt
from workers.engines.base import Engine
from workers.engines.tokenizer import PromptTokens

RETRY_AFTER_S = 1.0


class PromptReader:
    """Tokenises for one engine, on one event loop. Raises `InvalidRequest` for what its model cannot read, and
    `Overloaded` when too many prompts wait."""

    def __init__(self, engine: Engine, *, max_waiting: int):
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.model.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(self, prompt: Prompt) -> PromptTokens:
        """Any of a prompt's three forms."""
        tokenizer = self._tokenizer
        if prompt.messages is not None:
            return await self._run(
                partial(
                    tokenizer.encode_chat, prompt.messages, tools=prompt.tools, stable_messages=prompt.stable_messages
                )
            )
        if prompt.token_ids is not None:
            return await self._run(partial(tokenizer.check_ids, prompt.token_ids))
        return await self._run(partial(tokenizer.encode, prompt.prefix or ""))

    async def read_stable(self, prompt: Prompt) -> list[int]:
        """The part of a prompt that later requests share: up to the boundary, or everything if none is marked."""
        tokens = await self.read(prompt)
        if prompt.stable_messages is None:
            return tokens.token_ids
        if not tokens.stable_tokens:
            raise InvalidRequest(
                f"the first {prompt.stable_messages} messages have no stable tokens: rendered alone, they share no "
                "beginning with the whole conversation",
                param="stable_messages",
            )
        return tokens.token_ids[: tokens.stable_tokens]

    async def read_chat(self, request: ChatRequest) -> PromptTokens:
        if (request.stable_messages or 0) > len(request.messages):
            raise InvalidRequest(
                f"stable_messages is {request.stable_messages}, but there are {len(request.messages)} messages",
                param="stable_messages",
            )
        return await self._run(
            partial(
                self._tokenizer.encode_chat,
                request.messages,
                tools=request.tools,
                stable_messages=request.stable_messages,
            )
        )

    async def read_completion(self, request: CompletionRequest) -> PromptTokens:
        if not request.prompt:
            raise InvalidRequest("prompt is empty; at least one token is needed", param="prompt")
        if isinstance(request.prompt, str):
            return await self._run(partial(self._tokenizer.encode, request.prompt))
        return await self._run(partial(self._tokenizer.check_ids, request.prompt, param="prompt"))

    def check_length(self, num_prompt: int, num_answer: int) -> None:
        """Raise `ContextLengthExceeded` unless prompt and answer fit together."""
        if num_prompt + num_answer > self._max_model_len:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and {num_answer} to write are {num_prompt + num_answer}; "
                f"the context length is {self._max_model_len}",
                param="max_tokens" if num_prompt < self._max_model_len else "messages",
            )

    def close(self) -> None:
        self._thread.shutdown()

    async def _run(self, encode: Callable[[], PromptTokens]) -> PromptTokens:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} prompts wait for the tokenizer already", retry_after_s=RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            # A caller who has gone leaves at most the text that is being read just then.
            return await asyncio.wrap_future(self._thread.submit(encode))
        finally:
            self._num_waiting -= 1
