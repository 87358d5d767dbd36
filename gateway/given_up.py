"""Whether a worker was at it when its call was given up: what it has read by then is paid for."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Asking:
    """The block in which a worker is asked. Who asks says when it has `begun`, and is no longer queued for;
    `was_given_up` tells whether the block was cancelled later than that."""

    def __init__(self) -> None:
        self.was_given_up = False
        self._has_begun = False

    def begun(self) -> None:
        self._has_begun = True

    def __enter__(self) -> Asking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.was_given_up = self._has_begun and isinstance(error, asyncio.CancelledError)
