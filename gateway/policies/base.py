"""What a policy decides: the route before any model runs, and whether the small model's answer will do.

A policy is its own settings: a frozen model whose fields stand under `policy:` in the configuration. It knows no
worker and no network. To add one: a file with a subclass, and its line in `policies/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Route = Literal["answer", "cascade", "escalate"]


@dataclass(frozen=True)
class Decision:
    """How a request is routed, decided before any model runs.

    `answer`: `tier` answers alone. `cascade`: the first tier answers, its answer is judged, and `tier` takes over if
    it will not do. `escalate`: the first tier only reads, `tier` answers. `forced` tells that no score is involved.
    """

    route: Route
    tier: str
    policy: str
    reason: str
    forced: bool


@dataclass(frozen=True)
class Verdict:
    """What a policy makes of an answer. `confidence` is None where there was nothing to judge by."""

    accept: bool
    reason: str
    confidence: float | None = None


class Policy(BaseModel):
    """Open method: `decide`. A policy that cascades also gives `judge` and how many tokens that needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]

    def decide(self, tiers: Sequence[str]) -> Decision:
        """The route over the allowed `tiers`, ordered small to large; never empty."""
        raise NotImplementedError

    @property
    def num_judged_tokens(self) -> int:
        """How many of the answer's first tokens `judge` wants to see; a shorter answer is judged whole."""
        return 0

    def judge(self, logprobs: Sequence[float]) -> Verdict:
        """Judges by the log-probabilities (natural log) of the answer's first tokens."""
        raise NotImplementedError

    def check(self, tiers: Sequence[str]) -> None:
        """Raises `ValueError` where the settings do not fit the configured tiers."""
