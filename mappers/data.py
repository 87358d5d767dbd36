"""Conversations to fit and judge mappers on: read from files, split for good by a hash, rendered to tokens.

They are read one after another from JSON lines of `{"messages": [{"role", "content"}]}` or of `{"text"}`, a
ShareGPT-style JSON array of `{"conversations": [{"from", "value"}]}` (either also cut short), and plain text, cut into
passages; all of these may be packed by gzip. A folder, a Parquet file, or a name that is no file, is a Hugging Face
dataset of rows in the same forms; that needs the package `datasets`.
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
SAVED_DATASET, SAVED_PARTS = "state.json", "dataset_dict.json"  # what `save_to_disk` writes beside the data
PARQUET, GZIP = b"PAR1", b"\x1f\x8b"  # how such files begin
ALLOWED = "allowed: JSON lines, ShareGPT JSON, plain text, Parquet, a dataset's folder or its name on the hub"

Conversation = list[dict[str, str]]
Split = Literal["heal", "calibrate", "tune", "test"]

SHARES: dict[Split, int] = {"heal": 60, "calibrate": 20, "tune": 10, "test": 10}  # of 100
PLAIN_TEXT = "text"  # role of a passage that is no conversation: rendered as it stands
PASSAGE_CHARACTERS = 12_000
PIECE_BYTES = 2**20
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}


def split_of(conversation: Conversation) -> Split:
    """Which part of the data a conversation belongs to, the same in every run and file: by its first message alone, or
    the first behind a system message, which all of them may share."""
    first = next((message for message in conversation if message["role"] != "system"), conversation[0])
    bucket = int(hashlib.sha256(first["content"].encode()).hexdigest()[:8], 16) % 100
    return next(name for name, end in zip(SHARES, accumulate(SHARES.values()), strict=True) if bucket < end)


def read_conversations(path: str | Path) -> list[Conversation]:
    """All that `stream_conversations` gives."""
    return list(stream_conversations(path))


def stream_conversations(path: str | Path) -> Iterator[Conversation]:
    """All usable conversations of a file, or of a dataset: a folder, or a name on the hub like `owner/name`, with the
    part to read behind a colon (`owner/name:test`; by default `train`), or its configuration and the part
    (`owner/name:en:test`). Raises `DataUnreadable` if there are none, or where one is broken."""
    is_empty = True
    for talk in _conversations(path):
        is_empty = False
        yield talk
    if is_empty:
        raise DataUnreadable(f"{path} holds no conversation; {ALLOWED}")


def check_found(path: str | Path) -> None:
    """Raise `DataUnreadable` for what is neither a file, nor a folder, nor may be a dataset's name."""
    if not Path(path).exists() and not _is_hub_name(str(path)):
        raise DataUnreadable(f"cannot read {path}: there is no such file; {ALLOWED}")


