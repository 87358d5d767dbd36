"""Policies by name, one file each."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gateway.policies.always_escalate import AlwaysEscalate
from gateway.policies.base import Asked, Decision, Policy, Route, Selected, Token, Verdict
from gateway.policies.confidence import Confidence
from gateway.policies.fixed import Fixed
from gateway.policies.rules import Rules
from gateway.policies.verifier import Verifier
from gateway.shown import shown

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fixed, Confidence, Verifier, Rules, AlwaysEscalate)
}

__all__ = ["POLICIES", "Asked", "Decision", "Policy", "Route", "Selected", "Token", "Verdict", "build"]


def build(settings: dict[str, Any]) -> Policy:
    """The policy that `{name, ...}` describes. Raises `ValueError` for an unknown name, key or value."""
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
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        inner = message.removeprefix("policy")  # of a policy within this one, which names its own key
        told = f"policy.{where}{inner}" if inner != message else f"policy.{where}: {message}"
        raise ValueError(f"{told}, got {shown(first['input'])}") from error
