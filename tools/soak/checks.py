"""Find what is wrong with an exchange.

`violations` decides from the exchange and the faults meanwhile. `Oracle` checks an answer's tokens against plain
transformers, which need torch and run in a process of their own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import orjson

from tools.soak.requests import SoakExchange
from tools.stack import StackError

Kind = Literal["wrong_answer", "leak_of_text", "late", "error"]

SLACK_S = 3.0  # for this client's own delays on a busy machine
FRESH_TOKENS = 24  # a new document shares only the template's beginning with others: less than a block of the pool
EXCUSABLE = {"upstream_error", "upstream_timeout", "overloaded"}
LINE_LIMIT = 2**24  # bytes of a reply of the oracle


@dataclass(frozen=True)
class Violation:
    """Something that must not happen. `request_id` finds it in the logs."""

    kind: Kind
    what: str
    request_id: str = "-"


def violations(
    exchange: SoakExchange, broken_tiers: Collection[str], canaries: Collection[str], request_s: float
) -> list[Violation]:
    """Check one exchange. `canaries` are those of all documents; `request_s` is the gateway's deadline."""
    request_id = exchange.headers.get("x-request-id", "-")
    found: dict[Kind, Iterable[str]] = {
        "leak_of_text": _leaks(exchange, canaries),
        "late": _late(exchange, request_s),
        "error": _errors(exchange, broken_tiers),
        "wrong_answer": _contradictions(exchange),
    }
    return [Violation(kind, what, request_id) for kind, whats in found.items() for what in whats]


def _leaks(exchange: SoakExchange, canaries: Collection[str]) -> Iterator[str]:
    """Yield canaries of an answer that its prompt does not contain."""
    text = exchange.text.lower()
    for canary in canaries:
        if canary in text and canary not in exchange.request.prompt:
            yield f"{exchange.tenant} received {canary!r} from a document that its prompt does not contain"


def _late(exchange: SoakExchange, request_s: float) -> Iterator[str]:
    if exchange.took_s > request_s + SLACK_S:
        yield f"took {exchange.took_s:.1f} s; the deadline is {request_s:g} s (status {exchange.status})"


def _errors(exchange: SoakExchange, broken_tiers: Collection[str]) -> Iterator[str]:
    """Yield malformed replies, errors that no fault excuses, and answers to invalid requests."""
    request, error = exchange.request, f"{exchange.status} {exchange.error or ''}"
    if exchange.ended == "hung_up":
        return
    if exchange.ended == "cut":
        yield f"broke off without an error: {error}"
    elif exchange.is_answer and request.refused_with:
        yield f"answered an invalid request: {str(request.body)[:120]}"
    elif exchange.ended == "error" and exchange.status not in request.refused_with:
        if not _is_excused(exchange, broken_tiers):
            broken = ", ".join(sorted(broken_tiers)) or "nothing"
            yield f"{error}; requested {request.tier or 'auto'}, broken: {broken}"
        elif not _is_well_formed(exchange):
            yield f"malformed error: {error}, headers {exchange.headers}"


def _is_excused(exchange: SoakExchange, broken_tiers: Collection[str]) -> bool:
    """Return whether faults excuse the error: the requested tier was broken, or both were. One is enough within a
    stream, which cannot fall back any more, and for a request that the other tier refuses anyway."""
    if exchange.error.get("type") not in EXCUSABLE:
        return False
    if exchange.request.tier:
        return exchange.request.tier in broken_tiers
    needed = 1 if exchange.status == 200 or exchange.request.refused_with else 2
    return len(broken_tiers) >= needed


def _is_well_formed(exchange: SoakExchange) -> bool:
    has_fields = isinstance(exchange.error.get("code"), str) and bool(exchange.error.get("message"))
    return has_fields and (exchange.status != 503 or "retry-after" in exchange.headers)


def _contradictions(exchange: SoakExchange) -> Iterator[str]:
    """Yield contradictions between the answer's report of itself and what the request allows."""
    request, report = exchange.request, exchange.kvrelay
    if not exchange.is_answer or request.refused_with:
        return
    if not report:
        yield "an answer without a report"
        return
    mapped, path = exchange.mapped_tokens, exchange.path
    if mapped and request.requires_native:
        yield f"{mapped} mapped tokens in an answer that allows none (path {path})"
    if (path in ("mapped", "hybrid")) != bool(mapped):
        yield f"path {path} with {mapped} mapped tokens"
    if request.tier and report.get("tier") != request.tier:
        yield f"requested {request.tier}, answered by {report.get('tier')}"
    cached = int(report.get("cached_tokens") or 0)
    if exchange.is_fresh and (cached > FRESH_TOKENS or (mapped and not report.get("handoff_tokens"))):
        yield f"{max(cached, mapped)} tokens of a text that {exchange.tenant} never sent before were cached"


class Oracle:
    """`workers.reference` as a child process. One question at a time; other callers wait. Unusable after a caller was
    cancelled. An async context manager. Raises `StackError` if it ends early, `TimeoutError` if it does not answer."""

    def __init__(self, folders: Mapping[str, str], *, threads: int, timeout_s: float = 600.0):
        self._arguments = [part for name in ("small", "large", "bundle") for part in (f"--{name}", folders[name])]
        self._threads = str(threads)
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Oracle:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "workers.reference", *self._arguments, "--threads", self._threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": self._threads},
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        try:
            await self._read_line()  # the models are loaded
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def error_in(self, exchange: SoakExchange) -> str | None:
        """Return what is wrong with the answer's tokens, None if nothing is."""
        question = {
            "tier": exchange.kvrelay["tier"],
            "messages": exchange.request.messages,
            "mapped_tokens": exchange.mapped_tokens,
            "max_tokens": exchange.request.body["max_tokens"],
            "body": exchange.completion,
        }
        async with self._lock:
            assert self._process.stdin
            self._process.stdin.write(orjson.dumps(question) + b"\n")
            reply = await self._read_line()
        wrong: str | None = orjson.loads(reply)["wrong"]
        return wrong

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _read_line(self) -> bytes:
        assert self._process.stdout
        async with asyncio.timeout(self._timeout_s):
            reply = await self._process.stdout.readline()
        if not reply:
            raise StackError("the oracle ended early; run `python -m workers.reference` by hand to see why")
        return reply
