"""docs/settings.md lists every setting with its default, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from deploy.composed import REPOSITORY
from gateway import settings as gateway
from gateway.policies import POLICIES
from gateway.policies.base import Budget
from gateway.policies.rules import Condition, Rule
from gateway.settings import BreakerSettings
from workers import settings as workers
from workers.api.config import DiscoverySettings
from workers.api.tracing import TracingSettings

ROW = re.compile(r"^\| `(?P<key>\w+)` \| (?P<default>`[^|]*`|[^`|]+) \| (?P<meaning>[^|]+) \|$")
ELSEWHERE = {"id", "tracing", "discovery"}  # of a worker: its key in the file, and sections of their own

SECTIONS: dict[str, type[BaseModel]] = {
    "tiers": gateway.TierSettings,
    "server": gateway.ServerSettings,
    "registry": gateway.RegistrySettings,
    "tenants": gateway.TenantSettings,
    "limits": gateway.Limits,
    "deadlines": gateway.Deadlines,
    "handoff": gateway.HandoffSettings,
    "shadow": gateway.ShadowSettings,
    "breaker": BreakerSettings,
    "discovery": DiscoverySettings,
    "tracing": TracingSettings,
    "admin": gateway.AdminSettings,
    "a rule": Rule,
    "when": Condition,
    "budget": Budget,
    "workers": workers.WorkerSettings,
    "gate": workers.GateSettings,
    "tcp": workers.TcpSettings,
}
SECTIONS |= {name: policy for name, policy in POLICIES.items() if policy.model_fields}


class Row(NamedTuple):
    section: str
    key: str
    default: str
    meaning: str


def rows() -> list[Row]:
    found, section = [], ""
    for line in (REPOSITORY / "docs" / "settings.md").read_text().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif (row := ROW.match(line)) and section != "Settings":
            found.append(Row(section, *row.groups()))
    return found


def fields(section: str) -> Mapping[str, FieldInfo]:
    """Return the settings of a section. At the top: those without a section."""
    if section != "At the top":
        return {key: field for key, field in SECTIONS[section].model_fields.items() if key not in ELSEWHERE}
    own = SECTIONS.keys() - {"tiers", "workers", "tenants"}
    return {key: field for key, field in gateway.Settings.model_fields.items() if key not in own}


BY_SECTION = {section: list(some) for section, some in groupby(rows(), lambda row: row.section)}


def test_every_section_is_documented() -> None:
    assert BY_SECTION.keys() == SECTIONS.keys() | {"At the top"}


@pytest.mark.parametrize("section", BY_SECTION)
def test_every_setting_is_documented(section: str) -> None:
    assert {row.key for row in BY_SECTION[section]} == set(fields(section))


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.section}-{row.key}")
def test_documented_default_is_the_default(row: Row) -> None:
    field = fields(row.section)[row.key]
    if field.is_required():
        assert row.default == "required"
    elif field.default_factory is None:
        kind: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        assert kind.validate_python(yaml.safe_load(row.default.strip("`"))) == field.default
