"""What measuring commands share: a stack of their own, option types, and where a figure was measured."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tools import family
from tools.client import RequestFailed
from tools.output import run_command
from tools.stack import Stack, StackError, stop_on_signals

MIN_LENGTH = 64  # tokens of a document


def run(command: str, work: Callable[[], int]) -> int:
    """Do what `run_command` does, and expect that the stack or a request may fail."""
    stop_on_signals()
    return run_command(command, work, StackError, RequestFailed, httpx.HTTPError)


@contextmanager
def own_stack(command: str, config: dict[str, Any]) -> Iterator[tuple[Stack, str]]:
    """Run a stack with this configuration for the block. Yields the ready stack and its cluster secret."""
    with TemporaryDirectory(prefix=f"kvrelay-{command}-") as folder:
        scratch = Path(folder)
        secret = family.cluster_secret(scratch / "secret")
        with Stack(family.write(config, scratch / "kvrelay.yaml"), secret, scratch) as stack:
            stack.wait_ready(lambda line: print(f"  {line}", flush=True))
            yield stack, secret.read_text().strip()


# Where it was measured


def report(rows: Sequence[Any], summary: Any) -> dict[str, Any]:
    """Return the rows (dataclasses) and their summary, with the machine and the commit."""
    return {"machine": machine(), "commit": commit(), "rows": [asdict(row) for row in rows], "summary": summary}


def machine() -> dict[str, Any]:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    processor = next((line.split(":")[1].strip() for line in names), platform.processor())
    return {"processor": processor, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def commit() -> str | None:
    """Return the commit of this checkout, None outside of one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


# Option types


def count(text: str, minimum: int = 1) -> int:
    """Parse an integer of at least `minimum`."""
    if not text.strip().isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least {minimum}")
    return int(text)


def counts(text: str, minimum: int = 1) -> list[int]:
    """Parse comma-separated integers of at least `minimum`."""
    try:
        return [count(part, minimum) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be comma-separated integers of at least {minimum}") from error


length = partial(count, minimum=MIN_LENGTH)
lengths = partial(counts, minimum=MIN_LENGTH)
