"""Conversations about a fact that only their own document holds."""

from __future__ import annotations

import random
from typing import Any

Messages = list[dict[str, Any]]

WORDS = (
    "the king and his men came to the gate of the old town where a lady with white hands stood by the well and said "
    "that no ship had been seen from the wall since the great storm but the captain would not hear of it and sent for "
    "bread wine horses light money letters so that they might ride before night"
).split()


def conversation(name: str, secret: str = "silver river", *, num_words: int = 280) -> Messages:
    """Return a document about `name` with `secret` near its start, and a question for the secret.

    A word is about 1.3 tokens. Another name or secret gives another document, so tests share no long prefix.
    """
    rng = random.Random(f"{name}: {secret}")
    filler = " ".join(rng.choices(WORDS, k=num_words))
    document = f"{name} speaks. The password of {name} is {secret}. {filler}."
    return [{"role": "system", "content": document}, {"role": "user", "content": f"What is the password of {name}?"}]


def next_turn(before: Messages, answer: str, question: str = "And what did the captain say?") -> Messages:
    """Append the answer and a new question."""
    return [*before, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
