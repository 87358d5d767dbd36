from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.composed import REPOSITORY, Composed, load, read_env


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after `deploy/init`."""
    folder = tmp_path_factory.mktemp("project")
    init(folder)
    return folder


def init(folder: Path) -> None:
    subprocess.run([REPOSITORY / "deploy" / "init", folder], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def composed(project: Path) -> Composed:
    """docker-compose.yml with the variables of `deploy/init`."""
    return load(read_env(project / ".env"))
