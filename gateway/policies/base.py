"""What a policy decides: the route before any model runs, and whether the small model's answer is good enough.

A policy is its own settings: a frozen model whose fields are the keys under `policy:` in the configuration. It knows no
worker and no network. To add one, write a file with a subclass and add it to `POLICIES` in `policies/__init__.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.shown import shown

RouteKind = Literal["answer", "cascade", "escalate"]
Streaming = Literal["decide_first", "buffer", "stream_small"]
Forecast = Literal["open", "likely", "certain"]

WHOLE_ANSWER = sys.maxsize  # as a number of judged tokens

POLICIES: dict[str, type[Policy]] = {}  # by name; filled by `policies/__init__.py`


def build(settings: dict[str, Any]) -> Policy:
    """Build the policy of `{name, ...}`. Raises `ValueError` for an unknown name, key or value."""
    name = settings.get("name")
    policy = POLICIES.get(name) if isinstance(name, str) else None
    if policy is None:
        raise ValueError(f"policy.name: unknown policy {shown(name)}; known: {', '.join(POLICIES)}")
    values = {key: value for key, value in settings.items() if key != "name"}
    unknown = sorted(map(str, values.keys() - policy.model_fields.keys()))
    if unknown:
        known = ", ".join(["name", *policy.model_fields])
        raise ValueError(f"policy.{unknown[0]}: unknown key of policy {name}; known: {known}")
    try:
        return policy(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if message.startswith("policy"):  # of a nested policy, whose message names its own key
            problem = f"policy.{key}{message.removeprefix('policy')}"
        else:
            problem = f"policy.{key}: {message}"
        raise ValueError(f"{problem}, got {shown(first['input'])}") from error


class Budget(BaseModel):
    """Up to `tokens` tokens per window in answers of `tier`, prefilled and generated.

    A window is a minute, hour or day of the clock (UTC). It counts for the request's tenant, or for everyone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: str
    tokens: int = Field(ge=1)
    per: Literal["minute", "hour", "day"] = "day"
    of: Literal["tenant", "everyone"] = "tenant"


@dataclass(frozen=True)
class RequestFeatures:
    """What a policy knows of a request before any model runs.

    `text` is the last user message; `num_chars` counts all messages, as tokens are not known yet. `overspent` holds
    those of the policy's budgets that are used up.
    """

    text: str = ""
    num_chars: int = 0
    has_tools: bool = False
    is_streamed: bool = False
    tenant_tier: str | None = None
    overspent: frozenset[Budget] = frozenset()


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer, its log-probability (natural log), and the likeliest tokens at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RoutingDecision:
    """How a request is routed, decided before any model runs.

    answer: `tier` answers alone.
    cascade: the first tier answers and is judged; if rejected, the tiers `between` answer in turn and are judged too;
        `tier` is the last.
    escalate: the first tier only prefills, and `tier` answers.

    `forced` means that no score is involved. `rule` names the rule that chose the policy, if any.
    """

    route: RouteKind
    tier: str
    policy: str
    reason: str
    forced: bool
    rule: str | None = None
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A policy's judgement of an answer. `confidence` is None if there was nothing to judge by. With `leap`, the tiers
    in between are skipped."""

    accept: bool
    reason: str
    confidence: float | None = None
    leap: bool = False


@dataclass(frozen=True)
class PolicyChoice:
    """The policy for a request, and the rule that chose it, if any."""

    policy: Policy
    rule: str | None = None

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        decision = self.policy.decide(tiers, request)
        return decision if self.rule is None else replace(decision, rule=self.rule)


class Policy(BaseModel):
    """Subclasses implement `decide`. One that cascades also implements `judge`, and says which tokens it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        """Choose the route over the allowed `tiers`, ordered small to large; never empty."""
        raise NotImplementedError

    def select(self, request: RequestFeatures) -> PolicyChoice:
        """Choose the policy that decides on this request and judges its answer: itself, unless it combines others."""
        return PolicyChoice(self)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Budgets whose state `decide` needs."""
        return ()

    @property
    def num_judged_tokens(self) -> int:
        """How many of the answer's first tokens `judge` needs; a shorter answer is judged whole."""
        return 0

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens `judge` needs per position."""
        return 0

    @property
    def follow_up(self) -> str | None:
        """A question to the small model after its answer. If set, `judge` gets the tokens of the reply."""
        return None

    def judge(self, tokens: Sequence[TokenLogprob]) -> Verdict:
        """Judge the first tokens of the answer, or the reply to `follow_up`."""
        raise NotImplementedError

    def forecast(self, tokens: Sequence[TokenLogprob]) -> Forecast:
        """Predict the rejection of an answer that begins with these tokens: `certain` whatever follows, or `likely`
        enough to start a handoff early."""
        return "open"

    def check(self, tiers: Sequence[str]) -> None:
        """Raise `ValueError` if the settings do not fit the configured tiers."""


class CascadePolicy(Policy):
    """The first tier answers. If its answer is rejected, the next tiers answer in turn, except those in `skip`.

    `streaming` controls what a streaming client sees: `decide_first` judges the first tokens, then streams the answer;
    `buffer` judges the whole answer before sending any of it; `stream_small` never escalates a stream.
    """

    streaming: Streaming = "decide_first"
    skip: tuple[str, ...] = ()

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        if len(tiers) == 1:
            return RoutingDecision("answer", tiers[0], self.name, "single_tier", forced=False)
        if request.is_streamed and self.streaming == "stream_small":
            return RoutingDecision("answer", tiers[0], self.name, "stream_small", forced=False)
        between = tuple(tier for tier in tiers[1:-1] if tier not in self.skip)
        return RoutingDecision("cascade", tiers[-1], self.name, "judge", forced=False, between=between)

    def check(self, tiers: Sequence[str]) -> None:
        for tier in self.skip:
            if tier not in tiers[1:-1]:
                known = ", ".join(tiers[1:-1]) or "none"
                raise ValueError(f"policy.skip: {tier!r} is not a tier between the first and the last; known: {known}")
