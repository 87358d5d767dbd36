"""Tenants that send several requests at once and check every answer before they go on.

new document ──► a turn ──► the same with its answer and a new question ──► ...   a conversation that grows
    │                                                                              sometimes restarted
    └──► now and then an invalid request
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tools.soak.checks import Violation, violations
from tools.soak.faults import FaultInjector
from tools.soak.requests import ChatMessage, RequestWriter, SoakExchange, SoakRequest, send

PREFIX_CHARS = 32  # texts of one tenant differ within these
MAX_TURNS = 5
TIMEOUT_FACTOR = 2.0  # this client's timeout, in deadlines of the gateway
MAX_KEPT = 1000  # violations that are kept; all are counted

TokenCheck = Callable[[SoakExchange], Awaitable[str | None]]


def key_of(tenant: str) -> str:
    """Return the tenant's API key. The stack listens on loopback and lives as long as the soak."""
    return f"soak-{tenant}"


def key_hash(tenant: str) -> str:
    return hashlib.sha256(key_of(tenant).encode()).hexdigest()


@dataclass
class Tally:
    """Counts over the exchanges of all tenants."""

    num_requests: int = 0
    num_checked: int = 0  # by the oracle
    num_own_canaries: int = 0  # answers with a canary of their own tenant
    paths: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # violations by kind
    excused: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    slowest_s: float = 0.0

    def add(self, exchange: SoakExchange, found: Sequence[Violation]) -> None:
        self.num_requests += 1
        self.slowest_s = max(self.slowest_s, exchange.took_s)
        self.paths[exchange.path.partition(":")[0] if exchange.is_answer else exchange.ended] += 1
        if exchange.ended == "error" and not found and not exchange.request.refused_with:
            self.excused[f"{exchange.status} {exchange.error.get('code')}"] += 1
        self.counts.update(one.kind for one in found)
        self.violations = [*self.violations, *found][:MAX_KEPT]


class LoadTenant:
    """Sends requests to the gateway at `url`. An async context manager that closes its connections."""

    def __init__(
        self,
        url: str,
        writer: RequestWriter,
        tally: Tally,
        faults: FaultInjector,
        check_tokens: TokenCheck,
        *,
        canaries: Callable[[], set[str]],
        request_s: float,
    ):
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key_of(writer.tenant)}"},
            timeout=TIMEOUT_FACTOR * request_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._writer = writer
        self._tally = tally
        self._faults = faults
        self._check_tokens = check_tokens
        self._canaries = canaries
        self._request_s = request_s
        self._prefixes: set[str] = set()

    async def __aenter__(self) -> LoadTenant:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def run(self) -> None:
        """Hold one conversation after another, until cancelled."""
        rng = self._writer.rng
        while True:
            if rng.random() < 0.1:
                await self._exchange(self._writer.invalid_request())
                continue
            beginning: list[ChatMessage] = []
            if rng.random() < 0.9:
                beginning.append({"role": "system", "content": self._writer.new_document().text})
            for _ in range(rng.choice((1, 2))):  # a second conversation shares the document
                await self._converse(beginning, rng.randint(1, MAX_TURNS))

    async def _converse(self, beginning: Sequence[ChatMessage], num_turns: int) -> None:
        messages = list(beginning)
        for _ in range(num_turns):
            messages.append(self._writer.question())
            exchange = await self._exchange(self._writer.request(messages))
            if not exchange.is_answer:
                return
            messages.append({"role": "assistant", "content": exchange.text})

    async def _exchange(self, request: SoakRequest) -> SoakExchange:
        exchange = SoakExchange(self._writer.tenant, request, time.monotonic(), is_fresh=self._is_fresh(request))
        await send(self._http, exchange)
        broken = self._faults.broken_tiers(exchange.began_at, exchange.ended_at)
        found = violations(exchange, broken, self._canaries(), self._request_s)
        if exchange.is_answer and exchange.kvrelay and not request.refused_with:
            self._tally.num_own_canaries += any(canary in exchange.text for canary in self._writer.canaries)
            wrong = await self._check_tokens(exchange)
            self._tally.num_checked += 1
            if wrong:
                what, request_id = f"path {exchange.path}: {wrong}", exchange.headers["x-request-id"]
                found.append(Violation("wrong_answer", what, request_id))
        self._tally.add(exchange, found)
        return exchange

    def _is_fresh(self, request: SoakRequest) -> bool:
        if request.refused_with:
            return False
        prefix = request.messages[0]["content"][:PREFIX_CHARS]
        is_fresh = prefix not in self._prefixes
        self._prefixes.add(prefix)
        return is_fresh
