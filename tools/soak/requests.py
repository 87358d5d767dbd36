"""What the soak sends and receives: documents with a canary, conversations about them, and invalid requests.

A canary is a made-up word that only one document contains. Some documents are twins: equal word for word except for
the canary, and used by different tenants.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

ChatMessage = dict[str, str]

NAMES = "Harbour Mill Orchard Abbey Foundry Granary Lighthouse Quarry Chapel Ferry Vineyard Armoury".split()
WORDS = (
    "the keeper and his men came to the gate of the old town where a woman with a lamp stood by the well and said that "
    "no boat had been seen from the wall since the storm but the clerk would not hear of it and sent for bread coal "
    "horses rope money letters so that they might leave before night"
).split()
SYLLABLES = "ba de fi go ku la mo nu pe ri so ta vu we xi zo".split()
QUESTIONS = (
    "What is the password?",
    "Who stood by the well, and what did she say?",
    "What did the clerk send for?",
    "Repeat the first sentence.",
    "Why did they leave before night?",
    "And then?",
)
POLICIES = (None, None, "always_escalate", "always_escalate", "confidence")
INVALID: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (  # changes of a request, and the expected statuses
    ({"messages": []}, (400,)),
    ({"messages": [{"role": "wizard", "content": "x"}]}, (400,)),
    ({"messages": ["x"]}, (400,)),
    ({"model": "gpt-none"}, (404,)),
    ({"temperature": "hot"}, (400,)),
    ({"max_tokens": -1}, (400,)),
    ({"n": 2}, (400,)),
    ({"kvrelay": {"policy": "none"}}, (400,)),
    ({"messages": [{"role": "user", "content": "too long " * 40_000}]}, (400, 413)),
    ({"model": "small", "logit_bias": {"5": 1}}, (400,)),
)


# Requests


@dataclass(frozen=True)
class CanaryDocument:
    """`text` begins with `name`. Two documents of one tenant differ from the beginning."""

    name: str
    canary: str
    text: str


@dataclass(frozen=True)
class SoakRequest:
    """One request. The client hangs up after `hangs_up_after` frames, if set. `refused_with` are the expected statuses
    of an invalid request."""

    body: dict[str, Any]
    hangs_up_after: int | None = None
    refused_with: tuple[int, ...] = ()

    @property
    def messages(self) -> list[ChatMessage]:
        messages: list[ChatMessage] = self.body["messages"]
        return messages

    @property
    def tier(self) -> str | None:
        """The tier requested by name, None for `auto`."""
        model = self.body.get("model")
        return None if model == "auto" else str(model)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def requires_native(self) -> bool:
        """Whether it forbids a mapped cache."""
        options = self.body.get("kvrelay", {})
        return bool(self.tier or options.get("exact") or options.get("no_cache"))

    @property
    def prompt(self) -> str:
        return "\n".join(str(message.get("content")) for message in self.messages if isinstance(message, dict))


@dataclass
class RequestWriter:
    """Writes one tenant's requests. Equal seeds give equal requests, whatever the answers."""

    tenant: str
    seed: str
    max_words: int
    max_tokens: int
    canaries: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.tenant}")
        self._num_documents = 0

    def new_document(self) -> CanaryDocument:
        """Write a document of about 1.3 tokens a word, the canary early or late: the tenant's own, or a twin."""
        number, self._num_documents = self._num_documents, self._num_documents + 1
        is_twin = self.rng.random() < 0.5
        name = f"{NAMES[number % len(NAMES)]} {number}" + ("" if is_twin else f" of {self.tenant}")
        text_rng = random.Random(f"{self.seed} {name}")  # twins have the same
        num_words = text_rng.randint(10, self.max_words)
        canary = "".join(self.rng.choices(SYLLABLES, k=6))  # no text contains it by chance
        self.canaries.add(canary)
        words = text_rng.choices(WORDS, k=num_words)
        words.insert(text_rng.choice((0, num_words)), f"The password is {canary}.")
        return CanaryDocument(name, canary, f"The book of the {name}. {' '.join(words)}")

    def request(self, messages: Sequence[ChatMessage]) -> SoakRequest:
        rng = self.rng
        options: dict[str, Any] = {}
        body: dict[str, Any] = {"model": "auto", "messages": list(messages), "temperature": 0, "logprobs": True}
        body["max_tokens"] = rng.randint(1, self.max_tokens)
        if rng.random() < 0.3:
            body["model"] = rng.choice(("small", "large"))
        elif policy := rng.choice(POLICIES):
            options["policy"] = policy
        if rng.random() < 0.15:
            options[rng.choice(("exact", "no_cache"))] = True
        if options:
            body["kvrelay"] = options
        if rng.random() < 0.5:
            body["stream"] = True
        if rng.random() < 0.15:
            return SoakRequest(body | {"max_tokens": 20 * self.max_tokens}, hangs_up_after=rng.randint(0, 6))
        return SoakRequest(body)

    def question(self) -> ChatMessage:
        return {"role": "user", "content": self.rng.choice(QUESTIONS)}

    def invalid_request(self) -> SoakRequest:
        change, statuses = self.rng.choice(INVALID)
        body = {"model": "auto", "messages": [self.question()], "max_tokens": 4, "temperature": 0, "logprobs": True}
        return SoakRequest(body | change, refused_with=statuses)


