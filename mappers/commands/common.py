"""Shared by the mapper commands: models and data, progress, files to write, and how a command ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from mappers.data import Conversation, Split, check_found, documents, stream_conversations
from mappers.errors import MapperError
from mappers.families import ModelFamily
from mappers.models import DTYPES, load_tokenizer

PROGRESS_INTERVAL_S = 5.0
INTERRUPTED = 128 + signal.SIGINT  # the shell's convention


# Models and data.


@dataclass(frozen=True)
class Pair:
    """Source and target model as folders or hub names, and conversations. `corpus` is the name of the data."""

    source: str
    target: str
    corpus: str
    conversations: Callable[[], Iterable[Conversation]]

    def documents(self, split: Split) -> Iterator[list[int]]:
        """Return the token ids of one split's conversations, by the target's tokenizer.

        Reads the first one immediately, to raise `DataUnreadable` for none before anything large is loaded.
        """
        found = documents(self.conversations(), split, load_tokenizer(self.target), say)
        return chain([next(found)], found)


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="MODEL", help="small model: a folder or a hub name")
    parser.add_argument("--target", metavar="MODEL", help="large model: a folder or a hub name")
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="JSON lines of {messages: [...]} or {text: ...}, ShareGPT JSON, plain text, a Parquet file, or a dataset: "
        "a folder, or a hub name as NAME, NAME:PART or NAME:CONFIGURATION:PART",
    )
    parser.add_argument("--device", default="cpu", help="device of the models (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the loaded models; auto keeps that of the stored weights (default %(default)s)",
    )


def check_device(name: str) -> None:
    """Raise `MapperError` for a device this machine does not have."""
    count = torch.cuda.device_count()
    allowed = ["cpu", *["cuda"] * bool(count), *(f"cuda:{index}" for index in range(count))]
    if name not in allowed:
        raise MapperError(f"device is {name!r}; allowed here: {', '.join(allowed)}")


def pair_of_family(family: ModelFamily, options: argparse.Namespace) -> Pair:
    """Prepare the family and return its models and data; `--data` replaces the data."""
    corpus, conversations = _data(options.data) if options.data else (family.corpus, family.conversations)
    family.prepare(say)
    return Pair(str(family.source), str(family.target), corpus, conversations)


def pair_of_options(options: argparse.Namespace) -> Pair:
    """Return the pair named by the options. Raises `MapperError` for a missing one."""
    missing = [f"--{name}" for name in ("source", "target", "data") if getattr(options, name) is None]
    if missing:
        raise MapperError(f"{', '.join(missing)} missing; name them, or a family")
    return Pair(options.source, options.target, *_data(options.data))


def _data(path: str) -> tuple[str, Callable[[], Iterable[Conversation]]]:
    """Return the data's name and a function that reads it."""
    check_found(path)
    return Path(path).name, partial(stream_conversations, path)


def token_counts(text: str) -> tuple[int, ...]:
    """Parse an argument such as `384,1024`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: token counts such as 384,1024")
    return tuple(map(int, parts))


# Progress.


def say(line: str) -> None:
    """Print progress to stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


class Meter:
    """Prints progress and the estimated remaining time every few seconds."""

    def __init__(self, unit: str):
        self._unit = unit
        self._printed_at = time.monotonic()
        self._first: tuple[float, int] | None = None  # time and count of the first call; a resumed fit starts above 0

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        began, done_before = self._first = self._first or (now, done)
        is_finished = total is not None and done >= total
        if now - self._printed_at < PROGRESS_INTERVAL_S and not is_finished:
            return
        self._printed_at = now
        if total is None:
            say(f"{done} {self._unit}")
        else:
            left = max(0, total - done)
            rest_s = (now - began) * left / max(1, done - done_before)
            say(f"{done} of {total} {self._unit}" + (f", {rest_s:.0f} s left" if done > done_before else ""))


# Files to write.


def check_writable(*paths: Path | None) -> None:
    """Raise `MapperError` for a file that cannot be written, before there is anything to write. Skips None."""
    for path in filter(None, paths):
        if path.is_dir():
            raise MapperError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise MapperError(f"cannot write {path}: the folder {path.parent} does not exist")
        if not path.exists():
            check_writable_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise MapperError(f"cannot write {path}: permission denied")


def check_writable_folder(folder: str | Path) -> None:
    """Raise `MapperError` unless a file can be created in this folder. Creates a temporary one."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MapperError(f"cannot write to {folder}: {error.strerror}") from error


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MapperError(f"cannot write {path}: {error.strerror}") from error


# How a command ends.


def run(name: str, work: Callable[[], None]) -> int:
    """Run `kvrelay name` and return its exit status. User errors and Ctrl-C are reported in one line."""
    try:
        work()
    except (MapperError, OSError) as error:
        print(f"kvrelay {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"kvrelay {name}: interrupted" + (f"; {interrupt}" if interrupt.args else ""), file=sys.stderr)
        return INTERRUPTED
    return 0


@contextmanager
def resumable(file: Path | None) -> Iterator[None]:
    """Add to an interrupt in the block whether the next run can resume from `file`."""
    try:
        yield
    except KeyboardInterrupt:
        message = f"the same command resumes from {file}" if file and file.exists() else "nothing was saved"
        raise KeyboardInterrupt(message) from None
