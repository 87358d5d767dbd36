"""How much of a log's prompts is shared with earlier ones, and what keeps the rest from being.

What counts is what the gateway's registry would find: whole messages, in order, from the first one on (with the same
tools). Lengths are characters: only a worker counts tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, Field, ValidationError

from gateway.request.lookup import canonical
from tools.logs.lines import LogUnusable, objects
from workers.api.schemas import Message

BUCKETS = (0, 1_000, 4_000, 16_000, 64_000)  # characters of a prompt, from so many on
NUM_TOP = 10

# What tells one request from the next and stands in no answer; the first that matches gives the span its kind.
VOLATILE = {
    "timestamp": r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?",
    "date": r"\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}",
    "time": r"\b\d{1,2}:\d\d(?::\d\d)?\b",
    "uuid": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "hex_id": r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b",
    "number": r"\b\d{9,}\b",
}
_BEGINS = r"(?=\d|\b[0-9a-fA-F])"  # what any of them does: the rest need not be tried elsewhere
_VOLATILE = re.compile(f"{_BEGINS}(?:{'|'.join(f'(?P<{kind}>{pattern})' for kind, pattern in VOLATILE.items())})")
ALL_KINDS = frozenset(VOLATILE)
NUM_REMEMBERED = 4096  # texts: prompts that share a beginning, or belong to one conversation, have most of theirs alike

Place = tuple[str, str, int]  # kind of span, role, position of the message


@dataclass(frozen=True)
class Prompt:
    """The messages of one request, each as the gateway would hash it, and the tools before them."""

    links: tuple[bytes, ...]
    texts: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts))

    def role(self, position: int) -> str:
        """Of a message."""
        return str(orjson.loads(self.links[position + 1])["role"])

    def names(self) -> list[str]:
        """One for each beginning: `names()[i]` of the first i + 1 messages."""
        chain, names = hashlib.sha256(), []
        for link in self.links:
            chain.update(len(link).to_bytes(8, "big") + link)
            names.append(chain.hexdigest())
        return names[1:]

    def without(self, spoilers: Sequence[Spoiler]) -> Prompt:
        """The same with the kind of each volatile span in its place, where one of these stands."""
        texts, links = list(self.texts), list(self.links)
        for position in {one.position for one in spoilers if one.position < len(texts)}:
            role = self.role(position)
            kinds = frozenset(one.kind for one in spoilers if (one.position, one.role) == (position, role))
            texts[position] = masked(texts[position], kinds)
            links[position + 1] = masked(links[position + 1].decode(), kinds).encode()
        return Prompt(tuple(links), tuple(texts))


@dataclass
class Sharing:
    """Of the prompts so far: how many characters stood in an earlier one's beginning."""

    num_prompts: int = 0
    num_hits: int = 0
    chars: int = 0
    shared_chars: int = 0
    by_length: dict[int, list[int]] = field(default_factory=dict)  # bucket -> [chars, shared]
    uses: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # (messages, chars, how it begins)
    shorter: dict[str, str] = field(default_factory=dict)  # by a message

    def add(self, prompt: Prompt) -> None:
        names, shared, chars = prompt.names(), 0, 0
        for index, name in enumerate(names):
            chars += len(prompt.texts[index])
            if self.uses[name]:
                shared = chars
            self.lengths.setdefault(name, (index + 1, chars, prompt.texts[0]))
        self.uses.update(names)
        self.shorter.update(zip(names[1:], names, strict=False))
        self.num_prompts += 1
        self.num_hits += shared > 0
        self.chars += chars
        self.shared_chars += shared
        bucket = self.by_length.setdefault(max(start for start in BUCKETS if start <= chars), [0, 0])
        bucket[0] += chars
        bucket[1] += shared

    @property
    def ratio(self) -> float:
        """Characters that need not be read again."""
        return self.shared_chars / self.chars if self.chars else 0.0

    def top(self, most: int = NUM_TOP) -> list[tuple[str, int, int, int, str]]:
        """The beginnings that save most: name, times used, messages, characters, how they begin. Of two that are always
        used together, the longer one."""
        within = {shorter for name, shorter in self.shorter.items() if self.uses[name] == self.uses[shorter]}
        used = (
            (name, count, *self.lengths[name]) for name, count in self.uses.items() if count > 1 and name not in within
        )
        return sorted(used, key=lambda one: (-(one[1] - 1) * one[3], one[0]))[:most]


