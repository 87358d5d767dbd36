"""JSON objects that follow one another in a text, as lines or as a list, read piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

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
