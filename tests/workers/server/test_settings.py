"""The `workers:` section of kvrelay.yaml."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.api.config import SettingsError
from workers.settings import WorkerSettings, read_secret, read_settings

SMALL = {"id": "small-0", "model": "models/small", "url": "http://127.0.0.1:8101"}
LARGE = {"id": "large-0", "model": "org/large", "tier": "large", "pool_bytes": "1GiB", "bundles": ["bundles/b"]}


def write_config(folder: Path, *workers: dict[str, Any], **more: Any) -> Path:
    path = folder / "kvrelay.yaml"
    by_id = {worker["id"]: {key: value for key, value in worker.items() if key != "id"} for worker in workers}
    path.write_text(yaml.safe_dump({"workers": by_id, "tiers": {"small": {}}, **more}))
    return path


def test_settings_of_one_worker_are_selected(tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    path = write_config(tmp_path, SMALL, LARGE)
    small, large = read_settings(path, "small-0"), read_settings(path, "large-0")
    assert (small.host, small.port, small.model) == ("127.0.0.1", 8101, str(tmp_path / "models" / "small"))
    assert (small.model_name, large.model_name) == ("small", "org/large")
    assert large.pool_bytes == 2**30 and large.tier == "large"
    assert (small.peers, large.peers) == ({}, {"small-0": "http://127.0.0.1:8101"})


def test_peers_can_be_set_at_startup(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"id": "small-0", "model": "m"}, LARGE)
    assert read_settings(path, "large-0").peers == {}
    peers = {"small-0": "http://127.0.0.1:9"}
    assert read_settings(path, "large-0", peers=peers).peers == peers


def test_top_level_bundles_apply_to_workers_without_their_own(tmp_path: Path) -> None:
    (tmp_path / "bundles" / "b").mkdir(parents=True)
    path = write_config(tmp_path, SMALL, LARGE, bundles=["shared"])
    assert read_settings(path, "small-0").bundles == ["shared"]
    assert read_settings(path, "large-0").bundles == [str(tmp_path / "bundles" / "b")]


def test_discovery_password_file_is_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("0123456789abcdef\n")
    (tmp_path / "password").chmod(0o600)
    path = write_config(tmp_path, SMALL, discovery={"url": "redis://me@h/0", "password_file": "password"})
    assert read_settings(path, "small-0").board_url == "redis://me:0123456789abcdef@h/0"
    assert read_settings(write_config(tmp_path, SMALL), "small-0").board_url is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_bites": 5}, "workers.small-0.pool_bites: Extra inputs"),
        ({"device": "tpu"}, "workers.small-0.device.*'tpu'"),
        ({"dtype": "int8"}, "workers.small-0.dtype.*'float32'.*'int8'"),
        ({"engine": "other"}, "workers.small-0.engine.*known: transformers, vllm.*'other'"),
        ({"engine_options": {"seed": 1}}, "workers.small-0.*engine transformers has none"),
        ({"url": "127.0.0.1:80"}, "workers.small-0.url.*http://"),
        ({"url": "http://127.0.0.1:99999"}, "workers.small-0.url.*invalid port number.*99999"),
        ({"peers": {"x": "ftp://y"}}, "workers.small-0.peers.*ftp://y"),
        ({"peers": {"x": "http://y:99999"}}, "workers.small-0.peers.x.*invalid port number.*99999"),
        ({"max_queue": -1}, "workers.small-0.max_queue.*-1"),
        ({"tcp": {"host": "0.0.0.0"}}, "workers.small-0.tcp.*'0.0.0.0' means every address .*; set address"),
        ({"tcp": {"prot": 1}}, "workers.small-0.tcp.prot: Extra inputs"),
        ({"host_tier_bytes": -1}, "workers.small-0.host_tier_bytes.*-1"),
        ({"pool_bytes": "much"}, "workers.small-0.pool_bytes.*'much'"),
    ],
)
def test_invalid_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings(write_config(tmp_path, SMALL | changes), "small-0")


@pytest.mark.parametrize("name", [name for name in WorkerSettings.model_fields if name.endswith("_s")])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_every_duration_must_be_finite(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"workers.small-0.{name}: .*finite.*, got {value}"):
        read_settings(write_config(tmp_path, SMALL | {name: value}), "small-0")


@pytest.mark.parametrize(
    "content",
    ["tenants: {default: {api_keys: [hidden]}}", 'discovery: {url: "redi://user:hidden@h"}\nworkers: {a: {model: b}}'],
)
def test_secrets_are_not_in_error_messages(tmp_path: Path, content: str) -> None:
    (tmp_path / "kvrelay.yaml").write_text(content)
    with pytest.raises(SettingsError) as error:
        read_settings(tmp_path / "kvrelay.yaml", "a")
    assert "hidden" not in str(error.value)


def test_unknown_workers_and_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown worker 'big'; .* has: large-0, small-0"):
        read_settings(write_config(tmp_path, SMALL, LARGE), "big")
    with pytest.raises(SettingsError, match="workers"):
        read_settings(write_config(tmp_path), "small-0")
    with pytest.raises(SettingsError, match=r"workers.*\.\./x"):
        read_settings(write_config(tmp_path, SMALL | {"id": "../x"}), "small-0")
    (tmp_path / "kvrelay.yaml").write_text("workers: [")
    with pytest.raises(SettingsError, match="kvrelay.yaml is not valid YAML in line 1"):
        read_settings(tmp_path / "kvrelay.yaml", "small-0")
    with pytest.raises(SettingsError, match="nowhere.yaml"):
        read_settings(tmp_path / "nowhere.yaml", "small-0")


def test_secret_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    assert read_secret({"KVRELAY_SECRET_FILE": str(path)}) == "0123456789abcdef"
    path.write_text("short")
    for environ, message in [
        ({}, "set KVRELAY_SECRET_FILE"),
        ({"KVRELAY_SECRET_FILE": str(path)}, "5 characters"),
        ({"KVRELAY_SECRET_FILE": str(tmp_path / "none")}, "none"),
    ]:
        with pytest.raises(SettingsError, match=message):
            read_secret(environ)


def test_secret_file_readable_by_others_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="KVRELAY_SECRET_FILE: .*mode 0644; it must be 0600") as error:
        read_secret({"KVRELAY_SECRET_FILE": str(path)})
    assert "0123456789abcdef" not in str(error.value)
