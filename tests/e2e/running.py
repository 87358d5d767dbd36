"""Real workers, a gateway over them, and further gateways over the same workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conversations import Messages
from tools import family as commands
from tools.stack import Child, Stack, free_ports
from workers.api.client import WorkerClient
from workers.families import Family

NUM_TOKENS = 12
START_S = 240.0  # on a busy machine
# An unforced escalation may take almost as long as a full prefill, so some are hybrid.
WORKER = {"native_share": 0.9, "num_threads": 1, "pool_bytes": 64 * 2**20, "grace_s": 0.1}
REQUEST_S = 60.0
DEADLINES = {"request_s": REQUEST_S, "decode_reserve_s": 1.0, "transfer_floor_s": 15.0, "shutdown_grace_s": 0.1}
# No health checks, a short deadline for the small worker, and circuits that hardly open.
NO_HEALTH_CHECKS = {
    "deadlines": DEADLINES | {"worker_poll_s": 3600.0, "small_share": 0.08, "transfer_floor_s": 4.0},
    "breaker": {"min_outcomes": 20},
}
ACCEPTING = {"name": "confidence", "threshold": -50.0, "num_tokens": 4}  # accepts every small answer


@dataclass(frozen=True)
class Reply:
    """A gateway's reply, and how long it took."""

    status: int
    headers: httpx.Headers
    body: dict[str, Any]
    took_s: float

    @property
    def report(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        report: dict[str, Any] = self.body["kvrelay"]
        return report

    @property
    def path(self) -> str:
        assert self.headers["x-kvrelay-path"] == self.report["path"]
        return str(self.report["path"])

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def tokens(self) -> list[dict[str, Any]]:
        tokens: list[dict[str, Any]] = self.body["choices"][0]["logprobs"]["content"]
        return tokens

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


class Client:
    """A client of one gateway. Asks greedily and for log-probabilities."""

    def __init__(self, url: str, key: str | None = None):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, body: Any) -> Reply:
        began = time.monotonic()
        reply = self.http.post("/v1/chat/completions", json=body)
        return Reply(reply.status_code, reply.headers, reply.json(), time.monotonic() - began)

    def ask(self, messages: Messages, model: str = "auto", **options: Any) -> Reply:
        """`options` go into the field `kvrelay`."""
        return self.post(request(messages, model, **options))

    def escalate(self, messages: Messages, **options: Any) -> Reply:
        return self.ask(messages, policy="always_escalate", **options)

    @property
    def tiers(self) -> dict[str, bool]:
        """Whether each tier is usable, according to the gateway."""
        tiers: dict[str, bool] = self.http.get("/readyz").json()["tiers"]
        return tiers

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http.get("/metrics").text, name, **labels)


@dataclass(frozen=True)
class Cluster:
    """A stack as `kvrelay up` starts it, with its workers by tier."""

    stack: Stack
    settings: dict[str, Any]
    secret: Path
    client: Client

    def id(self, tier: str) -> str:
        workers: dict[str, Any] = self.settings["workers"]
        return next(name for name, worker in workers.items() if worker["tier"] == tier)

    def child(self, tier: str) -> Child:
        return self.stack.workers[self.id(tier)]

    def worker(self, tier: str) -> WorkerClient:
        """A client of the worker itself."""
        return WorkerClient(self.child(tier).url, self.secret.read_text().strip())

    def worker_metric(self, tier: str, name: str, **labels: str) -> float:
        return metric(httpx.get(f"{self.child(tier).url}/metrics", trust_env=False).text, name, **labels)

    @contextmanager
    def gateway(self, name: str, **changes: Any) -> Iterator[Client]:
        """Run another gateway over the same workers, with other settings."""
        server = {"host": "127.0.0.1", "port": free_ports(1)[0]}
        config = commands.write(self.settings | {"server": server} | changes, self.stack.folder / f"{name}.yaml")
        arguments = ["gateway", "--config", str(config), "--die-with-parent"]
        url, log = f"http://127.0.0.1:{server['port']}", self.stack.folder / f"{name}.log"
        child = Child(name, arguments, url, log, os.environ | {"KVRELAY_SECRET_FILE": str(self.secret)})
        try:
            eventually(lambda: child.ended or child.is_ready(), f"{name} is ready")
            assert not child.ended, child.log_tail()
            with Client(url) as client:
                yield client
        finally:
            child.terminate()
            child.wait_or_kill(time.monotonic() + START_S)
        assert child.process.returncode == 0, child.log_tail()

    @contextmanager
    def frozen(self, tier: str) -> Iterator[None]:
        self.child(tier).process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.child(tier).process.send_signal(signal.SIGCONT)

    def kill(self, tier: str) -> None:
        self.child(tier).process.kill()
        self.child(tier).process.wait()

    def start(self, tier: str) -> None:
        """Start a killed worker again, on the same port."""
        child = self.stack.start_worker(self.id(tier))
        eventually(lambda: child.ended or child.is_ready(), f"{child.name} is ready")
        assert not child.ended, child.log_tail()

    @property
    def segments(self) -> list[Path]:
        """The shared memory files of its workers."""
        return [path for name in self.settings["workers"] for path in segments(name)]


def settings_of(family: Family, label: str, misfit: Path | None = None) -> dict[str, Any]:
    """Return the settings of a stack for one family. Its worker ids are unique on this machine.

    `misfit` is the model of a tier between the two, with the large tier's bundle.
    """
    folders = {"small": str(family.source), "large": str(family.target), "bundle": str(family.bundle)}
    settings = commands.configuration(family.name, folders)
    small, large = settings["workers"].values()
    between = []
    if misfit is not None:
        settings["tiers"].insert(1, {"name": "misfit", "model": "tiny-misfit"})
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        between = [large | {"tier": "misfit", "name": "tiny-misfit", "model": str(misfit), "url": url}]
    workers = {f"{worker['tier']}-{label}-{os.getpid()}": worker | WORKER for worker in (small, *between, large)}
    return settings | {"workers": workers, "deadlines": DEADLINES, "policy": ACCEPTING}


@contextmanager
def running(settings: dict[str, Any], folder: Path) -> Iterator[Cluster]:
    """Run a stack until the block ends. Then no process and no shared memory is left."""
    folder.mkdir(parents=True, exist_ok=True)
    secret = commands.cluster_secret(folder / "secret")
    stack = Stack(commands.write(settings, folder / "kvrelay.yaml"), secret, folder)
    with stack:
        stack.wait_ready(lambda line: None, timeout_s=START_S)
        pids = {child.pid for child in stack.children}
        with Client(stack.url) as client:
            cluster = Cluster(stack, settings, secret, client)
            yield cluster
        pids |= {child.pid for child in stack.children}
    assert not [pid for pid in pids if is_alive(pid)]
    assert not cluster.segments


def request(messages: Messages, model: str = "auto", **options: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "kvrelay": options,
    }


def segments(worker_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"kvrelay-{os.getuid()}-{worker_id}-*"))


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], Any], what: str, within_s: float = START_S) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"timed out waiting until {what}"
        time.sleep(0.02)


def metric(exposed: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of `kvrelay_<name>` with these labels."""
    samples = [sample for kind in text_string_to_metric_families(exposed) for sample in kind.samples]
    chosen = [one for one in samples if one.name == f"kvrelay_{name}" and labels.items() <= one.labels.items()]
    return sum(one.value for one in chosen)
