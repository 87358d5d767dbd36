"""The PromQL expressions of the dashboards and the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from deploy.composed import REPOSITORY

DASHBOARDS = sorted((REPOSITORY / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = REPOSITORY / "deploy" / "prometheus" / "rules.yml"

_STRING = re.compile(r'"[^"]*"')
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_IN_GRAFANA = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}


@dataclass(frozen=True)
class Query:
    """One expression. `where` names its panel or rule."""

    where: str
    expression: str

    @property
    def metrics(self) -> set[str]:
        """The metrics in it: exported ones, `up`, and recorded ones, whose names have colons."""
        names = set(_METRIC.findall(_STRING.sub("", self.expression)))
        return {name for name in names if name.startswith("kvrelay_") or ":" in name or name == "up"}

    @property
    def in_prometheus(self) -> str:
        """The expression as Grafana sends it, with every variable set to all."""
        filled = self.expression
        for name, value in _IN_GRAFANA.items():
            filled = filled.replace(name, value)
        return re.sub(r"\$\w+", ".*", filled)


def of_dashboards() -> Iterator[Query]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                yield Query(f"{path.stem}: {panel['title']}", target["expr"])


def of_rules(kind: str) -> Iterator[Query]:
    """`kind` is `record` or `alert`."""
    for rule in _rules():
        if kind in rule:
            yield Query(f"{kind} {rule[kind]}", rule["expr"])


def recorded() -> set[str]:
    return {rule["record"] for rule in _rules() if "record" in rule}


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]
