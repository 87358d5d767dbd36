"""The embedded families: pairs of models that are at hand on a fresh machine, each with its fitted bundle.

A family is registered under the entry-point group `kvrelay.families`; the entry is a function without arguments that
returns its `Family`. Asking for one computes nothing: `prepare` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


@dataclass(frozen=True)
class Family:
    """A small and a large model of one family, as folders in the Hugging Face layout, and the bundle between them.

    `prepare(say)` makes the folders if they are not there yet, telling its progress; `conversations()` gives the text
    that the family's bundle is fitted and evaluated on, as lists of OpenAI messages.
    """

    name: str
    source: Path
    target: Path
    bundle: Path
    corpus: str
    prepare: Callable[[Say], None]
    conversations: Callable[[], list[Any]]
