"""`rules`: choose the policy for a request by what is known before any model runs. The first matching rule wins.

policy:
  name: rules
  rules:
    - {name: code, when: {regex: "```|Traceback"}, then: {name: fixed, tier: large}}
    - {name: free, when: {tenant_tier: [free]}, then: {name: fixed, tier: small}}
    - {name: spent, when: {budget: {tier: large, tokens: 500000}}, then: {name: fixed, tier: small}}
  otherwise: {name: confidence, threshold: -0.5}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from gateway.policies import language
from gateway.policies.base import Budget, Policy, PolicyChoice, RequestFeatures, RoutingDecision, build
from gateway.policies.confidence import Confidence

SEARCHED_CHARS = 20_000  # of the last user message; bounds the time of a slow expression

NestedPolicy = Annotated[Policy, BeforeValidator(lambda value: build(value) if isinstance(value, dict) else value)]


class Condition(BaseModel):
    """Matches if every given condition matches.

    `keywords` (whole words, case-insensitive), `regex` and `language` (ISO 639-1) test the last user message, the
    character counts all messages together. `budget` matches once it is used up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_chars: int | None = Field(default=None, ge=0)
    max_chars: int | None = Field(default=None, ge=0)
    keywords: tuple[str, ...] = ()
    regex: str | None = None
    tools: bool | None = None
    language: tuple[str, ...] = ()
    tenant_tier: tuple[str, ...] = ()
    budget: Budget | None = None

    @field_validator("regex")
    @classmethod
    def _compiles(cls, regex: str | None) -> str | None:
        try:
            re.compile(regex or "")
        except re.error as error:
            raise ValueError(f"not a valid regular expression: {error}") from error
        return regex

    @field_validator("language")
    @classmethod
    def _known_languages(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [code for code in languages if code not in language.LANGUAGES]
        if unknown:
            raise ValueError(f"unknown language {unknown[0]!r}; known: {', '.join(language.LANGUAGES)}")
        if languages:
            language.load()
        return languages

    def matches(self, request: RequestFeatures) -> bool:
        text = request.text[:SEARCHED_CHARS]
        return (
            (self.min_chars is None or request.num_chars >= self.min_chars)
            and (self.max_chars is None or request.num_chars <= self.max_chars)
            and (self.tools is None or request.has_tools is self.tools)
            and (not self.tenant_tier or request.tenant_tier in self.tenant_tier)
            and (self.budget is None or self.budget in request.overspent)
            and (not self.keywords or any(_has_word(text, word) for word in self.keywords))
            and (self.regex is None or re.search(self.regex, text) is not None)
            and (not self.language or language.language_of(text) in self.language)
        )


class Rule(BaseModel):
    """`name` appears in metrics and replies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    when: Condition
    then: NestedPolicy


class Rules(Policy):
    name: ClassVar[str] = "rules"
    rules: tuple[Rule, ...] = ()
    otherwise: NestedPolicy = Confidence()

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        return self.select(request).decide(tiers, request)

    def select(self, request: RequestFeatures) -> PolicyChoice:
        """Report the innermost rule if rules are nested."""
        rule = self._first(request)
        if rule is None:
            return self.otherwise.select(request)
        inner = rule.then.select(request)
        return PolicyChoice(inner.policy, inner.rule or rule.name)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        own = [rule.when.budget for rule in self.rules if rule.when.budget is not None]
        return tuple(dict.fromkeys([*own, *(budget for policy in self._policies for budget in policy.budgets)]))

    def check(self, tiers: Sequence[str]) -> None:
        for budget in self.budgets:
            if budget.tier not in tiers:
                raise ValueError(f"policy.rules: budget of unknown tier {budget.tier!r}; known: {', '.join(tiers)}")
        for policy in self._policies:
            policy.check(tiers)

    @property
    def _policies(self) -> list[Policy]:
        return [*(rule.then for rule in self.rules), self.otherwise]

    def _first(self, request: RequestFeatures) -> Rule | None:
        return next((rule for rule in self.rules if rule.when.matches(request)), None)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None
