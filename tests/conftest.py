"""What all tests share: a tool that is missing is told at the end with its install line, or fails the run.

`KVRELAY_REQUIRE=all` (as CI sets it) turns a missing tool into a failure. A GPU cannot be installed: without one, tests
marked `gpu` are skipped, and counted at the end.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable

import pytest

# The models of the tests are tiny: a second thread only waits for the first. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

INSTALL_LINES = {
    "redis-server": "apt-get install redis-server   (or: brew install redis)",
    "promtool": "apt-get install prometheus   (or: brew install prometheus)",
    "prometheus": "apt-get install prometheus   (or: brew install prometheus)",
    "unshare": "apt-get install util-linux   (Linux only)",
}

NO_GPU = "needs a CUDA device"


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """`require_tool("redis-server")` is the tool's path; without the tool the test is skipped, or fails in CI."""

    def require(name: str) -> str:
        path = shutil.which(name)
        if path is not None:
            return path
        install = INSTALL_LINES[name]
        if os.environ.get("KVRELAY_REQUIRE") == "all":
            pytest.fail(f"{name} is missing and KVRELAY_REQUIRE=all; install it with: {install}")
        pytest.skip(f"{name} is missing; install it with: {install}")

    return require


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests, a file stays together, for its fixtures, and so do those that share a stack."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "e2e" else str(item.path)))
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not _has_gpu():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _has_gpu() -> bool:
    import torch  # noqa: TID251 - and only where a test asks for it: it takes seconds

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    wanting = {why: n for why, n in reasons.items() if why == NO_GPU or "; install it with: " in why}
    if not wanting:
        return
    terminalreporter.section("tests that did not run for want of a tool")
    for why, count in sorted(wanting.items()):
        terminalreporter.write_line(f"{count} tests: {why}")
