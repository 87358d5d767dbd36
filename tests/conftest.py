"""What all tests share: a tool that is missing is told at the end with its install line, or fails the run.

`KVRELAY_REQUIRE=all` (as CI sets it) turns a missing tool into a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

INSTALL_LINES = {"redis-server": "apt-get install redis-server   (or: brew install redis)"}

_missing = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_missing] = {}


@pytest.fixture(scope="session")
def require_tool(pytestconfig: pytest.Config) -> Callable[[str], str]:
    """`require_tool("redis-server")` is the tool's path; without the tool the test is skipped, or fails in CI."""

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is not None:
            return path
        install = INSTALL_LINES[name]
        pytestconfig.stash[_missing][name] = install
        if os.environ.get("KVRELAY_REQUIRE") == "all":
            pytest.fail(f"{name} is missing and KVRELAY_REQUIRE=all; install it with: {install}")
        pytest.skip(f"{name} is missing; install it with: {install}")

    return require


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash[_missing]
    if not missing:
        return
    terminalreporter.section("tests that need a missing tool did not run")
    for name, install in sorted(missing.items()):
        terminalreporter.write_line(f"{name}: {install}")
