"""Policies by name, one file each."""

from __future__ import annotations

from gateway.policies.base import (
    POLICIES,
    Policy,
    PolicyChoice,
    RequestFeatures,
    RoutingDecision,
    TokenLogprob,
    Verdict,
    build,
)
from gateway.policies.confidence import Confidence
from gateway.policies.fixed import AlwaysEscalate, FixedTier
from gateway.policies.rules import Rules
from gateway.policies.verifier import Verifier

POLICIES |= {policy.name: policy for policy in (FixedTier, Confidence, Verifier, Rules, AlwaysEscalate)}

__all__ = [
    "POLICIES",
    "Policy",
    "PolicyChoice",
    "RequestFeatures",
    "RoutingDecision",
    "TokenLogprob",
    "Verdict",
    "build",
]