@dataclass(frozen=True)
class Spans:
    """Those of one kind in one message; the first stands `at` so many characters."""

    at: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Spoiler:
    """A kind of volatile span, in one message of so many `prompts`: `position` counts messages, `at` characters in it.
    """

    kind: str
    role: str
    position: int
    at: int
    prompts: int


def read_prompts(path: Path) -> list[Prompt]:
    """Lines `{"messages": [...], "tools": [...]}`, or such an object under `request` or `body`. Raises
    `LogUnusable`."""
    known: dict[bytes, tuple[bytes, str]] = {}
    prompts = [_prompt(place, line, known) for place, line in objects(path)]
    if not prompts:
        raise LogUnusable(f"{path} holds no request")
    return prompts


def sharing(prompts: Iterable[Prompt]) -> Sharing:
    found = Sharing()
    for prompt in prompts:
        found.add(prompt)
    return found


@lru_cache(NUM_REMEMBERED)
def masked(text: str, kinds: frozenset[str] = ALL_KINDS) -> str:
    return _VOLATILE.sub(lambda match: f"<{match.lastgroup}>" if match.lastgroup in kinds else match.group(), text)


def spoilers(prompts: Sequence[Prompt]) -> list[Spoiler]:
    """Where volatile spans stand in what could be shared: every message but the last one. The most frequent first; a
    span spoils nothing where all prompts that are else alike have the same."""
    groups: dict[tuple[Place, str], list[Spans]] = {}
    for prompt in prompts:
        for position, text in enumerate(prompt.texts[:-1]):
            for kind, spans in _spans(text).items():
                place = (kind, prompt.role(position), position)
                groups.setdefault((place, masked(text)), []).append(spans)
    places: dict[Place, list[Spans]] = {}
    for (place, _), alike in groups.items():
        if len({spans.texts for spans in alike}) > 1:
            places.setdefault(place, []).extend(alike)
    found = [Spoiler(*place, min(spans.at for spans in there), len(there)) for place, there in places.items()]
    return sorted(found, key=lambda one: (-one.prompts, one.position, one.at))


@lru_cache(NUM_REMEMBERED)
def _spans(text: str) -> dict[str, Spans]:
    """By their kind."""
    found: dict[str, list[re.Match[str]]] = {}
    for match in _VOLATILE.finditer(text):
        found.setdefault(str(match.lastgroup), []).append(match)
    return {kind: Spans(one[0].start(), tuple(match.group() for match in one)) for kind, one in found.items()}


class _Request(BaseModel):
    """What counts of a chat completion's body."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


def _prompt(place: str, line: dict[str, Any], known: dict[bytes, tuple[bytes, str]]) -> Prompt:
    """A message that is `known` takes no memory again."""
    request = _request(place, line.get("request", line.get("body", line)))
    try:
        tools = orjson.dumps(request.tools or [], option=orjson.OPT_SORT_KEYS)
        links = [canonical(message) for message in request.messages]
    except TypeError as error:
        raise LogUnusable(f"{place} is nested too deep") from error
    kept = [known.setdefault(link, (link, one.text)) for link, one in zip(links, request.messages, strict=True)]
    return Prompt((tools, *(link for link, _ in kept)), tuple(text for _, text in kept))


def _request(place: str, body: Any) -> _Request:
    if not isinstance(body, dict) or "messages" not in body:
        raise LogUnusable(f'{place} needs "messages": a list, as in a chat completion\'s body')
    try:
        return _Request.model_validate(body)
    except ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # what fits no kind of content is told for each
        raise LogUnusable(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
