"""A value as an error tells it: shortened, and a URL without the password in it. However large the value is, for YAML's
anchors make a few lines of a file into billions of items."""

from __future__ import annotations

import re
from reprlib import Repr
from typing import Any

CREDENTIALS = re.compile(r"//.*@")  # in a URL
SHOWN_CHARS = 200


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, SHOWN_CHARS, SHOWN_CHARS

    def repr_str(self, text: str, level: int) -> str:
        return super().repr_str(CREDENTIALS.sub("//***@", text), level)


_SHORT = _Short()


def shown(value: Any) -> str:
    return _SHORT.repr(value)
