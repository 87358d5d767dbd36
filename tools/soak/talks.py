"""What is asked: documents that hold a canary, conversations about them that grow, and input that is no good.

A canary is a made-up word that only one document holds. Some documents are twins: word for word alike, but for the
canary, and read by other tenants.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]

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


@dataclass(frozen=True)
class Document:
    """`text` begins with `name`, which no document of the same tenant shares unless it shares the beginning too."""

    name: str
    canary: str
    text: str


@dataclass(frozen=True)
class Ask:
    """One request. `tier` is the one asked for by name, None for `auto`; `hangs_up_after` frames its client is gone."""

    body: dict[str, Any]
    hangs_up_after: int | None = None
    refused_with: tuple[int, ...] = ()

    @property
    def messages(self) -> list[Message]:
        messages: list[Message] = self.body["messages"]
        return messages

    @property
    def tier(self) -> str | None:
        model = self.body.get("model")
        return None if model == "auto" else str(model)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_native(self) -> bool:
        """Whether it allows no mapped cache."""
        options = self.body.get("kvrelay", {})
        return bool(self.tier or options.get("exact") or options.get("no_cache"))

    @property
    def prompt(self) -> str:
        return "\n".join(str(message.get("content")) for message in self.messages if isinstance(message, dict))


def canary(rng: random.Random) -> str:
    """A word that no text holds by chance."""
    return "".join(rng.choices(SYLLABLES, k=6))


def document(name: str, canary: str, rng: random.Random, num_words: int) -> Document:
    """About 1.3 tokens a word, the canary early or late. Twins come from equal `rng`s."""
    words = rng.choices(WORDS, k=num_words)
    words.insert(rng.choice((0, num_words)), f"The password is {canary}.")
    return Document(name, canary, f"The book of the {name}. {' '.join(words)}")


@dataclass
class Writer:
    """One tenant's author of requests. The same `seed` asks the same, whatever is answered."""

    tenant: str
    seed: str
    max_words: int
    max_tokens: int
    canaries: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.tenant}")
        self._num_documents = 0

    def new_document(self) -> Document:
        """Its own, or the tenant's edition of what others read too."""
        number, self._num_documents = self._num_documents, self._num_documents + 1
        is_twin = self.rng.random() < 0.5
        name = f"{NAMES[number % len(NAMES)]} {number}" + ("" if is_twin else f" of {self.tenant}")
        text_rng = random.Random(f"{self.seed} {name}")
        num_words = text_rng.randint(10, self.max_words)
        secret = canary(self.rng)
        self.canaries.add(secret)
        return document(name, secret, text_rng, num_words)

    def ask(self, messages: Sequence[Message]) -> Ask:
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
            return Ask(body | {"max_tokens": 20 * self.max_tokens}, hangs_up_after=rng.randint(0, 6))
        return Ask(body)

    def question(self) -> Message:
        return {"role": "user", "content": self.rng.choice(QUESTIONS)}

    def bad_ask(self) -> Ask:
        """What no client should send, and the statuses that tell it so."""
        change, statuses = self.rng.choice(BAD)
        body = {"model": "auto", "messages": [self.question()], "max_tokens": 4, "temperature": 0, "logprobs": True}
        return Ask(body | change, refused_with=statuses)


BAD: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
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
