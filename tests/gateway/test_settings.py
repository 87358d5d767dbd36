"""The configuration file is validated as a whole; errors name the key and what is allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from gateway.policies import POLICIES
from gateway.settings import BreakerSettings, Deadlines, HandoffSettings, from_values, load
from tests.gateway.stack import values
from workers.api.config import DiscoverySettings, SettingsError

WORKER = {"tier": "small", "url": "http://127.0.0.1:8001"}


def written(folder: Path, content: Any) -> Path:
    path = folder / "kvrelay.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_smallest_file_has_defaults(tmp_path: Path) -> None:
    settings = load(written(tmp_path, {"tiers": [{"name": "small", "model": "m"}], "workers": {"small-0": WORKER}}))
    assert settings.server.host == "127.0.0.1"
    assert settings.registry.url == "memory://"
    assert settings.chosen_policy.name == "confidence"
    assert settings.secret_file == tmp_path / ".kvrelay/secret"
    assert not settings.requires_keys


def test_worker_keys_are_ignored(tmp_path: Path) -> None:
    worker = WORKER | {"model": "models/smol-small", "engine": "transformers", "pool_bytes": "512MiB"}
    settings = from_values(values(tiers=[{"name": "small", "model": "m"}], workers={"small-0": worker}))
    assert settings.workers["small-0"].url == WORKER["url"]


def test_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRELAY_REGISTRY__URL", "redis://cache:6379/0")
    monkeypatch.setenv("KVRELAY_SECRET_FILE", "/run/secrets/kvrelay")
    settings = load(written(tmp_path, values()))
    assert settings.registry.url == "redis://cache:6379/0"
    assert str(settings.secret_file) == "/run/secrets/kvrelay"


def test_invalid_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_LIMITS", "{not json")
    with pytest.raises(SettingsError, match="limits.*must hold JSON"):
        from_values(values())


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_configured(name: str) -> None:
    assert from_values(values(policy={"name": name})).chosen_policy.name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tier": []}, "tier: unknown key; known: tiers, workers, server, registry, policy, tenants, limits"),
        ({"tiers": []}, "tiers: at least one tier is required"),
        ({"tiers": [{"name": "small", "model": "grün"}]}, "tiers.0.model: .*pattern .*, got 'grün'"),
        ({"tiers": [{"name": "small"}]}, "tiers.0.model: this key is required"),
        ({"tiers": [{"name": "small", "model": "m", "size": 1}]}, "tiers.0.size: unknown key; known: name, model"),
        (
            {"tiers": [{"name": "small", "model": "m"}, {"name": "small", "model": "n"}]},
            "tiers: 'small' is a duplicate or reserved",
        ),
        ({"tiers": [{"name": "auto", "model": "m"}]}, "tiers: 'auto' is a duplicate or reserved"),
        ({"workers": {"a": WORKER}}, "tier 'large' has no worker"),
        ({"workers": {"a": WORKER | {"tier": "huge"}}}, "workers.a.tier: unknown tier 'huge'; known: small, large"),
        ({"workers": {"a": WORKER | {"url": "127.0.0.1:8001"}}}, "workers.a.url: must be an http:// or https:// URL"),
        ({"workers": {"a": WORKER | {"url": "http://a:99999"}}}, "workers.a.url: .*invalid port number, got .*:9999"),
        ({"workers": {"a": WORKER | {"url": "http://a:0"}}}, "workers.a.url: the port must be .*65535, got .*:0"),
        ({"workers": {"a": WORKER | {"url": "http://a:b"}}}, "workers.a.url: .*invalid port number, got .*:b"),
        ({"workers": {"a": WORKER | {"url": "http://[::1"}}}, "workers.a.url: .*invalid IPv6 address, got"),
        ({"workers": {"a": WORKER | {"url": "http://"}}}, "workers.a.url: must be an http:// or https:// URL, got"),
        ({"workers": {"a b": WORKER}}, "workers.a b"),
        ({"tracing": {"endpoint": "http://a:99999"}}, "tracing.endpoint: .*invalid port number, got .*:99999"),
        ({"tracing": {"endpoint": "a:4318"}}, "tracing.endpoint: must be an http:// or https:// URL, got 'a:4318'"),
        ({"registry": {"url": "etcd://x"}}, "registry.url: .*memory://, redis://, rediss://, .*, got 'etcd://x'"),
        (
            {"registry": {"url": "redis://:p@h:99999/0"}},
            "registry.url: .*invalid port number, got 'redis://[*]{3}@h:99999",
        ),
        ({"registry": {"url": "redis+sentinel://a,b:99999/m"}}, "registry.url: .*invalid port number, got .*:99999"),
        ({"registry": {"url": "redis+sentinel://a,[::1/m"}}, "registry.url: .*invalid IPv6 address, got "),
        ({"registry": {"timeout_ms": 5000}}, "registry.timeout_ms: .* less than or equal to 100, got 5000"),
        ({"registry": {"uri": "x"}}, "registry.uri: unknown key; known: url, password_file, max_entries"),
        ({"registry": {"password_file": "p"}}, "registry.password_file: .* holds no password itself"),
        (
            {"registry": {"url": "redis://:hidden@h/0", "password_file": "p"}},
            "registry.password_file: [^@]* holds no password itself, got 'p'$",
        ),
        (
            {"discovery": {"url": "redis://:hidden@h/0", "password_file": "p"}},
            "discovery.password_file: [^@]* holds no password itself, got 'p'$",
        ),
        ({"policy": {"name": "best"}}, "policy.name: unknown policy 'best'; known: fixed, confidence"),
        ({"policy": {"name": "fixed", "tier": "huge"}}, "policy.tier: unknown tier 'huge'; known: small, large"),
        ({"policy": {"name": "confidence", "threshold": 1}}, "policy.threshold: .*less than or equal to 0, got 1"),
        ({"tenants": {"acme": {}}}, "tenants: 'default' is missing; known: acme"),
        (
            {"tenants": {"default": {"api_keys": ["my-key"]}}},
            "tenants.default.api_keys.0: must be the SHA-256 of a key, .* never the key itself$",
        ),
        ({"tenants": {"default": {"keys": []}}}, "tenants.default.keys: unknown key; known: api_keys"),
        ({"tenants": {"default": {"api_keys": ["a" * 64]}, "b": {"api_keys": ["a" * 64]}}}, "API key: .* a duplicate"),
        (
            {"tenants": {"default": {}, "b": {"models": ["huge"]}}},
            "tenants.b.models: unknown model 'huge'; known: fake-large, fake-small, large, small",
        ),
        ({"tenants": {"default": {"requests_per_minute": 0}}}, "requests_per_minute: .* greater than or equal to 1"),
        ({"deadlines": {"request_s": 0}}, "deadlines.request_s: .* greater than 0, got 0"),
        ({"limits": {"max_body": 1}}, "limits.max_body: unknown key; known: max_body_bytes"),
        ({"breaker": {"failure_rate": 2}}, "breaker.failure_rate: .* less than or equal to 1, got 2"),
        ({"handoff": {"native_tail": 0}}, "handoff.native_tail: .* greater than or equal to 1, got 0"),
        ({"server": {"port": 70000}}, "server.port: .* less than or equal to 65535, got 70000"),
    ],
)
def test_error_names_the_setting_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        from_values(values(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tenants": {"default": {"api_keys": ["hidden"]}}},
        {"tenants": {"default": {"api_keys": "hidden"}}},
        {"tenants": {"default": ["hidden"]}},
        {"registry": {"url": "etcd://user:p@ss/hidden@h"}},
        {"registry": {"url": "redis+sentinel://user:hidden@h"}},
        {"registry": {"url": "redis://user:hidden/word@h:99999"}},
        {"registry": {"url": "redis+sentinel://user:p/hidden/word@h:99999"}},
        {"registry": "redis://user:hidden@h"},
        {"registry": "redis://user:hidden" + "n" * 1000 + "@h"},
        {"discovery": {"url": "redis+cluster://user:hidden@h"}},
    ],
)
def test_error_never_holds_a_key_or_password(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"^{next(iter(changes))}") as refused:
        from_values(values(**changes))
    assert "hidden" not in refused.value.message


TIMED: dict[str, type[BaseModel]] = {
    "deadlines": Deadlines,
    "breaker": BreakerSettings,
    "handoff": HandoffSettings,
    "discovery": DiscoverySettings,
}
DURATIONS = [(section, name) for section, kind in TIMED.items() for name in kind.model_fields if name.endswith("_s")]


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize(("section", "name"), DURATIONS)
def test_durations_must_be_finite_and_positive(section: str, name: str, value: float) -> None:
    fields = {name: value} | ({"url": "redis://h"} if section == "discovery" else {})
    with pytest.raises(SettingsError, match=f"^{section}.{name}: .*(finite|greater|less) .*, got {value}$"):
        from_values(values(**{section: fields}))


CONTAINS_ITSELF = """
tiers: [{name: small, model: some}]
workers: {small-0: {tier: small, url: "http://127.0.0.1:8101"}}
policy: &again {name: rules, otherwise: *again}
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tiers: [", "not valid YAML in line 1"),
        ("tiers: " + "[" * 3000, "not valid YAML: it is nested too deep"),
        ("tiers: !!int x", "not valid YAML: invalid literal"),
        ("tiers: !!bool x", "not valid YAML: 'x'"),
        ("tiers: 2020-99-99", "not valid YAML: month"),
        ("limits: {max_messages: 5}\nregistry: {}\nlimits: {}\n", "not valid YAML in line 3: duplicate key 'limits'"),
        ("tenants: {a: {}, b: {}, a: {}}", "not valid YAML in line 1: duplicate key 'a'"),
        (CONTAINS_ITSELF, "contains itself"),
        ("- a\n- b\n", "must be a mapping with the keys tiers"),
        ("", "must be a mapping"),
    ],
)
def test_invalid_file_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(written(tmp_path, content))


