"""Rules and dashboards: they work, and use only metrics that are exported."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import queries
from deploy.composed import REPOSITORY
from deploy.queries import DASHBOARDS, Query
from gateway import settings
from tests.gateway.stack import in_process
from tests.workers.engines import tiny
from tests.workers.server import support

PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
QUERIES = [*queries.of_dashboards(), *queries.of_rules("record"), *queries.of_rules("alert")]
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def names(exposed: str) -> set[str]:
    """Return the names of all samples, including those that do not exist yet."""
    families = text_string_to_metric_families(exposed)
    return {f"{family.name}{suffix}" for family in families for suffix in SUFFIXES[family.type]}


@pytest.fixture(scope="module")
def by_job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The metrics that a gateway and a worker export, by job."""
    return asyncio.run(exported(tiny.model_folder(tmp_path_factory.mktemp("model"))))


async def exported(folder: Path) -> dict[str, set[str]]:
    async with in_process() as gateway, support.serving(folder) as worker:
        replies = {"gateway": await gateway.http.get("/metrics"), "workers": await worker.http.get("/metrics")}
    return {job: names(reply.text) for job, reply in replies.items()}


def test_every_queried_metric_is_exported(by_job: dict[str, set[str]]) -> None:
    """By the job that the query names."""
    for query in QUERIES:
        job = re.search(r'job="(\w+)"', query.expression)
        known = by_job[job[1]] if job else set.union(*by_job.values())
        assert query.metrics, f"{query.where} queries no metric"
        unknown = query.metrics - known - queries.recorded() - {"up"}
        assert not unknown, f"{query.where} queries {unknown}"


def test_every_exported_metric_is_on_a_dashboard(by_job: dict[str, set[str]]) -> None:
    shown = {_family(metric) for query in queries.of_dashboards() for metric in query.metrics}
    for job, exposed in by_job.items():
        unseen = {_family(metric) for metric in exposed if not metric.endswith("_created")} - shown
        assert not unseen, f"{job}: no dashboard shows {unseen}"


def _family(metric: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", metric)


def test_metrics_of_a_query() -> None:
    query = Query("", 'sum by (le) (rate(kvrelay_gone_total{job="gateway", path="kvrelay_x"}[5m])) / a:kvrelay_b:c')
    assert query.metrics == {"kvrelay_gone_total", "a:kvrelay_b:c"}


def test_jobs_and_workers_match_the_configuration() -> None:
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"] for job in scraped}
    assert {job for query in QUERIES for job in re.findall(r'job="(\w+)"', query.expression)} == targets.keys()
    known = settings.load(REPOSITORY / "deploy" / "config" / "kvrelay.yaml")
    assert [one["targets"] for one in targets["gateway"]] == [[f"gateway:{known.server.port}"]]
    assert {one["labels"]["worker"]: f"http://{one['targets'][0]}" for one in targets["workers"]} == {
        name: worker.url for name, worker in known.workers.items()
    }


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_can_be_provisioned_and_imported(dashboard: Path) -> None:
    content: dict[str, Any] = json.loads(dashboard.read_text())
    assert content["uid"] == f"kvrelay-{dashboard.stem}"
    assert content["schemaVersion"] >= 39
    assert [one["name"] for one in content["__inputs"]] == ["DS_PROMETHEUS"]
    variables = {one["name"] for one in content["templating"]["list"]}
    assert "DS_PROMETHEUS" in variables, "provisioning does not fill in __inputs"
    for panel in content["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            assert set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"])) <= variables
            assert re.findall(r"rate\(", target["expr"]) == [] or "[$__" in target["expr"]


def test_dashboards_are_where_grafana_expects_them() -> None:
    folder = REPOSITORY / "deploy" / "grafana" / "provisioning"
    provider = yaml.safe_load((folder / "dashboards" / "kvrelay.yml").read_text())["providers"][0]
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    mounts = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts
    scrape = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape


def test_rules_pass_their_tests(require_tool: Callable[[str], str]) -> None:
    tested = subprocess.run(
        [require_tool("promtool"), "test", "rules", "rules.test.yml"], cwd=PROMETHEUS, capture_output=True, text=True
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_test_and_an_action() -> None:
    rules = yaml.safe_load(queries.RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule for group in rules for rule in group["rules"] if "alert" in rule}
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert fired == alerts.keys()
    assert all(alert["annotations"].keys() == {"summary", "action"} for alert in alerts.values())


def test_prometheus_configuration_is_valid(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    config = (PROMETHEUS / "prometheus.yml").read_text().replace("/etc/prometheus", str(PROMETHEUS))
    (tmp_path / "prometheus.yml").write_text(config)
    command = [require_tool("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
