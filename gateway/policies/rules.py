"""`rules`: which policy a request gets, by what is known before any model runs. The first rule that holds decides.

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
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from gateway.policies.base import Asked, Decision, Policy, Selected
from gateway.policies.budget import Budget
from gateway.policies.confidence import Confidence
from gateway.policies.language import LANGUAGES, language_of

SEARCHED_CHARS = 20_000  # of the last user message: a slow expression meets no endless text


def _built(value: Any) -> Any:
    from gateway.policies import build  # which knows this very class

    return build(value) if isinstance(value, dict) else value


Composed = Annotated[Policy, BeforeValidator(_built)]


class Condition(BaseModel):
    """Holds when everything holds that is given. `keywords` (whole words, either case), `regex` and `language` (ISO
    639-1) look at the last user message; the character counts at all messages together. `budget` holds once that is
    used up."""

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
            raise ValueError(f"is no regular expression: {error}") from error
        return regex

    @field_validator("language")
    @classmethod
    def _known_languages(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [language for language in languages if language not in LANGUAGES]
        if unknown:
            raise ValueError(f"unknown language {unknown[0]!r}; known: {', '.join(LANGUAGES)}")
        return languages

    def holds(self, asked: Asked) -> bool:
        text = asked.text[:SEARCHED_CHARS]
        return (
            (self.min_chars is None or asked.num_chars >= self.min_chars)
            and (self.max_chars is None or asked.num_chars <= self.max_chars)
            and (self.tools is None or asked.has_tools is self.tools)
            and (not self.tenant_tier or asked.tenant_tier in self.tenant_tier)
            and (self.budget is None or self.budget in asked.overspent)
            and (not self.keywords or any(_has_word(text, word) for word in self.keywords))
            and (self.regex is None or re.search(self.regex, text) is not None)
            and (not self.language or language_of(text) in self.language)
        )


class Rule(BaseModel):
    """`name` stands in metrics and replies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    when: Condition
    then: Composed


class Rules(Policy):
    name: ClassVar[str] = "rules"
    rules: tuple[Rule, ...] = ()
    otherwise: Composed = Confidence()

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        return self.select(asked).decide(tiers, asked)

    def select(self, asked: Asked) -> Selected:
        """Where rules lie within rules, the innermost one is named."""
        rule = self._first(asked)
        if rule is None:
            return self.otherwise.select(asked)
        inner = rule.then.select(asked)
        return Selected(inner.policy, inner.rule or rule.name)

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

    def _first(self, asked: Asked) -> Rule | None:
        return next((rule for rule in self.rules if rule.when.holds(asked)), None)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None
