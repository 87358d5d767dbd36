"""Pieces of an answer, told less often than they are written."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from workers.serving.answer import Piece


async def spaced(
    pieces: AsyncIterator[Piece], interval_s: float, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Piece]:
    """The first piece as it comes; of what follows, all that is there not before `interval_s` have passed since, and
    the rest at the end."""
    held: list[Piece] = []
    told_at = -math.inf
    async for piece in pieces:
        held.append(piece)
        if (now := clock()) - told_at >= interval_s:
            yield _joined(held)
            held, told_at = [], now
    if held:
        yield _joined(held)


def _joined(pieces: Sequence[Piece]) -> Piece:
    text = "".join(piece.text for piece in pieces)
    return Piece(text, tuple(token for piece in pieces for token in piece.tokens))
