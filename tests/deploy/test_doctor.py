"""`kvrelay doctor`: its findings, and the advice for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import from_values
from tests.gateway.redis_process import redis_process
from tests.gateway.stack import fakes
from tests.serving import free_socket, serving, url_of
from tools.commands import doctor
from tools.fake_worker import FAKE_SECRET, fingerprint
from tools.stack import free_ports
from workers.api.schemas import BundleInfo, WorkerInfo
from workers.settings import WorkerSettings

BUNDLE = BundleInfo(
    bundle_id="b1",
    source_model="small",
    source_fingerprint=fingerprint("small"),
    target_fingerprint=fingerprint("fake-large"),
    method="ridge",
    usable=True,
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A configuration whose two workers answer, and its secret."""
    (tmp_path / "secret").write_text(FAKE_SECRET)
    (tmp_path / "secret").chmod(0o600)
    small, large = fakes()
    with free_socket() as first, free_socket() as second, serving({first: small, second: large}):
        yield {
            "tiers": [{"name": "small", "model": "fake-small"}, {"name": "large", "model": "fake-large"}],
            "workers": {
                "small-0": {"tier": "small", "url": url_of(first)},
                "large-0": {"tier": "large", "url": url_of(second)},
            },
            "server": {"port": free_ports(1)[0]},
            "secret_file": "secret",
        }


