"""The default configuration: an embedded family, a worker each for its small and its large model, a gateway.

The family's models are made by `kvrelay prepare`, in a process of its own, since that needs torch and this does not.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

import yaml

from tools.commands.stack import StackError, free_ports

DEFAULT_FAMILY = "smol"
DEFAULT_ENGINE = "transformers"
ENGINES = (DEFAULT_ENGINE, "vllm")  # a worker's own, which a test compares


def home() -> Path:
    """Where models, the cluster secret and logs are kept: `KVRELAY_HOME`, or the user's cache folder."""
    given = os.environ.get("KVRELAY_HOME")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvrelay"


def prepare(name: str) -> dict[str, str]:
    """The family's folders (`small`, `large`, `bundle`), made if need be; progress goes to standard output."""
    with TemporaryDirectory() as scratch:
        result = Path(scratch) / "folders.json"
        done = subprocess.run([sys.executable, "-m", "tools.cli", "prepare", name, "--json", str(result)])
        if done.returncode:
            raise StackError(f"the family {name!r} could not be prepared (status {done.returncode}); see above")
        folders: dict[str, str] = json.loads(result.read_text())
        return folders


def map_speed(name: str) -> dict[str, Any]:
    """What `kvrelay bundle speed` measures of the family's bundle, in a process of its own."""
    with TemporaryDirectory() as scratch:
        result = Path(scratch) / "speed.json"
        command = [sys.executable, "-m", "tools.cli", "bundle", "speed", name, "--json", str(result)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise StackError(f"the map of {name!r} could not be timed (status {done.returncode}); see above")
        speed: dict[str, Any] = json.loads(result.read_text())
        return speed


def cluster_secret(path: Path) -> Path:
    """The file with the secret that gateway and workers share, made with mode 0600 if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return path
    descriptor, scratch = mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(scratch, path)  # whole or not at all, and never over another's
    except FileExistsError:
        pass
    finally:
        os.unlink(scratch)
    return path


def add_engine_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=DEFAULT_ENGINE,
        help="what the family's large model runs on (default %(default)s)",
    )


def configuration(
    name: str, folders: dict[str, str], *, port: int | None = None, engine: str = DEFAULT_ENGINE
) -> dict[str, Any]:
    """The contents of a kvrelay.yaml for one family, workers on free ports, the gateway on `port` or a free one. The
    large model runs on `engine`."""
    small, large, gateway = free_ports(3)
    return {
        "tiers": [{"name": "small", "model": f"{name}-small"}, {"name": "large", "model": f"{name}-large"}],
        "workers": {
            "small-0": {
                "tier": "small",
                "name": f"{name}-small",
                "model": folders["small"],
                "url": f"http://127.0.0.1:{small}",
            },
            "large-0": {
                "tier": "large",
                "name": f"{name}-large",
                "model": folders["large"],
                "engine": engine,
                "url": f"http://127.0.0.1:{large}",
                "bundles": [folders["bundle"]],
            },
        },
        "server": {"host": "127.0.0.1", "port": port or gateway},
        "policy": {"name": "confidence"},
    }


def write(config: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
