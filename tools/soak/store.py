"""A Redis of the soak's own, to be frozen, killed and started again on the same port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from tools.stack import deferred_signals
from workers.api.process import die_with_parent


class Redis:
    """A `redis-server` without persistence: after a kill it is empty. A context manager."""

    name = "redis"
    tier = None

    def __init__(self, binary: str, port: int, folder: Path):
        self._command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.url = f"redis://127.0.0.1:{port}/0"

    @staticmethod
    def binary() -> str | None:
        """Where it is installed; None where it is not."""
        return shutil.which("redis-server")

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Redis:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start()

    def _start(self) -> None:
        with deferred_signals():
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
