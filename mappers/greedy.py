"""Free-running generation over a given cache: where two caches lead to other words, not only to other odds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mappers.cache import KVCache
from mappers.models import log_probs, run


def continued(model: Any, token_ids: Sequence[int], past: KVCache | None, num_tokens: int) -> tuple[int, ...]:
    """The `num_tokens` most likely tokens one after another, once `token_ids` have been read behind `past`."""
    tokens: list[int] = []
    reading = list(token_ids)
    while len(tokens) < num_tokens:
        past, hidden = run(model, reading, past)
        reading = [int(log_probs(model, hidden[-1:]).argmax())]
        tokens += reading
    return tuple(tokens)


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of places where both have the same token."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