def render(conversation: Conversation, tokenizer: Any) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template; of a plain passage, as it stands.

    Raises `UnsupportedModel` if there is no template, `DataUnreadable` if it refuses the conversation.
    """
    is_plain = conversation[0]["role"] == PLAIN_TEXT
    text = conversation[0]["content"] if is_plain else _by_template(conversation, tokenizer)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def documents(
    conversations: Iterable[Conversation], split: Split, tokenizer: Any, say: Callable[[str], None] | None = None
) -> Iterator[list[int]]:
    """Token ids of the conversations of one split, lazily, in order.

    Those that the chat template refuses are left out, and `say` is told of the first. Raises `DataUnreadable` if none
    is left.
    """
    numbers: Counter[Split] = Counter()
    refused: DataUnreadable | None = None
    is_empty = True
    for talk in conversations:
        where = split_of(talk)
        numbers[where] += 1
        if where != split:
            continue
        try:
            ids = render(talk, tokenizer)
        except DataUnreadable as error:
            if say and not refused:
                say(f"left out, as all are that it refuses: {error}")
            refused = refused or error
            continue
        is_empty = False
        yield ids
    if refused and is_empty:
        raise refused
    if is_empty:
        raise DataUnreadable(
            f"none of {numbers.total()} conversations belongs to the split {split}, which takes {SHARES[split]} of 100 "
            f"by a hash of how they begin; allowed: more of them"
        )


def _by_template(conversation: Conversation, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise UnsupportedModel(
            f"{tokenizer.name_or_path} has no chat template to render conversations by; allowed: plain text as data"
        )
    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        whose = tokenizer.name_or_path
        raise DataUnreadable(f"the chat template of {whose} refuses a conversation: {error}") from error
    return text


def _conversations(path: str | Path) -> Iterator[Conversation]:
    name = str(path)
    if _is_hub_name(name) or Path(path).is_dir():
        return _of_rows(_dataset(name))
    begin = _beginning(Path(path))
    if begin.startswith(PARQUET):
        return _of_rows(_dataset(name))
    pieces = _pieces(Path(path), is_packed=begin.startswith(GZIP))
    first = next((piece for piece in pieces if not piece.isspace()), "")
    whole = chain([first], pieces)
    return _of_rows(_located(path, whole)) if first.lstrip()[:1] in ("[", "{") else _passages(whole)


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and HUB_NAME.fullmatch(name) is not None


def _dataset(name: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a dataset: one that was saved to a folder, a folder of data files or one such file, or one of the hub."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        what = "holds no text" if Path(name).exists() else "is no file"
        raise DataUnreadable(
            f"{name} {what}; to read it as a dataset, install the package datasets (pip install datasets)"
        ) from error
    try:
        yield from _loaded(datasets, name)
    except KeyError as error:
        raise DataUnreadable(f"the dataset {name!r} has no part {error}; {ALLOWED}") from error
    except (OSError, ValueError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise DataUnreadable(f"cannot read the dataset {name!r}: {told[0]}; {ALLOWED}") from error


def _loaded(datasets: Any, name: str) -> Iterable[Mapping[str, Any]]:
    """From where they lie, as far as they are asked for."""
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
        if talk := _conversation(row):
            yield talk
        elif isinstance(text, str) and text.strip():
            yield from _passages([text])


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max(len(PARQUET), len(GZIP)))
    except OSError as error:
        raise DataUnreadable(f"cannot read {path}: {error.strerror}") from error


def _pieces(path: Path, is_packed: bool) -> Iterator[str]:
    """The text of a file; half a character at its end is left out."""
    opened: Callable[..., Any] = gzip.open if is_packed else open
    decoder = getincrementaldecoder("utf-8-sig")()
    try:
        with opened(path, "rb") as file:
            while block := file.read(PIECE_BYTES):
                yield _text(decoder.decode(block))
    except UnicodeError as error:
        raise DataUnreadable(f"{path} is no UTF-8 text: {error}; {ALLOWED}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataUnreadable(f"cannot read {path}: {error}") from error


def _text(piece: str) -> str:
    if "\0" in piece:
        raise UnicodeError("it holds zeros")
    return piece


def _located(path: str | Path, pieces: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from objects(pieces)
    except BrokenObject as error:
        raise DataUnreadable(f"{path}: {error}") from error


def _conversation(item: Mapping[str, Any]) -> Conversation | None:
    """Messages with text of an OpenAI-style or a ShareGPT-style object; None if fewer than two are left."""
    turns = item.get("messages") or item.get("conversations")
    if not isinstance(turns, list):
        return None
    talk = [message for turn in turns if isinstance(turn, dict) and (message := _message(turn))]
    return talk if len(talk) >= 2 else None


def _message(turn: Mapping[str, Any]) -> dict[str, str] | None:
    role, text = ROLES.get(str(turn.get("role") or turn.get("from"))), _content(turn)
    if role is None or not text.strip():
        return None
    # Half a surrogate pair is legal JSON, but no text: nothing can encode it.
    return {"role": role, "content": text.encode("utf-8", "replace").decode("utf-8")}


def _content(turn: Mapping[str, Any]) -> str:
    """The text of a message, or of the parts of it that have one."""
    content = turn.get("content") or turn.get("value")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _passages(pieces: Iterable[str]) -> Iterator[Conversation]:
    """Plain text cut at line ends into passages of about `PASSAGE_CHARACTERS`."""
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
    """Of a text, with their ends."""
    last = ""
    for piece in pieces:
        *whole, last = (last + piece).splitlines(keepends=True) or [""]
        yield from whole
    yield last


BETWEEN = re.compile(r"[\s,\[\]]*")  # what may stand between two of them
LONGEST_TOKEN = 12  # characters: an escape or a word that is cut can't be told from one that is wrong


class BrokenObject(ValueError):
    """What stands where an object should is none. The message names the line, counted from 1."""


def objects(pieces: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every object in turn; one that the end of the text cuts off is left out. Raises `BrokenObject`."""
    decoder, rest = json.JSONDecoder(), iter(pieces)
    text, num_lines, num_wanted = "", 0, 1  # not read yet, lines before it, pieces to add
    while more := "".join(islice(rest, num_wanted)):
        text, at = text + more, 0
        while (at := _behind_gap(text, at)) < len(text):
            try:
                item, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if _is_cut(text, error):
                    break
                raise BrokenObject(_told(text, at, num_lines, error.msg)) from error
            if not isinstance(item, dict):
                raise BrokenObject(_told(text, at, num_lines, f"a {type(item).__name__}"))
            yield item
            at = end
        num_wanted = 1 if at else 2 * num_wanted  # a long object is not tried again and again
        num_lines += text.count("\n", 0, at)
        text = text[at:]


def _behind_gap(text: str, at: int) -> int:
    gap = BETWEEN.match(text, at)
    assert gap  # it may be empty
    return gap.end()


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether more text could mend it."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - LONGEST_TOKEN


def _told(text: str, at: int, num_lines: int, reason: str) -> str:
    line = 1 + num_lines + text.count("\n", 0, at)
    return f"line {line} begins what is no JSON object: {reason}"
