"""Tenants that ask, each several things at once, and have every answer looked at before they go on.

    new document ──► a turn ──► the same with its answer and a new question ──► ...   a conversation that grows
        │                                                                              sometimes begun anew
        └──► now and then something that no client should send
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tools.soak.client import Exchange, exchange
from tools.soak.faults import Faults
from tools.soak.judge import Finding, judge
from tools.soak.settings import key_of
from tools.soak.talks import Ask, Message, Writer

BEGINNING = 32  # characters by which a tenant's texts are told apart
MOST_TURNS = 5
PATIENCE = 2.0  # this client waits so many deadlines of the gateway's
MOST_FINDINGS = 1000  # that are kept; all are counted

Wrong = Callable[[Exchange], Awaitable[str | None]]


@dataclass
class Seen:
    """What all tenants' exchanges came to."""

    num_requests: int = 0
    num_checked: int = 0  # by the oracle
    num_own_canaries: int = 0  # answers that told the canary that was theirs to tell
    paths: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # of findings, by kind
    excused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest_s: float = 0.0

    def note(self, one: Exchange, findings: Sequence[Finding]) -> None:
        self.num_requests += 1
        self.slowest_s = max(self.slowest_s, one.took_s)
        self.paths[one.path.partition(":")[0] if one.is_answer else one.ended] += 1
        if one.ended == "error" and not findings and not one.ask.refused_with:
            self.excused[f"{one.status} {one.error.get('code')}"] += 1
        self.counts.update(finding.kind for finding in findings)
        self.findings = [*self.findings, *findings][:MOST_FINDINGS]


class Tenant:
    """Asks the gateway at `url`. An async context manager: leaving it closes its connections."""

    def __init__(
        self,
        url: str,
        writer: Writer,
        seen: Seen,
        faults: Faults,
        wrong: Wrong,
        *,
        canaries: Callable[[], set[str]],
        request_s: float,
    ):
        key = {"authorization": f"Bearer {key_of(writer.tenant)}"}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, headers=key, timeout=PATIENCE * request_s, limits=limits, trust_env=False
        )
        self._writer = writer
        self._seen = seen
        self._faults = faults
        self._wrong = wrong
        self._canaries = canaries
        self._request_s = request_s
        self._beginnings: set[str] = set()

    async def __aenter__(self) -> Tenant:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def run(self) -> None:
        """One conversation after another, until it is cancelled."""
        rng = self._writer.rng
        while True:
            if rng.random() < 0.1:
                await self._asked(self._writer.bad_ask())
                continue
            beginning: list[Message] = []
            if rng.random() < 0.9:
                beginning.append({"role": "system", "content": self._writer.new_document().text})
            for _ in range(rng.choice((1, 2))):  # a second conversation shares the document
                await self._conversation(beginning, rng.randint(1, MOST_TURNS))

    async def _conversation(self, beginning: Sequence[Message], num_turns: int) -> None:
        messages = list(beginning)
        for _ in range(num_turns):
            messages.append(self._writer.question())
            came = await self._asked(self._writer.ask(messages))
            if not came.is_answer:
                return
            messages.append({"role": "assistant", "content": came.text})

    async def _asked(self, ask: Ask) -> Exchange:
        one = Exchange(self._writer.tenant, ask, time.monotonic(), is_fresh=self._is_fresh(ask))
        await exchange(self._http, one)
        broken = self._faults.broken_tiers(one.began_at, one.ended_at)
        findings = judge(one, broken, self._canaries(), self._request_s)
        if one.is_answer and one.told and not ask.refused_with:
            self._seen.num_own_canaries += any(canary in one.text for canary in self._writer.canaries)
            what = await self._wrong(one)
            self._seen.num_checked += 1
            if what:
                findings.append(Finding("wrong_answer", f"path {one.path}: {what}", one.headers["x-request-id"]))
        self._seen.note(one, findings)
        return one

    def _is_fresh(self, ask: Ask) -> bool:
        if ask.refused_with:
            return False
        beginning = ask.messages[0]["content"][:BEGINNING]
        is_fresh = beginning not in self._beginnings
        self._beginnings.add(beginning)
        return is_fresh
