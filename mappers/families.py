"""Embedded families: named pairs of models with a bundle, registered by other packages as entry points.

An entry of group `kvrelay.families` is a function without arguments that returns a `ModelFamily`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from mappers.data import Conversation
from mappers.errors import UnknownFamily

GROUP = "kvrelay.families"


class ModelFamily(Protocol):
    """Folders of a source and a target model, the bundle between them, and the data it is fitted and evaluated on.

    `prepare` creates the model folders if they are missing; its argument prints progress. `corpus` is the data's name.
    """

    @property
    def source(self) -> Path: ...
    @property
    def target(self) -> Path: ...
    @property
    def bundle(self) -> Path: ...
    @property
    def corpus(self) -> str: ...
    @property
    def prepare(self) -> Callable[[Callable[[str], None]], None]: ...
    @property
    def conversations(self) -> Callable[[], list[Conversation]]: ...


def find_family(name: str) -> ModelFamily:
    """Return the family registered as `name`. Raises `UnknownFamily`, which lists the known ones."""
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise UnknownFamily(f"{name!r} is neither a bundle nor a family; known families: {', '.join(sorted(known))}")
    return cast(ModelFamily, known[name].load()())
