"""The default configuration: an embedded family, one worker each for its small and large model, one gateway.

`kvrelay prepare` makes the family's models in a process of its own, because that needs torch and this module does not.
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

from gateway.settings import Settings, load
from tools.stack import StackError, free_ports
from workers.api.config import read_secret

DEFAULT_FAMILY = "smol"
DEFAULT_ENGINE = "transformers"
ENGINES = (DEFAULT_ENGINE, "vllm")  # a test compares these with the worker's


def home() -> Path:
    """Return the folder of models, cluster secret and logs: `KVRELAY_HOME`, or one in the user's cache folder."""
    given = os.environ.get("KVRELAY_HOME")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvrelay"


def prepare(name: str) -> dict[str, str]:
    """Make the family's models if needed. Returns its folders `small`, `large`, `bundle`. Raises `StackError`."""
    return _run_command("prepare", name)


def map_speed(name: str) -> dict[str, Any]:
    """Return what `kvrelay bundle speed` measures for the family's bundle. Raises `StackError`."""
    return _run_command("bundle", "speed", name, stdout=subprocess.DEVNULL)


def _run_command(*arguments: str, stdout: int | None = None) -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        done = subprocess.run([sys.executable, "-m", "tools.cli", *arguments, "--json", str(result)], stdout=stdout)
        if done.returncode:
            raise StackError(f"kvrelay {' '.join(arguments)} failed with status {done.returncode}; see above")
        content: dict[str, Any] = json.loads(result.read_text())
        return content


# The cluster secret


def cluster_secret(path: Path) -> Path:
    """Make the file with the secret of gateway and workers, with mode 0600, unless it exists. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return path
    descriptor, scratch = mkstemp(dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(scratch, path)  # all or nothing, and never over another process's file
    except FileExistsError:
        pass
    finally:
        os.unlink(scratch)
    return path


def secret_file(settings: Settings) -> Path:
    """Return the configured secret file, or, where it is missing, the one made by `kvrelay up`."""
    own = home() / "secret"
    return settings.secret_file if settings.secret_file.exists() or not own.exists() else own


# kvrelay.yaml


def add_engine_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=ENGINES, default=DEFAULT_ENGINE, help="engine of the large model (default %(default)s)"
    )


def configuration(
    name: str, folders: dict[str, str], *, port: int | None = None, engine: str = DEFAULT_ENGINE
) -> dict[str, Any]:
    """Return the contents of a kvrelay.yaml for one family: workers on free ports, the gateway on `port` or a free one,
    the large model on `engine`."""
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


def load_usable(path: Path) -> Settings:
    """Load a kvrelay.yaml and check everything a gateway needs to start, except the cluster secret. Raises
    `SettingsError`."""
    settings = load(path)
    settings.check_bind()
    if settings.admin.key_file is not None:
        read_secret(settings.admin.key_file, "admin.key_file")
    return settings
