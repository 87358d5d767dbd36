"""How long a request waits for a circuit to let it through."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier

SHARE = 0.5  # of the time left; who is let through has the rest for the call


def patience(by: Deadline, others: Iterable[Tier] = ()) -> Deadline | None:
    """A part of the time until then; None where one of the `others` could answer now."""
    return None if any(tier.is_usable for tier in others) else by.share(SHARE)
