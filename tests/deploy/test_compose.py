"""docker-compose.yml: valid, contained, and two workers can read each other's memory."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.composed import COMPOSE_FILE, REPOSITORY, Composed, Service, VariableMissing, load, num_bytes, read_env
from gateway import settings
from tests.deploy.conftest import init
from workers.settings import read_settings

CONFIG = REPOSITORY / "deploy" / "config"
SERVICES = sorted(yaml.safe_load(COMPOSE_FILE.read_text())["services"])
WORKERS = [name for name in SERVICES if name.startswith("worker-")]
OWN = [name for name in SERVICES if name not in ("prometheus",)]  # run as the owner of the secrets


@pytest.fixture
def service(composed: Composed, request: pytest.FixtureRequest) -> Service:
    return composed.services[request.param]


def test_file_matches_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_missing_secrets_name_deploy_init() -> None:
    with pytest.raises(VariableMissing, match="deploy/init"):
        load({})


@pytest.mark.parametrize("service", SERVICES, indirect=True)
def test_every_service_is_contained(service: Service) -> None:
    content = service.content
    assert content["read_only"] is True
    assert content["cap_drop"] == ["ALL"]
    assert content["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in content and content.get("ipc") != "host" and content.get("pid") != "host"
    assert all(port.startswith("127.0.0.1:") for port in content.get("ports", []))
    assert "latest" not in content["image"]


@pytest.mark.parametrize("service", OWN, indirect=True)
def test_services_run_as_the_owner_of_the_secrets(service: Service, project: Path) -> None:
    """A mounted secret keeps the owner and mode of its file."""
    owner = (project / ".kvrelay" / "deploy" / "cluster-secret").stat()
    assert service.content["user"] == f"{owner.st_uid}:{owner.st_gid}"


@pytest.mark.parametrize("service", [name for name in SERVICES if name not in ("memory", "models", "models-gpu")],
                         indirect=True)  # fmt: skip
def test_every_server_has_a_health_check(service: Service) -> None:
    kind, *command = service.health_test
    assert kind in ("CMD", "CMD-SHELL") and command


@pytest.mark.parametrize("service", WORKERS, indirect=True)
def test_workers_share_the_memory_of_a_third_service(service: Service, composed: Composed) -> None:
    memory = composed.services["memory"]
    assert service.content["ipc"] == "service:memory"
    assert memory.content["ipc"] == "shareable"
    assert memory.content["user"] == service.content["user"], "only its owner can read a pool's file"
    assert memory.depends_on == {}, "it outlives the workers"
    on_gpu = service.profiles == ["gpu"]
    assert service.content.get("pid") == ("service:memory" if on_gpu else None)
    if on_gpu:
        (device,) = service.content["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_pools_fit_into_the_shared_memory(composed: Composed) -> None:
    pools = [read_settings(CONFIG / "kvrelay.yaml", name).pool_bytes for name in ("small-0", "large-0")]
    size = num_bytes(composed.services["memory"].content["shm_size"])
    assert sum(pools) + 2 * 2**20 < size


def test_only_gateway_and_dashboards_are_on_the_outer_network(composed: Composed) -> None:
    assert composed.content["networks"]["inside"] == {"internal": True}
    outside = {name for name, one in composed.services.items() if "edge" in one.content["networks"]}
    assert outside == {"gateway", "prometheus", "grafana", "models", "models-gpu"}


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_commands_match_the_configuration(profile: str, composed: Composed) -> None:
    """Each configured worker runs once, with the name and port that the gateway calls."""
    known = settings.load(CONFIG / "kvrelay.yaml").workers
    started = {}
    for service in composed.started_with(profile):
        if service.name.startswith("worker-"):
            options = dict(zip(service.command[3::2], service.command[4::2], strict=True))
            mounted = {target: source for source, target in service.mounts}
            config = REPOSITORY / mounted[str(Path(options["--config"]).parent)] / Path(options["--config"]).name
            worker = read_settings(config, options["--worker"])
            started[worker.id] = worker
            assert f"http://{service.names[-1]}:{worker.port}" == known[worker.id].url
            assert service.health_test[-1] == f"http://127.0.0.1:{worker.port}/readyz"
            assert worker.device.startswith("cuda" if profile == "gpu" else "cpu")
    assert started.keys() == known.keys()


def test_both_configurations_are_the_same_to_the_gateway() -> None:
    cpu, gpu = (settings.load(CONFIG / name) for name in ("kvrelay.yaml", "gpu.yaml"))
    assert (cpu.tiers, cpu.server, cpu.policy, cpu.registry) == (gpu.tiers, gpu.server, gpu.policy, gpu.registry)
    assert {name: (one.tier, one.url) for name, one in cpu.workers.items()} == {
        name: (one.tier, one.url) for name, one in gpu.workers.items()
    }


@pytest.fixture
def check_key(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Check that the gateway of a folder's .env accepts the key in that folder."""

    def check(folder: Path) -> None:
        tenants = load(read_env(folder / ".env")).services["gateway"].environment["KVRELAY_TENANTS"]
        monkeypatch.setenv("KVRELAY_TENANTS", tenants)
        loaded = settings.load(CONFIG / "kvrelay.yaml")
        loaded.check_bind()
        key = (folder / ".kvrelay" / "deploy" / "api-key").read_text()
        assert loaded.tenants["default"].api_keys == (hashlib.sha256(key.encode()).hexdigest(),)

    return check


def test_gateway_accepts_the_created_key(check_key: Callable[[Path], None], project: Path) -> None:
    check_key(project)


def test_gateway_accepts_a_key_created_again(check_key: Callable[[Path], None], tmp_path: Path) -> None:
    init(tmp_path)
    key = tmp_path / ".kvrelay" / "deploy" / "api-key"
    before = key.read_text()
    key.unlink()
    init(tmp_path)
    assert key.read_text() != before
    check_key(tmp_path)


def test_init_keeps_the_users_settings_and_adds_missing_ones(check_key: Callable[[Path], None], tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(
        "# mine\nKVRELAY_FAMILY=tiny\nKVRELAY_UID=\nTORCH_INDEX=\nANOTHER=a=b"
    )  # without a newline at the end
    init(tmp_path)
    check_key(tmp_path)
    lines = env.read_text().splitlines()
    assert lines[:4] == ["# mine", "KVRELAY_FAMILY=tiny", "TORCH_INDEX=", "ANOTHER=a=b"]
    names = ["KVRELAY_UID", "KVRELAY_GID", "TORCH_INDEX_CUDA", "KVRELAY_API_KEY_SHA256"]
    assert [line.partition("=")[0] for line in lines[4:]] == names
    init(tmp_path)
    assert env.read_text().splitlines() == lines


def test_init_keeps_secrets_private_and_unchanged(project: Path) -> None:
    files = sorted((project / ".kvrelay" / "deploy").iterdir())
    before = {file.name: file.read_text() for file in files}
    assert {"cluster-secret", "redis-password", "redis-users", "grafana-password", "api-key"} == set(before)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert before["redis-password"] not in before["redis-users"]
    init(project)
    assert {file.name: file.read_text() for file in files} == before


def test_mounted_paths_exist(composed: Composed, project: Path) -> None:
    volumes = composed.content["volumes"]
    for service in composed.services.values():
        for source, _ in service.mounts:
            assert source in volumes or (REPOSITORY / source).is_dir(), f"{service.name} mounts {source}"
    for secret in composed.content["secrets"].values():
        assert (project / secret["file"]).is_file()
