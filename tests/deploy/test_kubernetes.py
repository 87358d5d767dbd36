"""The Kubernetes example: valid, contained, and two workers of one pod share memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.composed import REPOSITORY
from gateway.settings import from_values
from workers.settings import read_settings

MANIFESTS = list(yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes" / "kvrelay.yaml").read_text()))
APP, PART = "app.kubernetes.io/name", "app.kubernetes.io/component"


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in MANIFESTS if one["kind"] == kind and one["metadata"]["name"] == name)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in MANIFESTS:
        if one["kind"] in ("Deployment", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]


PODS = dict(pods())


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_manifests_match_the_kubernetes_schemas(version: str) -> None:
    """Unknown keys are errors."""
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = copy.deepcopy(named("Deployment", "kvrelay-gateway"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_contained(name: str) -> None:
    pod = PODS[name]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    mounted = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= mounted


def test_two_workers_share_memory() -> None:
    pod = PODS["kvrelay-workers"]["spec"]
    shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["medium"] == "Memory"
    small, large = pod["containers"]
    for worker in (small, large):
        assert {"name": "shm", "mountPath": "/dev/shm"} in worker["volumeMounts"]
        assert "runAsUser" not in worker["securityContext"], "the pod's user: a pool is its owner's alone"


def test_configuration_matches_the_containers(tmp_path: Path) -> None:
    text = named("ConfigMap", "kvrelay")["data"]["kvrelay.yaml"]
    known = from_values(yaml.safe_load(text)).workers
    (tmp_path / "kvrelay.yaml").write_text(text)
    pod = PODS["kvrelay-workers"]["spec"]
    pools = 0
    for container in pod["containers"]:
        options = dict(zip(container["command"][3::2], container["command"][4::2], strict=True))
        worker = read_settings(tmp_path / "kvrelay.yaml", options["--worker"])
        assert known[worker.id].url == f"http://kvrelay-workers:{container['ports'][0]['containerPort']}"
        pools += worker.pool_bytes
    shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert pools + 2 * 2**20 < int(shm["sizeLimit"].removesuffix("Mi")) * 2**20


@pytest.mark.parametrize("name", [name for name in PODS if name != "kvrelay-models"])
def test_servers_are_probed(name: str) -> None:
    for container in PODS[name]["spec"]["containers"]:
        ports = {port["name"] for port in container["ports"]}
        for probe in ("livenessProbe", "readinessProbe"):
            how = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert how["port"] in ports
        if "httpGet" in container["livenessProbe"]:
            assert container["livenessProbe"]["httpGet"]["path"] == "/livez", "a dead Redis must not restart anything"
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_secrets_are_copied_with_mode_0600() -> None:
    """Workers and gateway refuse mounted secrets, which their group can read."""
    for name in ("kvrelay-workers", "kvrelay-gateway"):
        pod = PODS[name]["spec"]
        (copying,) = pod["initContainers"]
        copied = ["/mounted/cluster-secret", "/mounted/redis-password", "/run/secrets/"]
        assert copying["command"] == ["install", "-m", "0600", *copied]
        assert _mounted(pod) == {"cluster-secret", "redis-password"}
        for container in pod["containers"]:
            assert "mounted-secrets" not in {mount["name"] for mount in container["volumeMounts"]}


def _mounted(pod: dict[str, Any]) -> set[str]:
    """Return the files of the mounted secrets. A secret without keys holds one file of its name."""
    (volume,) = [one for one in pod["volumes"] if one["name"] == "mounted-secrets"]
    secrets = [source["secret"] for source in volume["projected"]["sources"]]
    whole = {"kvrelay-cluster": [{"path": "cluster-secret"}]}
    return {item["path"] for one in secrets for item in one.get("items") or whole[one["name"]]}


def test_network_policies_allow_only_the_needed_calls() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in MANIFESTS if one["kind"] == "NetworkPolicy"}
    deny = policies["kvrelay-default-deny"]
    assert deny == {"podSelector": {"matchLabels": {APP: "kvrelay"}}, "policyTypes": ["Ingress", "Egress"]}
    for name, pod in PODS.items():
        assert pod["metadata"]["labels"][APP] == "kvrelay"
        assert policies[name]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    for name, callers in (("kvrelay-workers", {"gateway", "workers"}), ("kvrelay-redis", {"gateway", "workers"})):
        (rule,) = policies[name]["ingress"]
        ours = [one["podSelector"]["matchLabels"] for one in rule["from"] if "namespaceSelector" not in one]
        assert {labels[PART] for labels in ours} == callers
        for caller in callers:
            called = [one["podSelector"] for rule in policies[f"kvrelay-{caller}"]["egress"] for one in rule["to"]]
            assert policies[name]["podSelector"] in called


@pytest.mark.parametrize("service", [one["metadata"]["name"] for one in MANIFESTS if one["kind"] == "Service"])
def test_services_find_their_pods(service: str) -> None:
    spec = named("Service", service)["spec"]
    (pod,) = [pod for pod in PODS.values() if spec["selector"] == pod["metadata"]["labels"]]
    offered = {port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
    assert {port["port"] for port in spec["ports"]} == offered


def test_mounted_configmaps_and_claims_exist() -> None:
    for pod in PODS.values():
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                named("ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                named("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_redis_is_configured_as_in_compose() -> None:
    ours = (REPOSITORY / "deploy" / "redis" / "redis.conf").read_text().splitlines()
    theirs = named("ConfigMap", "kvrelay-redis")["data"]["redis.conf"].splitlines()
    assert [line for line in ours if line and not line.startswith("#")] == theirs
