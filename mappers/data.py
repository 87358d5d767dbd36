"""Conversations to fit and evaluate mappers on: read from files, split by a hash, rendered to tokens.

Files are read lazily: JSON lines of `{"messages": [{"role", "content"}]}` or `{"text"}`; a ShareGPT-style JSON array of
`{"conversations": [{"from", "value"}]}`; or plain text, cut into passages. A file may be truncated, and compressed by
gzip. A folder, a Parquet file, or a name that is not a file is a Hugging Face dataset with rows of the same forms; this
requires the package `datasets`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Literal

import jinja2

from mappers.errors import DataUnreadable, UnsupportedModel

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
SAVED_DATASET, SAVED_PARTS = "state.json", "dataset_dict.json"  # files that `save_to_disk` writes
PARQUET, GZIP = b"PAR1", b"\x1f\x8b"  # first bytes of such files
ALLOWED = "allowed: JSON lines, ShareGPT JSON, plain text, Parquet, a dataset's folder or its name on the hub"

Conversation = list[dict[str, str]]
Split = Literal["heal", "calibrate", "tune", "test"]

SHARES: dict[Split, int] = {"heal": 60, "calibrate": 20, "tune": 10, "test": 10}  # percent
PLAIN_TEXT = "text"  # role of a plain passage, which is rendered without a chat template
PASSAGE_CHARACTERS = 12_000
PIECE_BYTES = 2**20
ROLES = dict.fromkeys(("human", "user"), "user")
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "assistant"), "assistant")
ROLES |= dict.fromkeys(("system", "developer"), "system") | {"tool": "tool"}
BETWEEN_OBJECTS = re.compile(r"[\s,\[\]]*")
LONGEST_TOKEN = 12  # characters; a truncated escape or word cannot be distinguished from an invalid one


def split_of(conversation: Conversation) -> Split:
    """Return the split of a conversation, the same in every run and file.

    Depends on its first message alone, after any system messages, which all conversations may share.
    """
    first = next((message for message in conversation if message["role"] != "system"), conversation[0])
    bucket = int(hashlib.sha256(first["content"].encode()).hexdigest()[:8], 16) % 100
    return next(name for name, end in zip(SHARES, accumulate(SHARES.values()), strict=True) if bucket < end)


def read_conversations(path: str | Path) -> list[Conversation]:
    return list(stream_conversations(path))


def stream_conversations(path: str | Path) -> Iterator[Conversation]:
    """Yield all usable conversations of a file or dataset.

    A dataset is a folder, or a hub name such as `owner/name`, optionally with the part after a colon
    (`owner/name:test`; default `train`), or its configuration and part (`owner/name:en:test`). Raises `DataUnreadable`
    without any conversation, and for a malformed one.
    """
    is_empty = True
    for conversation in _conversations(path):
        is_empty = False
        yield conversation
    if is_empty:
        raise DataUnreadable(f"{path} holds no conversation; {ALLOWED}")


def check_found(path: str | Path) -> None:
    """Raise `DataUnreadable` unless `path` is a file, a folder, or may be a dataset's name."""
    if not Path(path).exists() and not _is_hub_name(str(path)):
        raise DataUnreadable(f"cannot read {path}: the file does not exist; {ALLOWED}")


def render(conversation: Conversation, tokenizer: Any) -> list[int]:
    """Return the token ids of a conversation by the tokenizer's chat template, or of a plain passage.

    Raises `UnsupportedModel` without a template, `DataUnreadable` if the template rejects the conversation.
    """
    is_plain = conversation[0]["role"] == PLAIN_TEXT
    text = conversation[0]["content"] if is_plain else _by_template(conversation, tokenizer)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def documents(
    conversations: Iterable[Conversation], split: Split, tokenizer: Any, say: Callable[[str], None] | None = None
) -> Iterator[list[int]]:
    """Yield the token ids of the conversations of one split, in order.

    Conversations that the chat template rejects are skipped; the first is reported to `say`. Raises `DataUnreadable` if
    none remains.
    """
    numbers: Counter[Split] = Counter()
    rejected: DataUnreadable | None = None
    is_empty = True
    for conversation in conversations:
        where = split_of(conversation)
        numbers[where] += 1
        if where != split:
            continue
        try:
            ids = render(conversation, tokenizer)
        except DataUnreadable as error:
            if say and not rejected:
                say(f"skipping conversations like this: {error}")
            rejected = rejected or error
            continue
        is_empty = False
        yield ids
    if rejected and is_empty:
        raise rejected
    if is_empty:
        raise DataUnreadable(
            f"none of {numbers.total()} conversations belongs to the split {split}, which takes {SHARES[split]} of 100 "
            f"by a hash of their first message; use more conversations"
        )


def _by_template(conversation: Conversation, tokenizer: Any) -> str:
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise UnsupportedModel(f"{name} has no chat template to render conversations; allowed: plain text as data")
    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataUnreadable(f"the chat template of {name} rejects a conversation: {error}") from error
    return text


def _conversations(path: str | Path) -> Iterator[Conversation]:
    name = str(path)
    if _is_hub_name(name) or Path(path).is_dir():
        return _of_rows(_dataset(name))
    begin = _first_bytes(Path(path))
    if begin.startswith(PARQUET):
        return _of_rows(_dataset(name))
    pieces = _pieces(Path(path), is_compressed=begin.startswith(GZIP))
    first = next((piece for piece in pieces if not piece.isspace()), "")
    whole = chain([first], pieces)
    return _of_rows(_objects(path, whole)) if first.lstrip()[:1] in ("[", "{") else _passages(whole)


