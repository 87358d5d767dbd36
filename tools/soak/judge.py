"""What is wrong with one exchange. Whether its tokens are right is the oracle's to say; all else is decided here, from
the exchange and what was broken meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tools.soak.client import Exchange

Kind = Literal["wrong_answer", "leak_of_text", "late", "error"]

SLACK_S = 3.0  # of this client's own clock, on a machine that is kept busy
FRESH_TOKENS = 24  # all that a new document shares with others: the template's beginning, less than a block of the pool
EXCUSABLE = {"upstream_error", "upstream_timeout", "overloaded"}


@dataclass(frozen=True)
class Finding:
    """Something that must not be. `request_id` finds it in the logs."""

    kind: Kind
    what: str
    request_id: str = "-"


def judge(
    exchange: Exchange, broken_tiers: Collection[str], canaries: Collection[str], request_s: float
) -> list[Finding]:
    """`canaries` are all that there are; `request_s` is the gateway's deadline for one request."""
    request_id = exchange.headers.get("x-request-id", "-")
    found: dict[Kind, Iterable[str]] = {
        "leak_of_text": _leaks(exchange, canaries),
        "late": _late(exchange, request_s),
        "error": _errors(exchange, broken_tiers),
        "wrong_answer": _misled(exchange),
    }
    return [Finding(kind, what, request_id) for kind, whats in found.items() for what in whats]


def _leaks(exchange: Exchange, canaries: Collection[str]) -> Iterator[str]:
    """Canaries in an answer whose prompt does not hold them."""
    text = exchange.text.lower()
    for canary in canaries:
        if canary in text and canary not in exchange.ask.prompt:
            yield f"{exchange.tenant} was told {canary!r}, of a document that it did not ask about"


def _late(exchange: Exchange, request_s: float) -> Iterator[str]:
    if exchange.took_s > request_s + SLACK_S:
        yield f"{exchange.took_s:.1f} s, of {request_s:g} s that a request may take (status {exchange.status})"


def _errors(exchange: Exchange, broken_tiers: Collection[str]) -> Iterator[str]:
    """Replies that are none, errors that nothing excuses, and refusals that were due and did not come."""
    ask, told = exchange.ask, f"{exchange.status} {exchange.error or ''}"
    if exchange.ended == "hung_up":
        return
    if exchange.ended == "cut":
        yield f"broke off without a word: {told}"
    elif exchange.is_answer and ask.refused_with:
        yield f"answered what no client should send: {str(ask.body)[:120]}"
    elif exchange.ended == "error" and exchange.status not in ask.refused_with:
        if not _is_excused(exchange, broken_tiers):
            yield f"{told}; asked of {ask.tier or 'auto'}, broken was {', '.join(sorted(broken_tiers)) or 'nothing'}"
        elif not _is_well_told(exchange):
            yield f"not told as an error is: {told}, headers {exchange.headers}"


def _is_excused(exchange: Exchange, broken_tiers: Collection[str]) -> bool:
    """A tier asked for by name was broken; or both were. One is enough in the midst of a stream, which cannot be taken
    back, and for what the other refuses anyway."""
    if exchange.error.get("type") not in EXCUSABLE:
        return False
    if exchange.ask.tier:
        return exchange.ask.tier in broken_tiers
    needed = 1 if exchange.status == 200 or exchange.ask.refused_with else 2
    return len(broken_tiers) >= needed


def _is_well_told(exchange: Exchange) -> bool:
    has_words = isinstance(exchange.error.get("code"), str) and bool(exchange.error.get("message"))
    return has_words and (exchange.status != 503 or "retry-after" in exchange.headers)


def _misled(exchange: Exchange) -> Iterator[str]:
    """What the answer says of its own making, against what the request allows."""
    if not exchange.is_answer or exchange.ask.refused_with:
        return
    if not exchange.told:
        yield "an answer that tells nothing of its making"
        return
    mapped, path = exchange.mapped_tokens, exchange.path
    if mapped and exchange.ask.wants_native:
        yield f"{mapped} mapped tokens in an answer that allows none (path {path})"
    if (path in ("mapped", "hybrid")) != bool(mapped):
        yield f"path {path} with {mapped} mapped tokens"
    if exchange.ask.tier and exchange.told.get("tier") != exchange.ask.tier:
        yield f"asked of {exchange.ask.tier}, answered by {exchange.told.get('tier')}"
    cached = int(exchange.told.get("cached_tokens") or 0)
    if exchange.is_fresh and (cached > FRESH_TOKENS or (mapped and not exchange.told.get("handoff_tokens"))):
        yield f"{exchange.tenant} never asked about this text, and {max(cached, mapped)} tokens of it were cached"
