"""What commands share that measure something on a stack of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tools.commands import ending, family
from tools.commands.client import RequestFailed
from tools.commands.machine import commit, machine
from tools.commands.stack import Stack, StackError, stop_on_signals

MIN_LENGTH = 64  # tokens of a document


def run(command: str, work: Callable[[], int]) -> int:
    """The same as `ending.run`; the stack or a request may fail, too."""
    stop_on_signals()
    return ending.run(command, work, StackError, RequestFailed, httpx.HTTPError)


@contextmanager
def own_stack(command: str, config: dict[str, Any]) -> Iterator[tuple[Stack, str]]:
    """The stack of a kvrelay.yaml with these contents, ready, and its cluster secret; gone with the block."""
    with TemporaryDirectory(prefix=f"kvrelay-{command}-") as folder:
        scratch = Path(folder)
        secret = family.cluster_secret(scratch / "secret")
        with Stack(family.write(config, scratch / "kvrelay.yaml"), secret, scratch) as stack:
            stack.wait_ready(lambda line: print(f"  {line}", flush=True))
            yield stack, secret.read_text().strip()


def report(rows: Sequence[Any], summary: Any) -> dict[str, Any]:
    """Rows (dataclasses) and what they come to, with where they were measured."""
    return {"machine": machine(), "commit": commit(), "rows": [asdict(row) for row in rows], "summary": summary}


def repeats(text: str) -> int:
    """The value of `--repeats`."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text}: repeats are a whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    """The value of an option that counts something."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text}: needed is a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """The same, of one that counts several things."""
    parts = text.split(",")
    if not all(_is_count(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: needed are whole numbers of at least 1, parted by commas")
    return [int(part) for part in parts]


def length(text: str) -> int:
    """The value of `--length`."""
    if not _is_count(text) or int(text) < MIN_LENGTH:
        raise argparse.ArgumentTypeError(f"{text}: a length is a whole number of at least {MIN_LENGTH} tokens")
    return int(text)


def lengths(text: str) -> list[int]:
    """The value of `--lengths`."""
    parts = text.split(",")
    if not all(_is_count(part) and int(part) >= MIN_LENGTH for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text}: lengths are whole numbers of at least {MIN_LENGTH} tokens, parted by commas"
        )
    return [int(part) for part in parts]


def _is_count(text: str) -> bool:
    return text.strip().isdecimal() and int(text) >= 1
