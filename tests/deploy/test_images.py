"""The Dockerfile: linted, the gateway's image without torch, tracing in both images."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.composed import DOCKERFILE, REPOSITORY
from deploy.installs import commands, copies, copy

IMAGES = REPOSITORY / "deploy" / "images"
WITHOUT_OTEL = "import sys; sys.modules['opentelemetry'] = None; "
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "mappers", "numpy"):
    sys.modules[name] = None
import gateway.__main__, tools.cli, gateway.state.redis, tools.commands.up
assert gateway.__file__.startswith(sys.argv[1]), gateway.__file__
"""


def test_dockerfile_passes_the_linter() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    linted = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.slow
def test_gateway_image_has_all_it_imports(tmp_path: Path) -> None:
    """No torch, no mappers, and of `workers` only `workers.api`."""
    copy("gateway-build", tmp_path)
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_copied_paths_are_in_the_build_context() -> None:
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in ("base", "build", "gateway-build", "worker-build"):
        for source, _ in copies(stage):
            assert (REPOSITORY / source).exists()
            assert any(source == one or source.startswith(f"{one}/") for one in allowed), source


def test_every_install_uses_the_constraints() -> None:
    installs = [line for image in ("gateway", "worker") for line in commands(f"{image}-build") if "pip install" in line]
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)


def test_gateway_build_fails_if_torch_can_be_imported() -> None:
    check = commands("gateway-build")[-1].rpartition("&&")[2].replace("python", sys.executable, 1)
    stopped = subprocess.run(["sh", "-c", check], cwd=REPOSITORY, capture_output=True, text=True)
    assert stopped.returncode == 1 and "AssertionError" in stopped.stderr


@pytest.mark.parametrize("image", ["gateway", "worker"])
def test_build_fails_if_tracing_cannot_start(image: str) -> None:
    *_, install, tracing, _ = (one for command in commands(f"{image}-build") for one in command.split("&&"))
    assert re.search(r"\.\[(\w+,)?otel\]", install)
    python, *options, code = shlex.split(tracing)
    assert python == "python"
    for before, status in (("", 0), (WITHOUT_OTEL, 1)):
        tried = subprocess.run([sys.executable, *options, before + code], capture_output=True, text=True)
        assert (tried.returncode, "TracingUnavailable" in tried.stderr) == (status, bool(status)), tried.stderr


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = sum(project["optional-dependencies"].values(), start=project["dependencies"])
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {_normal(line.partition("==")[0]) for line in lines if "==" in line}
    assert {_normal(Requirement(one).name) for one in required} <= pinned


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("script", ["healthy", "make-models"])
def test_scripts_are_executable(script: str) -> None:
    assert (IMAGES / script).stat().st_mode & 0o111 == 0o111
