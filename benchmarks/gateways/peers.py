"""The compared gateways: how to install, configure and start each in front of one upstream."""

from __future__ import annotations

import hashlib
import secrets
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gateways.processes import free_port
from benchmarks.gateways.stub import MODEL

LITELLM, VLLM_ROUTER = "litellm[proxy]==1.108.7", "vllm-router==0.1.17"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Start:
    """A command, the path that answers 200 once the gateway is ready, and additional environment variables."""

    command: Sequence[str]
    ready_path: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """One gateway. `start(folder, port, upstream, key, binaries)` writes its configuration into `folder`. It gets
    `share` of the requests, so that a slow one takes no longer."""

    name: str
    start: Callable[[Path, int, int, str, Path], Start]
    requirement: str | None = None  # None: this checkout, with the current Python
    share: float = 1.0

    def binaries(self, venvs: Path) -> Path:
        """Return the folder of its commands, installing it into a virtual environment on first use."""
        if self.requirement is None:
            return Path(sys.executable).parent
        folder = venvs / self.requirement.replace("[", "-").replace("]", "")
        done = folder / ".installed"
        if not done.exists():
            print(f"installing {self.requirement} into {folder}", file=sys.stderr, flush=True)
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", self.requirement], check=True)
            done.touch()
        return folder / "bin"


def new_key() -> str:
    return f"sk-{secrets.token_hex(16)}"


def _kvrelay(folder: Path, port: int, upstream: int, key: str, binaries: Path, root: Path = ROOT) -> Start:
    """All defaults are on: registry, policy, keys, metrics, audit lines and prefix hash. The log is outside the
    configuration's folder, which the gateway watches."""
    own = folder / "config"
    own.mkdir()
    secret = own / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    values = {
        "tiers": [{"name": MODEL, "model": MODEL}],
        "workers": {"stub-0": {"tier": MODEL, "url": f"http://127.0.0.1:{upstream}"}},
        "policy": {"name": "fixed"},
        "tenants": {"default": {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]}},
        "limits": {"max_concurrency_per_tier": 1024, "max_queue_per_tier": 1024, "max_concurrency_per_tenant": 1024},
        "server": {"port": port},
        "secret_file": "secret",
    }
    config = _write_yaml(own / "kvrelay.yaml", values)
    python = str(binaries / Path(sys.executable).name)
    return Start([python, "-m", "gateway", "--config", str(config)], "/readyz", {"PYTHONPATH": str(root)})


def kvrelay_at(root: Path) -> Peer:
    """Another checkout of kvrelay, with the same Python and packages, to compare both in one run."""
    return Peer("kvrelay-before", partial(_kvrelay, root=root.resolve()))


def _litellm(server: str) -> Callable[[Path, int, int, str, Path], Start]:
    def start(folder: Path, port: int, upstream: int, key: str, binaries: Path) -> Start:
        to_stub = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
        values = {
            "model_list": [{"model_name": MODEL, "litellm_params": to_stub}],
            "general_settings": {"master_key": key},
            "litellm_settings": {"telemetry": False},
        }
        config = _write_yaml(folder / "litellm.yaml", values)
        command = [str(binaries / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        chosen = ["--run_granian"] if server == "granian" else []
        return Start([*command, "--num_workers", "1", *chosen], "/health/readiness", {"LITELLM_LOG": "ERROR"})

    return start


def _vllm_router(folder: Path, port: int, upstream: int, key: str, binaries: Path) -> Start:
    command = [str(binaries / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--api-key", key]
    chosen = ["--worker-urls", f"http://127.0.0.1:{upstream}", "--policy", "cache_aware", "--log-level", "warning"]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return Start([*command, *chosen, *metrics], "/health")


def _write_yaml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


PEERS = {
    peer.name: peer
    for peer in (
        Peer("kvrelay", _kvrelay),
        Peer("litellm-uvicorn", _litellm("uvicorn"), LITELLM, share=0.02),
        Peer("litellm-granian", _litellm("granian"), LITELLM, share=0.02),
        Peer("vllm-router", _vllm_router, VLLM_ROUTER),
    )
}