def examined(folder: Path, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the findings by check. Torch is not loaded: `gpus` has its own tests."""
    (folder / "kvrelay.yaml").write_text(yaml.safe_dump(values))
    report = folder / "report.json"
    status = doctor.main(["--config", str(folder / "kvrelay.yaml"), "--json", str(report)], probe=lambda: None)
    content = json.loads(report.read_text())
    assert content["ok"] is (status == 0)
    return status, {one["check"]: one for one in content["findings"]}


def test_a_healthy_stack(tmp_path: Path, stack: dict[str, Any]) -> None:
    status, found = examined(tmp_path, stack)
    assert status == 0
    assert {name for name, one in found.items() if one["status"] == "wrong"} == set()
    assert found["bundles of large-0"]["status"] == "ok"
    assert found["worker small-0"]["found"].startswith("fake-small on none")


@pytest.mark.parametrize(
    ("changes", "check", "says"),
    [
        ({"policy": {"name": "nonsense"}}, "configuration", "unknown policy 'nonsense'"),
        ({"server": {"host": "0.0.0.0"}}, "configuration", "no tenant has api_keys"),
        ({"admin": {"key_file": "nowhere"}}, "configuration", "admin.key_file: cannot read"),
        ({"secret_file": "nowhere"}, "cluster secret", "cannot read"),
        ({"registry": {"url": "redis://me:hidden@127.0.0.1:1/0"}}, "registry", "redis://127.0.0.1:1/0"),
        ({"discovery": {"url": "redis://me:hidden@127.0.0.1:1/0"}}, "discovery", "redis://127.0.0.1:1/0"),
        ({"registry": {"url": "redis+sentinel://me:hidden@127.0.0.1:1/main"}}, "registry", "No master found"),
    ],
)
def test_problems_are_reported_with_advice(
    changes: dict[str, Any],
    check: str,
    says: str,
    tmp_path: Path,
    stack: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path / "home"))
    status, found = examined(tmp_path, stack | changes)
    assert status == 1
    assert found[check]["status"] == "wrong" and says in found[check]["found"]
    out = capsys.readouterr().out
    assert f"{check}: {found[check]['advice']}" in out
    assert "hidden" not in out, "a password leaked"


def test_workers_that_are_down_or_have_another_secret(tmp_path: Path, stack: dict[str, Any]) -> None:
    (tmp_path / "secret").write_text("another secret of the cluster")
    stack["workers"]["small-0"]["url"] = f"http://127.0.0.1:{free_ports(1)[0]}"
    status, found = examined(tmp_path, stack)
    assert status == 1
    assert found["worker small-0"]["status"] == "warning" and "kvrelay worker" in found["worker small-0"]["advice"]
    assert found["worker large-0"]["status"] == "wrong" and "secret" in found["worker large-0"]["advice"]


def test_port_taken_by_another_program(tmp_path: Path, stack: dict[str, Any]) -> None:
    """A worker listens on the gateway's port."""
    stack["server"]["port"] = int(stack["workers"]["small-0"]["url"].rpartition(":")[2])
    status, found = examined(tmp_path, stack)
    assert status == 1
    assert "gateway: 127.0.0.1 port" in found["ports"]["found"]
    assert "another port" in found["ports"]["advice"]


def test_pools_of_stopped_workers_must_fit(tmp_path: Path, stack: dict[str, Any]) -> None:
    stack["workers"]["large-0"] |= {"url": f"http://127.0.0.1:{free_ports(1)[0]}", "pool_bytes": "4PiB"}
    status, found = examined(tmp_path, stack)
    assert status == 1
    memory = found["shared memory"]
    assert memory["status"] == "wrong" and "workers.*.pool_bytes" in memory["advice"]


@pytest.mark.parametrize(
    ("changes", "status", "says", "advice"),
    [
        (None, "warning", "none", "kvrelay fit"),
        ({}, "ok", "b1", ""),
        ({"usable": False, "reason": "top-1 .5 is below .8"}, "wrong", "below .8", "workers.*.gate"),
        ({"source_fingerprint": fingerprint("another")}, "wrong", "small model's weights", "fit one for this pair"),
        (
            {"usable": False, "reason": "for other weights", "target_fingerprint": fingerprint("another")},
            *("wrong", "for other weights", "fit one for this pair"),
        ),
    ],
)
async def test_bundles_are_checked_for_the_pair(
    changes: dict[str, Any] | None, status: str, says: str, advice: str
) -> None:
    _, large = fakes()
    offered = [] if changes is None else [BUNDLE.model_copy(update=changes)]
    info = WorkerInfo.model_validate(await large._info({})).model_copy(update={"bundles": offered})
    finding = doctor.bundles("large-0", info, {fingerprint("small")})
    assert finding.status == status
    assert says in finding.found and advice in finding.advice and bool(advice) == (status != "ok")


def registry_at(port: int, password: str) -> doctor.Finding:
    values = {
        "tiers": [{"name": "small", "model": "m"}],
        "workers": {"w": {"tier": "small", "url": "http://127.0.0.1:1"}},
        "registry": {"url": f"redis://:{password}@127.0.0.1:{port}/0"},
    }
    return doctor.registry(from_values(values))


def test_redis_problems(tmp_path: Path, require_tool: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong password, no answer and no server each get their own advice."""
    monkeypatch.setattr(doctor, "REDIS_TIMEOUT_S", 0.5)
    with redis_process(require_tool("redis-server"), tmp_path, "--requirepass", "right") as redis:
        assert registry_at(redis.port, "right").status == "ok"
        wrong = registry_at(redis.port, "other")
        redis.freeze()
        frozen = registry_at(redis.port, "right")
        redis.kill()
        gone = registry_at(redis.port, "right")
    assert [one.status for one in (wrong, frozen, gone)] == ["wrong"] * 3
    assert "password" in wrong.advice and "stuck" in frozen.advice and "start it" in gone.advice
    assert "right" not in frozen.found + gone.found


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (None, "skipped"),
        ({"torch": "2", "devices": [], "apart": []}, "ok"),
        ({"torch": "2", "devices": ["A", "B"], "apart": []}, "ok"),
        ({"torch": "2", "devices": ["A", "B"], "apart": [(0, 1)]}, "warning"),
    ],
)
def test_gpus(report: dict[str, Any] | None, status: str) -> None:
    assert doctor.gpus(lambda: report).status == status


def test_broken_torch() -> None:
    def broken() -> None:
        raise OSError("ImportError: libcudart.so: cannot open")

    finding = doctor.gpus(broken)
    assert (finding.status, finding.found) == ("wrong", "ImportError: libcudart.so: cannot open")


def test_shared_memory_must_hold_the_pools(tmp_path: Path) -> None:
    assert doctor.shared_memory(tmp_path, 1).status == "ok"
    assert doctor.shared_memory(tmp_path, 2**60).status == "wrong"
    assert doctor.shared_memory(tmp_path / "none", 0).status == "wrong"
    assert doctor.DEFAULT_POOL_BYTES == WorkerSettings(id="w", model="m").pool_bytes


def test_versions_match_the_constraints(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"httpx=={version('httpx')}\nnot-installed==1\n")
    assert doctor.versions(constraints).status == "ok"
    constraints.write_text("httpx==0.0.1\n")
    finding = doctor.versions(constraints)
    assert finding.status == "warning" and "not 0.0.1" in finding.found
