"""Run the services of docker-compose.yml without containers. smoke.sh starts this in its own namespaces.

1. root          folders, secrets, configuration and host names as in the containers
2. services      in the order of depends_on, each until its health check passes
3. requests      two handoffs, and a request without a key
4. dashboards    every query runs in a real Prometheus, and returns data if its metrics have samples
5. shutdown      SIGTERM: every service exits by itself, and the shared memory is empty
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from deploy import composed, queries, root
from deploy.composed import REPOSITORY, Service

FAMILY = "tiny"
TIMEOUT_S = 600.0  # on a busy machine
HANDED_OVER = ("mapped", "hybrid")
DONE = {"models"}  # exits before the others start
PROJECT = Path("/project")  # for deploy/init
LOGS = Path("/logs")
BIN = "/opt/kvrelay/bin:/usr/local/bin:/usr/bin:/bin"
GATEWAY, PROMETHEUS = "http://gateway:8000", "http://prometheus:9090"
# A prefill by `tiny` is faster than the calls of a handoff: without this floor none would be tried.
MORE = {"gateway": {"KVRELAY_DEADLINES__TRANSFER_FLOOR_S": "15"}}
SCRAPE = ("15s", "1s")
MESSAGES = [
    {"role": "system", "content": "You know this play: " + "Now is the winter of our discontent made summer. " * 20},
    {"role": "user", "content": "What is the winter made?"},
]


class Failed(Exception):
    """A check has failed."""


@dataclass
class Running:
    service: Service
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (LOGS / self.service.name).read_text(errors="replace")[-2000:]

    @property
    def exit_report(self) -> str:
        return f"{self.service.name} exited with status {self.process.returncode}:\n{self.log}"


def main() -> int:
    variables = prepare()
    stack = composed.load(variables)
    lay_out(stack)
    running: dict[str, Running] = {}
    try:
        for service in stack.started_with("cpu"):
            for name, condition in service.depends_on.items():
                if name in running:
                    wait_for(running[name], condition)
            start(service, running)
        for name in running.keys() - DONE:
            wait_for(running[name], "service_healthy")
        drive(has_prometheus="prometheus" in running)
        stop([one for name, one in running.items() if name not in DONE])
    except Failed as error:
        say(f"FAILED: {error}")
        return 1
    say("all checks passed")
    return 0


# 1. Root


def prepare() -> dict[str, str]:
    root.loopback_up()
    root.enter()
    for path in (PROJECT, LOGS):
        root.folder(path)
    subprocess.run([REPOSITORY / "deploy" / "init", PROJECT], check=True, stdout=subprocess.DEVNULL)
    return composed.read_env(PROJECT / ".env") | {"KVRELAY_FAMILY": FAMILY}


def lay_out(stack: composed.Composed) -> None:
    root.link(Path("/opt/kvrelay"), Path(sys.prefix))
    root.link(Path("/opt/deploy"), REPOSITORY / "deploy" / "images")
    names = sorted({name for service in stack.started_with("cpu") for name in service.names})
    root.write(Path("/etc/hosts"), f"127.0.0.1 localhost {' '.join(names)}\n")
    root.mount_memory(Path("/dev/shm"), composed.num_bytes(stack.services["memory"].content["shm_size"]))
    for name, secret in stack.content["secrets"].items():
        root.link(Path("/run/secrets") / name, PROJECT / secret["file"])
    for source, target in sorted({mount for service in stack.started_with("cpu") for mount in service.mounts}):
        if source in stack.content["volumes"]:
            root.folder(Path(target))
        else:
            root.link(Path(target), REPOSITORY / source)
    scrape_faster()


def scrape_faster() -> None:
    """Scrape every second, not every 15."""
    folder, target = REPOSITORY / "deploy" / "prometheus", Path("/etc/prometheus")
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8")
        root.write(target / file.name, text.replace(*SCRAPE) if file.name == "prometheus.yml" else text)


# 2. Services


def start(service: Service, running: dict[str, Running]) -> None:
    if not service.command or shutil.which(service.command[0], path=BIN) is None:
        say(f"{service.name}: not installed here; skipped")
        return
    environment = {"PATH": BIN} | composed.image_environment() | service.environment | MORE.get(service.name, {})
    with (LOGS / service.name).open("wb") as log:
        process = subprocess.Popen(service.command, env=environment, cwd="/", stdout=log, stderr=subprocess.STDOUT)
    running[service.name] = Running(service, process)


def wait_for(one: Running, condition: str) -> None:
    if condition == "service_completed_successfully":
        if one.process.wait(TIMEOUT_S):
            raise Failed(one.exit_report)
    elif condition == "service_healthy" and one.service.health_test:
        eventually(lambda: is_healthy(one), f"{one.service.name} is healthy", lambda: one.log)
        say(f"{one.service.name}: healthy")


def is_healthy(one: Running) -> bool:
    if one.process.poll() is not None:
        raise Failed(one.exit_report)
    kind, *test = one.service.health_test
    if test[0] == "wget":  # in the image, but not on every machine
        test = ["python", "/opt/deploy/healthy", test[-1]]
    command: Sequence[str] = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
    return subprocess.run(command, env={"PATH": BIN}, capture_output=True).returncode == 0


# 3. Requests


def drive(*, has_prometheus: bool) -> None:
    key = (PROJECT / ".kvrelay" / "deploy" / "api-key").read_text()
    with httpx.Client(base_url=GATEWAY, timeout=60, headers={"authorization": f"Bearer {key}"}) as http:
        eventually(lambda: tiers_of(http) == {"small", "large"}, "the gateway sees both tiers", lambda: "")
        refused = httpx.post(f"{GATEWAY}/v1/chat/completions", json={"model": "auto", "messages": MESSAGES})
        check(refused.status_code == 401, f"a request without a key got {refused.status_code}, not 401")
        if has_prometheus:
            eventually(lambda: len(ask("up == 1")) == 3, "Prometheus scrapes all three", lambda: str(ask("up")))
        hand_over(http, 1)
        hand_over(http, 2)
        check_registry(http.get("/metrics").text)
        if has_prometheus:
            check_dashboards(http)


def tiers_of(http: httpx.Client) -> set[str]:
    try:
        return {name for name, usable in http.get("/readyz").json()["tiers"].items() if usable}
    except httpx.TransportError:
        return set()


def hand_over(http: httpx.Client, number: int) -> None:
    """Escalate a new prompt. It must be handed over."""
    body: dict[str, Any] = {
        "model": "auto",
        "messages": [MESSAGES[0] | {"content": f"{number}. {MESSAGES[0]['content']}"}, MESSAGES[1]],
        "max_tokens": 8,
        "temperature": 0,
        "kvrelay": {"policy": "always_escalate"},
    }
    reply = http.post("/v1/chat/completions", json=body)
    path = reply.headers.get("x-kvrelay-path", reply.text)
    say(f"request {number}: status {reply.status_code}, path {path}")
    check(reply.status_code == 200 and path in HANDED_OVER, f"request {number} was not handed over: {path}")


def check_registry(exposed: str) -> None:
    lines = [line for line in exposed.splitlines() if line.startswith("kvrelay_registry_ops_total{")]
    check(any('result="ok"' in line for line in lines), "no registry operation succeeded")
    # A timeout is accepted: on a busy machine an operation may take over 100 ms. An error means that Redis refused it.
    check(not any('result="error"' in line for line in lines), f"registry operations failed: {lines}")


# 4. Dashboards


def check_dashboards(http: httpx.Client) -> None:
    """A query must return data if all its metrics have samples."""
    shown = [*queries.of_dashboards(), *queries.of_rules("record")]
    for query in queries.of_rules("alert"):
        ask(query.in_prometheus)
    number, until = 3, time.monotonic() + TIMEOUT_S
    while True:
        hand_over(http, number)  # a rate needs requests between two scrapes
        number += 1
        time.sleep(2.5)
        empty = [query for query in shown if not ask(query.in_prometheus) and all(map(has_samples, query.metrics))]
        if not empty:
            break
        check(time.monotonic() < until, f"queries return nothing: {[(q.where, q.expression) for q in empty]}")
    seen = sum(bool(ask(query.in_prometheus)) for query in shown)
    say(f"dashboards and rules: {seen} of {len(shown)} queries return data, the others have no samples")


def has_samples(metric: str) -> bool:
    return bool(ask(f"count({metric})"))


@cache
def prometheus() -> httpx.Client:
    """One client for all queries: creating one takes longer than a query."""
    return httpx.Client(base_url=PROMETHEUS, timeout=30)


def ask(expression: str) -> list[dict[str, Any]]:
    try:
        reply = prometheus().get("/api/v1/query", params={"query": expression}).json()
    except httpx.TransportError:
        return []
    check(reply["status"] == "success", f"{expression}: {reply.get('error')}")
    found: list[dict[str, Any]] = reply["data"]["result"]
    return found


# 5. Shutdown


def stop(running: list[Running]) -> None:
    for one in reversed(running):
        if one.service.content.get("init"):
            one.process.kill()  # `sleep` ignores SIGTERM; in a container the init stops it
            continue
        one.process.send_signal(signal.SIGTERM)
        try:
            status = one.process.wait(60)
        except subprocess.TimeoutExpired:
            raise Failed(f"{one.service.name} does not exit:\n{one.log}") from None
        check(status == 0, f"{one.service.name} exited with status {status}:\n{one.log}")
    left = os.listdir("/dev/shm")
    check(not left, f"files left in shared memory: {left}")
    say("every service exited by itself, and the shared memory is empty")


def eventually(holds: Callable[[], bool], what: str, more: Callable[[], str]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > until:
            raise Failed(f"timed out waiting until {what}\n{more()}")
        time.sleep(1.0)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