# Exchanges


@dataclass
class SoakExchange:
    """A request and its result, in the same form whether streamed or not. Times are of `time.monotonic()`.

    `ended` is "whole" for a complete answer, "error" for an error reply, "cut" for a reply that broke off without one,
    "hung_up" if this client hung up.
    """

    tenant: str
    request: SoakRequest
    began_at: float
    is_fresh: bool = False  # this tenant has never sent a text with this beginning
    ended_at: float = 0.0
    ended: Literal["whole", "error", "cut", "hung_up"] = "cut"
    status: int | None = None  # None without a reply
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    kvrelay: dict[str, Any] = field(default_factory=dict)  # the reply's field of that name

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def is_answer(self) -> bool:
        return self.ended == "whole"

    @property
    def path(self) -> str:
        return str(self.kvrelay.get("path"))

    @property
    def mapped_tokens(self) -> int:
        return int(self.kvrelay.get("mapped_tokens") or 0)

    @property
    def completion(self) -> dict[str, Any]:
        """The answer as a chat completion, streamed or not."""
        choice = {"message": {"content": self.text}, "logprobs": {"content": self.tokens}}
        return {"choices": [choice]}


async def send(http: httpx.AsyncClient, exchange: SoakExchange) -> None:
    """Send the request and fill in its result."""
    try:
        await (_send_streamed if exchange.request.streams else _send_whole)(http, exchange)
    except httpx.HTTPError as error:
        exchange.ended, exchange.error = "cut", {"message": repr(error)}
    exchange.ended_at = time.monotonic()


async def _send_whole(http: httpx.AsyncClient, exchange: SoakExchange) -> None:
    request = exchange.request
    if request.hangs_up_after is not None:
        exchange.ended = "hung_up"
        with suppress(httpx.TimeoutException):
            timeout_s = 0.1 * (1 + request.hangs_up_after)
            await http.post("/v1/chat/completions", json=request.body, timeout=timeout_s)
        return
    reply = await http.post("/v1/chat/completions", json=request.body)
    exchange.status, exchange.headers = reply.status_code, dict(reply.headers)
    body = orjson.loads(reply.content)
    if reply.status_code != 200:
        exchange.ended, exchange.error = "error", body.get("error") or {"message": str(body)[:200]}
        return
    choice = body["choices"][0]
    exchange.text, exchange.kvrelay = choice["message"]["content"] or "", body["kvrelay"]
    exchange.tokens = (choice["logprobs"] or {}).get("content") or []
    exchange.ended = "whole"


async def _send_streamed(http: httpx.AsyncClient, exchange: SoakExchange) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=exchange.request.body) as reply:
        exchange.status, exchange.headers = reply.status_code, dict(reply.headers)
        if reply.status_code != 200:
            await reply.aread()
            exchange.ended, exchange.error = "error", orjson.loads(reply.content).get("error") or {}
            return
        num_frames = 0
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if num_frames == exchange.request.hangs_up_after:
                exchange.ended = "hung_up"
                return
            num_frames += 1
            if line == "data: [DONE]":
                exchange.ended = "whole"
            elif exchange.ended != "error":
                _add_chunk(exchange, orjson.loads(line.removeprefix("data: ")))


def _add_chunk(exchange: SoakExchange, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        exchange.ended, exchange.error = "error", chunk["error"]
        return
    exchange.kvrelay = chunk.get("kvrelay") or exchange.kvrelay
    for choice in chunk["choices"]:
        exchange.text += choice["delta"].get("content") or ""
        exchange.tokens += (choice.get("logprobs") or {}).get("content") or []
