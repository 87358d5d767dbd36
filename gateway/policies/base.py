"""What a policy decides: the route before any model runs, and whether the small model's answer will do.

A policy is its own settings: a frozen model whose fields stand under `policy:` in the configuration. It knows no
worker and no network. To add one: a file with a subclass, and its line in `policies/__init__.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from gateway.policies.budget import Budget

Route = Literal["answer", "cascade", "escalate"]
Streaming = Literal["decide_first", "buffer", "stream_small"]
Foresight = Literal["open", "likely", "certain"]

WHOLE_ANSWER = sys.maxsize  # as a count of judged tokens


@dataclass(frozen=True)
class Asked:
    """What a policy may know of a request before any model runs. `text` is the last user message, `num_chars` counts
    all messages; nobody has counted tokens yet. Of the policy's budgets, those in `overspent` are used up."""

    text: str = ""
    num_chars: int = 0
    has_tools: bool = False
    is_streamed: bool = False
    tenant_tier: str | None = None
    overspent: frozenset[Budget] = frozenset()


@dataclass(frozen=True)
class Token:
    """One token of an answer, with its log-probability (natural log) and those of the likeliest at its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Decision:
    """How a request is routed, decided before any model runs.

    `answer`: `tier` answers alone. `cascade`: the first tier answers, its answer is judged, and if it will not do,
    those `between` take over in turn and are judged too, at last `tier`. `escalate`: the first tier only reads, `tier`
    answers. `forced` tells that no score is involved, `rule` which rule chose the policy, where one did.
    """

    route: Route
    tier: str
    policy: str
    reason: str
    forced: bool
    rule: str | None = None
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a policy makes of an answer. `confidence` is None where there was nothing to judge by. With `leap`, tiers
    between are passed over."""

    accept: bool
    reason: str
    confidence: float | None = None
    leap: bool = False


@dataclass(frozen=True)
class Selected:
    """The policy that a request gets, and the rule by which, where there was one."""

    policy: Policy
    rule: str | None = None

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        decision = self.policy.decide(tiers, asked)
        return decision if self.rule is None else replace(decision, rule=self.rule)


class Policy(BaseModel):
    """Open method: `decide`. A policy that cascades also gives `judge` and says what that needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        """The route over the allowed `tiers`, ordered small to large; never empty."""
        raise NotImplementedError

    def select(self, asked: Asked) -> Selected:
        """Who decides on this request, and judges its answer: itself, unless it is made of others."""
        return Selected(self)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Those that `decide` wants to know of whether they are used up."""
        return ()

    @property
    def num_judged_tokens(self) -> int:
        """How many of the answer's first tokens `judge` wants to see; a shorter answer is judged whole."""
        return 0

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens `judge` wants to know at each place."""
        return 0

    @property
    def follow_up(self) -> str | None:
        """What the small model is asked once its answer is whole; `judge` then sees the tokens of that reply."""
        return None

    def judge(self, tokens: Sequence[Token]) -> Verdict:
        """Judges by the first tokens of the answer, or of the reply to `follow_up`."""
        raise NotImplementedError

    def foresee(self, tokens: Sequence[Token]) -> Foresight:
        """Whether an answer that begins with these tokens will be rejected: `certain` means whatever follows, `likely`
        that a handoff may begin on the guess."""
        return "open"

    def check(self, tiers: Sequence[str]) -> None:
        """Raises `ValueError` where the settings do not fit the configured tiers."""


class Cascading(Policy):
    """The first tier answers, and the next ones take over in turn where that will not do, but for those to `skip`.

    `streaming` says what a client that streams gets to see: `decide_first` judges the first tokens, then lets the
    answer flow; `buffer` judges the whole answer before any of it is told; `stream_small` never escalates a stream.
    """

    streaming: Streaming = "decide_first"
    skip: tuple[str, ...] = ()

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        if len(tiers) == 1:
            return Decision("answer", tiers[0], self.name, "single_tier", forced=False)
        if asked.is_streamed and self.streaming == "stream_small":
            return Decision("answer", tiers[0], self.name, "stream_small", forced=False)
        between = tuple(tier for tier in tiers[1:-1] if tier not in self.skip)
        return Decision("cascade", tiers[-1], self.name, "judge", forced=False, between=between)

    def check(self, tiers: Sequence[str]) -> None:
        for tier in self.skip:
            if tier not in tiers[1:-1]:
                known = ", ".join(tiers[1:-1]) or "none"
                raise ValueError(f"policy.skip: {tier!r} is no tier between the first and the last; known: {known}")