# Datasets.


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and HUB_NAME.fullmatch(name) is not None


def _dataset(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset: saved to a folder, a folder of data files, a single data file, or on the hub."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        what = "is not text" if Path(name).exists() else "is not a file"
        raise DataUnreadable(
            f"{name} {what}; to read it as a dataset, install the package datasets (pip install datasets)"
        ) from error
    try:
        yield from _load_dataset(datasets, name)
    except KeyError as error:
        raise DataUnreadable(f"the dataset {name!r} has no part {error}; {ALLOWED}") from error
    except (OSError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise DataUnreadable(f"cannot read the dataset {name!r}: {lines[0]}; {ALLOWED}") from error


def _load_dataset(datasets: Any, name: str) -> Iterable[Mapping[str, Any]]:
    path = Path(name)
    if (path / SAVED_PARTS).exists():
        return datasets.load_from_disk(name)["train"]  # type: ignore[no-any-return]
    if (path / SAVED_DATASET).exists():
        return datasets.load_from_disk(name)  # type: ignore[no-any-return]
    if path.is_dir():
        return datasets.load_dataset(name, split="train", streaming=True)  # type: ignore[no-any-return]
    if path.is_file():
        return datasets.load_dataset("parquet", data_files=name, split="train", streaming=True)  # type: ignore[no-any-return]
    repository, *chosen = name.split(":")
    part = chosen.pop() if chosen else "train"
    return datasets.load_dataset(repository, *chosen, split=part, streaming=True)  # type: ignore[no-any-return]


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Conversation]:
    for row in rows:
        text = row.get("text")
        if conversation := _conversation(row):
            yield conversation
        elif isinstance(text, str) and text.strip():
            yield from _passages([text])


def _conversation(item: Mapping[str, Any]) -> Conversation | None:
    """Return the messages with text of an OpenAI-style or ShareGPT-style object, None for fewer than two."""
    turns = item.get("messages") or item.get("conversations")
    if not isinstance(turns, list):
        return None
    messages = [message for turn in turns if isinstance(turn, dict) and (message := _message(turn))]
    return messages if len(messages) >= 2 else None


def _message(turn: Mapping[str, Any]) -> dict[str, str] | None:
    role, text = ROLES.get(str(turn.get("role") or turn.get("from"))), _content(turn)
    if role is None or not text.strip():
        return None
    # A lone surrogate is legal in JSON, but cannot be encoded as text.
    return {"role": role, "content": text.encode("utf-8", "replace").decode("utf-8")}


def _content(turn: Mapping[str, Any]) -> str:
    """Return the text of a message, or of its text parts."""
    content = turn.get("content") or turn.get("value")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


# Files.


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max(len(PARQUET), len(GZIP)))
    except OSError as error:
        raise DataUnreadable(f"cannot read {path}: {error.strerror}") from error


def _pieces(path: Path, is_compressed: bool) -> Iterator[str]:
    """Yield the text of a file piece by piece. An incomplete character at its end is dropped."""
    opened: Callable[..., Any] = gzip.open if is_compressed else open
    decoder = getincrementaldecoder("utf-8-sig")()
    try:
        with opened(path, "rb") as file:
            while block := file.read(PIECE_BYTES):
                piece = decoder.decode(block)
                if "\0" in piece:
                    raise UnicodeError("it contains null bytes")
                yield piece
    except UnicodeError as error:
        raise DataUnreadable(f"{path} is not UTF-8 text: {error}; {ALLOWED}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnreadable(f"cannot read {path}: {error}") from error


def _objects(path: str | Path, pieces: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines or of a list. One truncated by the end of the file is dropped.

    Raises `DataUnreadable` with the line number for anything else.
    """

    def malformed(reason: str) -> DataUnreadable:
        line = 1 + num_lines + text.count("\n", 0, at)
        return DataUnreadable(f"{path}: line {line} is not a JSON object: {reason}")

    decoder, rest = json.JSONDecoder(), iter(pieces)
    text, num_lines, num_wanted = "", 0, 1  # text not parsed yet, lines before it, pieces to add
    while more := "".join(islice(rest, num_wanted)):
        text, at = text + more, 0
        while (at := _skip_separators(text, at)) < len(text):
            try:
                item, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                is_truncated = error.msg.startswith("Unterminated string")
                if is_truncated or error.pos >= len(text.rstrip()) - LONGEST_TOKEN:
                    break  # more text may complete it
                raise malformed(error.msg) from error
            if not isinstance(item, dict):
                raise malformed(f"a {type(item).__name__}")
            yield item
            at = end
        num_wanted = 1 if at else 2 * num_wanted  # doubles, so that a long object is not parsed again for every piece
        num_lines += text.count("\n", 0, at)
        text = text[at:]


def _skip_separators(text: str, at: int) -> int:
    match = BETWEEN_OBJECTS.match(text, at)
    assert match  # it may be empty
    return match.end()


def _passages(pieces: Iterable[str]) -> Iterator[Conversation]:
    """Cut plain text at line ends into passages of about `PASSAGE_CHARACTERS`."""
    passage: list[str] = []
    length = 0
    for line in _lines(pieces):
        passage.append(line)
        length += len(line)
        if length >= PASSAGE_CHARACTERS:
            yield [{"role": PLAIN_TEXT, "content": "".join(passage)}]
            passage, length = [], 0
    if "".join(passage).strip():
        yield [{"role": PLAIN_TEXT, "content": "".join(passage)}]


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Yield lines with their ends."""
    last = ""
    for piece in pieces:
        *whole, last = (last + piece).splitlines(keepends=True) or [""]
        yield from whole
    yield last