MERGED = """
tiers: [{name: small, model: some}]
workers:
  small-0: &common {tier: small, url: "http://127.0.0.1:8101"}
  small-1: {<<: *common, url: "http://127.0.0.1:8102"}
"""


def test_merge_key_is_not_a_duplicate(tmp_path: Path) -> None:
    workers = load(written(tmp_path, MERGED)).workers
    assert [worker.url[-4:] for worker in workers.values()] == ["8101", "8102"]


@pytest.mark.parametrize(("section", "ends"), [("bundles: [", "]"), ("policy: {name: fixed, tier: [", "]}")])
def test_huge_value_is_shortened_in_the_error(tmp_path: Path, section: str, ends: str) -> None:
    doubled = ", ".join(f"&a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, 60))
    rest = yaml.safe_dump({name: value for name, value in values().items() if name not in section})
    with pytest.raises(SettingsError) as refused:
        load(written(tmp_path, f"{rest}{section}&a0 [x, x], {doubled}{ends}"))
    assert len(refused.value.message) < 20_000


def test_yaml_error_never_holds_a_line_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not valid YAML in line 1") as refused:
        load(written(tmp_path, "registry: {url: redis://:hidden@h, : ]"))
    assert "hidden" not in refused.value.message


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the configuration .*nowhere.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_settings_are_immutable() -> None:
    settings = from_values(values())
    with pytest.raises(ValueError, match="frozen"):
        settings.deadlines.request_s = 1.0
