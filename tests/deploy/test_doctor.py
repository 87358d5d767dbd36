"""`kvrelay doctor`: what it finds, and that it says what to do."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
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
    """The exit status and the findings by what was looked at. Torch is not loaded: `gpus` has tests of its own."""
    (folder / "kvrelay.yaml").write_text(yaml.safe_dump(values))
    told = folder / "told.json"
    status = doctor.main(["--config", str(folder / "kvrelay.yaml"), "--json", str(told)], probe=lambda: None)
    content = json.loads(told.read_text())
    assert content["ok"] is (status == 0)
    return status, {one["check"]: one for one in content["findings"]}


def test_a_stack_that_is_well(tmp_path: Path, stack: dict[str, Any]) -> None:
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
def test_what_is_wrong_is_named_with_what_to_do(
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
    assert "hidden" not in out, "a password is not told"


def test_workers_that_do_not_answer_or_do_not_know_us(tmp_path: Path, stack: dict[str, Any]) -> None:
    (tmp_path / "secret").write_text("another secret of the cluster")
    stack["workers"]["small-0"]["url"] = f"http://127.0.0.1:{free_ports(1)[0]}"
    status, found = examined(tmp_path, stack)
    assert status == 1
    assert found["worker small-0"]["status"] == "warning" and "kvrelay worker" in found["worker small-0"]["advice"]
    assert found["worker large-0"]["status"] == "wrong" and "secret" in found["worker large-0"]["advice"]


def test_a_stranger_on_our_port(tmp_path: Path, stack: dict[str, Any]) -> None:
    """A worker listens where the gateway is to."""
    stack["server"]["port"] = int(stack["workers"]["small-0"]["url"].rpartition(":")[2])
    status, found = examined(tmp_path, stack)
    assert status == 1
    assert "gateway: 127.0.0.1 port" in found["ports"]["found"]
    assert "another port" in found["ports"]["advice"]


@pytest.mark.parametrize("where", ["large-0", "the file"])
def test_a_worker_that_cannot_start(where: str, tmp_path: Path, stack: dict[str, Any]) -> None:
    """Its pool does not fit into the shared memory, and its bundle is not there."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "manifest.json").touch()
    large = stack["workers"]["large-0"]
    large |= {"url": f"http://127.0.0.1:{free_ports(1)[0]}", "pool_bytes": "4PiB"}
    (large if where == "large-0" else stack)["bundles"] = ["there", "/nowhere/bundle"]
    status, found = examined(tmp_path, stack)
    assert status == 1
    memory, bundles = found["shared memory"], found["bundles of large-0"]
    assert memory["status"] == "wrong" and "workers.*.pool_bytes" in memory["advice"]
    assert bundles["status"] == "wrong" and bundles["found"] == "no manifest.json in /nowhere/bundle"
    assert "workers.large-0.bundles" in bundles["advice"] and "kvrelay fit" in bundles["advice"]


def test_bundles_on_other_machines_are_theirs_to_find(tmp_path: Path) -> None:
    values = {
        "tiers": [{"name": "small", "model": "m"}],
        "workers": {"w": {"tier": "small", "url": "http://192.0.2.1:8101", "bundles": ["/nowhere"]}},
    }
    assert list(doctor.missing_bundles(from_values(values), {}, tmp_path)) == []


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
async def test_bundles_are_judged_for_the_pair(
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


def test_what_is_wrong_with_redis(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    """A password, no answer, or nobody there: to each its own advice."""
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
    ("told", "status"),
    [
        (None, "skipped"),
        ({"torch": "2", "devices": [], "apart": []}, "ok"),
        ({"torch": "2", "devices": ["A", "B"], "apart": []}, "ok"),
        ({"torch": "2", "devices": ["A", "B"], "apart": [(0, 1)]}, "warning"),
    ],
)
def test_gpus_that_cannot_reach_each_other(told: dict[str, Any] | None, status: str) -> None:
    assert doctor.gpus(lambda: told).status == status


def test_a_torch_that_does_not_work() -> None:
    def broken() -> None:
        raise OSError("ImportError: libcudart.so: cannot open")

    finding = doctor.gpus(broken)
    assert (finding.status, finding.found) == ("wrong", "ImportError: libcudart.so: cannot open")


def test_shared_memory_must_hold_the_pools(tmp_path: Path) -> None:
    assert doctor.shared_memory(tmp_path, 1).status == "ok"
    assert doctor.shared_memory(tmp_path, 2**60).status == "wrong"
    assert doctor.shared_memory(tmp_path / "none", 0).status == "wrong"
    assert doctor.DEFAULT_POOL_BYTES == WorkerSettings(id="w", model="m").pool_bytes


def test_only_dead_pools_are_left_overs(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f"kvrelay-{os.getuid()}-{name}-0" for name in ("dead", "alive"))
    dead.touch()
    with alive.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        finding = doctor.leftovers(tmp_path)
    assert finding.status == "warning" and str(dead) in finding.advice and str(alive) not in finding.advice


def test_versions_are_those_of_the_constraints(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"httpx=={doctor._installed('httpx')}\nnot-installed==1\n")
    assert [one.status for one in doctor.versions(constraints)] == ["ok"]
    constraints.write_text("httpx==0.0.1\n")
    (finding,) = doctor.versions(constraints)
    assert finding.status == "warning" and "not 0.0.1" in finding.found
