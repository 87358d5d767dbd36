"""docker-compose.yml: valid, contained, and such that two workers can read each other's memory."""

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
OWN = [name for name in SERVICES if name not in ("prometheus",)]  # run as the secrets' owner


@pytest.fixture
def service(composed: Composed, request: pytest.FixtureRequest) -> Service:
    return composed.services[request.param]


def test_it_fits_the_schema_of_compose_files() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_without_its_secrets_it_says_what_to_do() -> None:
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
def test_who_reads_a_secret_is_its_owner(service: Service, project: Path) -> None:
    """A secret is mounted with the owner and mode that its file has, and one that others can read is refused."""
    owner = (project / ".kvrelay" / "deploy" / "cluster-secret").stat()
    assert service.content["user"] == f"{owner.st_uid}:{owner.st_gid}"


@pytest.mark.parametrize("service", [name for name in SERVICES if name not in ("memory", "models", "models-gpu")],
                         indirect=True)  # fmt: skip
def test_every_server_has_a_health_check(service: Service) -> None:
    kind, *command = service.health_test
    assert kind in ("CMD", "CMD-SHELL") and command


@pytest.mark.parametrize("service", WORKERS, indirect=True)
def test_workers_share_the_memory_of_a_third(service: Service, composed: Composed) -> None:
    memory = composed.services["memory"]
    assert service.content["ipc"] == "service:memory"
    assert memory.content["ipc"] == "shareable"
    assert memory.content["user"] == service.content["user"], "a pool's file is its owner's alone"
    assert memory.depends_on == {}, "it outlives the workers"
    on_gpu = service.profiles == ["gpu"]
    assert service.content.get("pid") == ("service:memory" if on_gpu else None)
    if on_gpu:
        (device,) = service.content["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_the_pools_fit_into_the_shared_memory(composed: Composed) -> None:
    pools = [read_settings(CONFIG / "kvrelay.yaml", name).pool_bytes for name in ("small-0", "large-0")]
    size = num_bytes(composed.services["memory"].content["shm_size"])
    assert sum(pools) + 2 * 2**20 < size


def test_only_the_gateway_and_the_dashboards_can_be_reached(composed: Composed) -> None:
    assert composed.content["networks"]["inside"] == {"internal": True}
    outside = {name for name, one in composed.services.items() if "edge" in one.content["networks"]}
    assert outside == {"gateway", "prometheus", "grafana", "models", "models-gpu"}


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_commands_and_configuration_fit_together(profile: str, composed: Composed) -> None:
    """Each worker of the configuration runs once, under the name and port that the gateway calls."""
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


def test_the_gateway_reads_the_same_of_both_configurations() -> None:
    cpu, gpu = (settings.load(CONFIG / name) for name in ("kvrelay.yaml", "gpu.yaml"))
    assert (cpu.tiers, cpu.server, cpu.policy, cpu.registry) == (gpu.tiers, gpu.server, gpu.policy, gpu.registry)
    assert {name: (one.tier, one.url) for name, one in cpu.workers.items()} == {
        name: (one.tier, one.url) for name, one in gpu.workers.items()
    }


@pytest.fixture
def check_key(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Sees that the gateway of a folder's .env takes the key in that folder."""

    def check(folder: Path) -> None:
        tenants = load(read_env(folder / ".env")).services["gateway"].environment["KVRELAY_TENANTS"]
        monkeypatch.setenv("KVRELAY_TENANTS", tenants)
        loaded = settings.load(CONFIG / "kvrelay.yaml")
        loaded.check_bind()
        key = (folder / ".kvrelay" / "deploy" / "api-key").read_text()
        assert loaded.tenants["default"].api_keys == (hashlib.sha256(key.encode()).hexdigest(),)

    return check


def test_the_gateway_knows_the_key_that_was_made(check_key: Callable[[Path], None], project: Path) -> None:
    check_key(project)


def test_it_knows_a_key_that_was_made_anew(check_key: Callable[[Path], None], tmp_path: Path) -> None:
    init(tmp_path)
    key = tmp_path / ".kvrelay" / "deploy" / "api-key"
    before = key.read_text()
    key.unlink()
    init(tmp_path)
    assert key.read_text() != before
    check_key(tmp_path)


def test_what_the_user_has_set_is_kept_and_what_is_missing_is_added(
    check_key: Callable[[Path], None], tmp_path: Path
) -> None:
    env = tmp_path / ".env"
    env.write_text("# mine\nKVRELAY_FAMILY=tiny\nKVRELAY_UID=\nTORCH_INDEX=\nANOTHER=a=b")  # and no end of the line
    init(tmp_path)
    check_key(tmp_path)
    lines = env.read_text().splitlines()
    assert lines[:4] == ["# mine", "KVRELAY_FAMILY=tiny", "TORCH_INDEX=", "ANOTHER=a=b"]
    names = ["KVRELAY_UID", "KVRELAY_GID", "TORCH_INDEX_CUDA", "KVRELAY_API_KEY_SHA256"]
    assert [line.partition("=")[0] for line in lines[4:]] == names
    init(tmp_path)
    assert env.read_text().splitlines() == lines


def test_secrets_are_files_of_their_owner_and_are_kept(project: Path) -> None:
    files = sorted((project / ".kvrelay" / "deploy").iterdir())
    before = {file.name: file.read_text() for file in files}
    assert {"cluster-secret", "redis-password", "redis-users", "grafana-password", "api-key"} == set(before)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert before["redis-password"] not in before["redis-users"]
    init(project)
    assert {file.name: file.read_text() for file in files} == before


def test_what_is_mounted_is_there(composed: Composed, project: Path) -> None:
    volumes = composed.content["volumes"]
    for service in composed.services.values():
        for source, _ in service.mounts:
            assert source in volumes or (REPOSITORY / source).is_dir(), f"{service.name} mounts {source}"
    for secret in composed.content["secrets"].values():
        assert (project / secret["file"]).is_file()
