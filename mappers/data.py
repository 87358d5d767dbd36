"""Conversations to fit and judge mappers on: read from files, split for good by a hash, rendered to tokens.

Three forms of file are read: JSON lines of `{"messages": [{"role", "content"}]}`, a ShareGPT-style JSON array of
`{"conversations": [{"from", "value"}]}` (also one that is cut short), and plain text, cut into passages. A folder, or a
name that is no file, is a Hugging Face dataset of rows in the same two forms, or of texts; that needs the package
`datasets`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from mappers.errors import DataUnreadable

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:\w+)?")
SAVED_DATASET, SAVED_PARTS = "state.json", "dataset_dict.json"  # what `save_to_disk` writes beside the data
ALLOWED = "allowed: JSON lines, ShareGPT JSON, plain text, a dataset's folder or its name on the hub"

Conversation = list[dict[str, str]]
Split = Literal["heal", "calibrate", "tune", "test"]

# Below 60 of 100: heal; then 20 calibrate, 10 tune, 10 test.
SPLIT_BOUNDS: tuple[tuple[int, Split], ...] = ((60, "heal"), (80, "calibrate"), (90, "tune"), (100, "test"))
PLAIN_TEXT = "text"  # role of a passage that is no conversation: rendered as it stands
PASSAGE_CHARACTERS = 12_000
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def split_of(conversation: Conversation) -> Split:
    """Which part of the data a conversation belongs to, by its first message alone: the same in every run and file."""
    digest = hashlib.sha256(conversation[0]["content"].encode()).hexdigest()
    bucket = int(digest[:8], 16) % 100
    return next(name for bound, name in SPLIT_BOUNDS if bucket < bound)


def read_conversations(path: str | Path) -> list[Conversation]:
    """All usable conversations of a file, or of a dataset: a folder, or a name on the hub like `owner/name`, with the
    part to read behind a colon (`owner/name:test`; by default `train`). Raises `DataUnreadable` if there are none."""
    if Path(path).is_dir() or _is_hub_name(str(path)):
        found = list(_rows_read(_dataset(str(path))))
    else:
        found = list(_conversations(_read(Path(path))))
    if not found:
        raise DataUnreadable(f"{path} holds no conversation; {ALLOWED}")
    return found


def render(conversation: Conversation, tokenizer: Any) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template; of a plain passage, as it stands."""
    if conversation[0]["role"] == PLAIN_TEXT:
        text = conversation[0]["content"]
    else:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def documents(conversations: Iterable[Conversation], split: Split, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of the conversations of one split, lazily, in order."""
    return (render(talk, tokenizer) for talk in conversations if split_of(talk) == split)


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and HUB_NAME.fullmatch(name) is not None


def _dataset(name: str) -> Iterable[Mapping[str, Any]]:
    """Rows of a dataset: one that was saved to a folder, a folder of data files, or one of the hub."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise DataUnreadable(
            f"{name} is no file; to read it as a dataset, install the package datasets (pip install datasets)"
        ) from error
    folder, _, part = (name, "", "train") if Path(name).is_dir() else name.partition(":")
    try:
        if (Path(folder) / SAVED_DATASET).exists() or (Path(folder) / SAVED_PARTS).exists():
            found = datasets.load_from_disk(folder)
            rows = found[part] if (Path(folder) / SAVED_PARTS).exists() else found
        else:
            rows = datasets.load_dataset(folder, split=part or "train")
    except (OSError, ValueError, KeyError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise DataUnreadable(f"no dataset at {name!r}: {told[0]}; {ALLOWED}") from error
    return rows  # type: ignore[no-any-return]


def _rows_read(rows: Iterable[Mapping[str, Any]]) -> Iterator[Conversation]:
    for row in rows:
        text = row.get("text")
        if isinstance(text, str) and text.strip():
            yield from _passages(text)
        elif talk := _conversation(row):
            yield talk


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataUnreadable(f"cannot read {path}: {error.strerror}") from error


def _conversations(text: str) -> Iterator[Conversation]:
    if text.lstrip()[:1] not in ("[", "{"):
        yield from _passages(text)
        return
    for item in _objects(text):
        talk = _conversation(item)
        if talk:
            yield talk


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects that follow one another in `text`, with anything between, up to the first broken one."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield item
        at = text.find("{", end)


def _conversation(item: Mapping[str, Any]) -> Conversation | None:
    """Messages with text of an OpenAI-style or a ShareGPT-style object; None if fewer than two are left."""
    turns = item.get("messages") or item.get("conversations")
    if not isinstance(turns, list):
        return None
    talk = [message for turn in turns if isinstance(turn, dict) and (message := _message(turn))]
    return talk if len(talk) >= 2 else None


def _message(turn: Mapping[str, Any]) -> dict[str, str] | None:
    role, text = ROLES.get(str(turn.get("role") or turn.get("from"))), turn.get("content") or turn.get("value")
    if role is None or not isinstance(text, str) or not text.strip():
        return None
    # Half a surrogate pair is legal JSON, but no text: nothing can encode it.
    return {"role": role, "content": text.encode("utf-8", "replace").decode("utf-8")}


def _passages(text: str) -> Iterator[Conversation]:
    """Plain text cut at line ends into passages of about `PASSAGE_CHARACTERS`."""
    passage: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        passage.append(line)
        length += len(line)
        if length >= PASSAGE_CHARACTERS:
            yield [{"role": PLAIN_TEXT, "content": "".join(passage)}]
            passage, length = [], 0
    if "".join(passage).strip():
        yield [{"role": PLAIN_TEXT, "content": "".join(passage)}]
