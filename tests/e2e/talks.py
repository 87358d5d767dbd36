"""Conversations with a canary: a fact that only their own document holds, and a question for it."""

from __future__ import annotations

import random
from typing import Any

Talk = list[dict[str, Any]]

WORDS = (
    "the king and his men came to the gate of the old town where a lady with white hands stood by the well and said "
    "that no ship had been seen from the wall since the great storm but the captain would not hear of it and sent for "
    "bread wine horses light money letters so that they might ride before night"
).split()


def talk(name: str, secret: str = "silver river", *, num_words: int = 280) -> Talk:
    """A document about `name` of some 1.3 tokens a word, with `secret` near its start, and the question for it.

    Another name or another secret gives another document, so that no two tests share a prefix worth having.
    """
    rng = random.Random(f"{name}: {secret}")
    filler = " ".join(rng.choices(WORDS, k=num_words))
    document = f"{name} speaks. The password of {name} is {secret}. {filler}."
    return [{"role": "system", "content": document}, {"role": "user", "content": f"What is the password of {name}?"}]


def carried_on(before: Talk, answer: str, question: str = "And what did the captain say?") -> Talk:
    """The turn after: the answer as it came, and a new question."""
    return [*before, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
