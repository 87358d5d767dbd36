"""What `kvrelay fit` and `kvrelay eval` work on: two models and text, named one by one or as a family."""

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
from mappers.models import LOADED, load_tokenizer

EVERY_S = 5.0


@dataclass(frozen=True)
class Pair:
    """Source and target as folders or hub names, and the conversations at hand, `corpus` by name."""

    source: str
    target: str
    corpus: str
    conversations: Callable[[], Iterable[Conversation]]

    def documents(self, split: Split) -> Iterator[list[int]]:
        """Token ids of one split's conversations, by the target's tokenizer.

        The first is read at once: raises `DataUnreadable` if there is none, before anything large is loaded.
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
        "a folder, or NAME, NAME:PART or NAME:CONFIGURATION:PART of the hub",
    )
    parser.add_argument("--device", default="cpu", help="where the models run (default %(default)s)")
    parser.add_argument(
        "--dtype", choices=LOADED, default="float32", help="of the loaded models (default %(default)s; auto: as stored)"
    )


def check_device(name: str) -> None:
    """Raise `MapperError` for what is no device of this machine."""
    count = torch.cuda.device_count()
    allowed = ["cpu", *["cuda"] * bool(count), *(f"cuda:{index}" for index in range(count))]
    if name not in allowed:
        raise MapperError(f"device is {name!r}; allowed here: {', '.join(allowed)}")


def pair_of_family(family: ModelFamily, options: argparse.Namespace) -> Pair:
    """The family's own models and text, prepared; `--data` replaces the text."""
    corpus, conversations = _data(options.data) if options.data else (family.corpus, family.conversations)
    family.prepare(say)
    return Pair(str(family.source), str(family.target), corpus, conversations)


def pair_of_options(options: argparse.Namespace) -> Pair:
    """The pair that the options name. Raises `MapperError` for one that is missing."""
    missing = [f"--{name}" for name in ("source", "target", "data") if getattr(options, name) is None]
    if missing:
        raise MapperError(f"{', '.join(missing)} missing; without them, name a family")
    return Pair(options.source, options.target, *_data(options.data))


def say(line: str) -> None:
    """Tell progress on stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


class Meter:
    """Says how far a count has come and how long the rest will take, every few seconds."""

    def __init__(self, unit: str):
        self._unit = unit
        self._said = time.monotonic()
        self._first: tuple[float, int] | None = None  # when, and how much was done by then: a resumed fit begins high

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        began, done_before = self._first = self._first or (now, done)
        finished = total is not None and done >= total
        if now - self._said < EVERY_S and not finished:
            return
        self._said = now
        if total is None:
            say(f"{done} {self._unit}")
        else:
            left = max(0, total - done)
            rest_s = (now - began) * left / max(1, done - done_before)
            say(f"{done} of {total} {self._unit}" + (f", {rest_s:.0f} s to go" if done > done_before else ""))


def _data(path: str) -> tuple[str, Callable[[], Iterable[Conversation]]]:
    """Its name, and what reads it."""
    check_found(path)
    return Path(path).name, partial(stream_conversations, path)


def numbers(text: str) -> tuple[int, ...]:
    """Of tokens, as an argument tells them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers of tokens, as in 384,1024")
    return tuple(map(int, parts))


def check_writable(*paths: Path | None) -> None:
    """Raise `MapperError` for a file that can't be written, before there is anything to write; None is none."""
    for path in filter(None, paths):
        if path.is_dir():
            raise MapperError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise MapperError(f"cannot write {path}: there is no folder {path.parent}")
        if not path.exists():
            check_writable_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise MapperError(f"cannot write {path}: permission denied")


def check_writable_folder(folder: str | Path) -> None:
    """Raise `MapperError` unless a file can be made in this folder: one is, and is gone again."""
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


INTERRUPTED = 128 + signal.SIGINT  # as a shell has it


def run(name: str, work: Callable[[], None]) -> int:
    """Do the work of `kvrelay name`; its exit status."""
    try:
        work()
    except (MapperError, OSError) as error:
        return _told(name, str(error), 1)
    except KeyboardInterrupt as interrupt:
        return _told(name, f"interrupted; {interrupt}" if interrupt.args else "interrupted", INTERRUPTED)
    return 0


@contextmanager
def resumable(kept: Path | None) -> Iterator[None]:
    """If this is interrupted, the file that was kept is told: the next run goes on from there."""
    try:
        yield
    except KeyboardInterrupt:
        what = f"the same command goes on from {kept}" if kept and kept.exists() else "nothing was kept"
        raise KeyboardInterrupt(what) from None


def _told(name: str, what: str, status: int) -> int:
    print(f"kvrelay {name}: {what}", file=sys.stderr)
    return status
