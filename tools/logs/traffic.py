"""Measure how much of a log's prompts is shared with earlier ones, and find what breaks the sharing.

Sharing counts what the gateway's registry would find: whole messages, in order, from the first one on (with the same
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
from tools.logs import LogUnusable, read_objects
from workers.api.schemas import Message

BUCKETS = (0, 1_000, 4_000, 16_000, 64_000)  # lower bounds, characters of a prompt
NUM_TOP = 10

# Spans that differ between requests without changing the answer. The first pattern that matches names the kind.
VOLATILE = {
    "timestamp": r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?",
    "date": r"\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}",
    "time": r"\b\d{1,2}:\d\d(?::\d\d)?\b",
    "uuid": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "hex_id": r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b",
    "number": r"\b\d{9,}\b",
}
_BEGIN = r"(?=\d|\b[0-9a-fA-F])"  # all of them begin like this, which saves trying each one everywhere
_VOLATILE = re.compile(f"{_BEGIN}(?:{'|'.join(f'(?P<{kind}>{pattern})' for kind, pattern in VOLATILE.items())})")
ALL_KINDS = frozenset(VOLATILE)
CACHE_SIZE = 4096  # texts: prompts of one conversation, or with a common prefix, repeat most of theirs

Place = tuple[str, str, int]  # kind of span, role, position of the message


@dataclass(frozen=True)
class LoggedPrompt:
    """One request: `links` are the tools and the messages as the gateway hashes them, `texts` the messages' texts."""

    links: tuple[bytes, ...]
    texts: tuple[str, ...]

    def role(self, position: int) -> str:
        """Return the role of a message."""
        return str(orjson.loads(self.links[position + 1])["role"])

    def prefix_names(self) -> list[str]:
        """Return one name per prefix: item `i` names the first i + 1 messages."""
        chain, names = hashlib.sha256(), []
        for link in self.links:
            chain.update(len(link).to_bytes(8, "big") + link)
            names.append(chain.hexdigest())
        return names[1:]

    def without(self, breakers: Sequence[PrefixBreaker]) -> LoggedPrompt:
        """Return the prompt with the volatile spans at these places replaced by their kind."""
        texts, links = list(self.texts), list(self.links)
        for position in {one.position for one in breakers if one.position < len(texts)}:
            role = self.role(position)
            kinds = frozenset(one.kind for one in breakers if (one.position, one.role) == (position, role))
            texts[position] = mask(texts[position], kinds)
            links[position + 1] = mask(links[position + 1].decode(), kinds).encode()
        return LoggedPrompt(tuple(links), tuple(texts))


@dataclass
class Sharing:
    """Counts over a log: how many characters of each prompt were a prefix of an earlier one."""

    num_prompts: int = 0
    num_hits: int = 0
    chars: int = 0
    shared_chars: int = 0
    by_length: dict[int, list[int]] = field(default_factory=dict)  # bucket -> [chars, shared]
    uses: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # (messages, chars, first text)
    shorter: dict[str, str] = field(default_factory=dict)  # prefix -> the same without its last message

    def add(self, prompt: LoggedPrompt) -> None:
        names, shared, chars = prompt.prefix_names(), 0, 0
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
        """The share of characters that need no second prefill."""
        return self.shared_chars / self.chars if self.chars else 0.0

    def top(self, limit: int = NUM_TOP) -> list[tuple[str, int, int, int, str]]:
        """Return the prefixes that save most, as (name, uses, messages, chars, first text). Of two that always occur
        together, only the longer one."""
        within = {shorter for name, shorter in self.shorter.items() if self.uses[name] == self.uses[shorter]}
        used = (
            (name, count, *self.lengths[name]) for name, count in self.uses.items() if count > 1 and name not in within
        )
        return sorted(used, key=lambda one: (-(one[1] - 1) * one[3], one[0]))[:limit]


def sharing(prompts: Iterable[LoggedPrompt]) -> Sharing:
    found = Sharing()
    for prompt in prompts:
        found.add(prompt)
    return found


# What breaks a prefix


@dataclass(frozen=True)
class VolatileSpans:
    """All spans of one kind in one message; the first begins at character `at`."""

    at: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class PrefixBreaker:
    """A kind of volatile span in one message. `position` counts messages, `at` characters in it, `prompts` requests."""

    kind: str
    role: str
    position: int
    at: int
    prompts: int


def breakers(prompts: Sequence[LoggedPrompt]) -> list[PrefixBreaker]:
    """Find volatile spans in the part that could be shared, which is every message but the last. The most frequent come
    first. A span breaks nothing if it is the same in all prompts that are otherwise alike."""
    groups: dict[tuple[Place, str], list[VolatileSpans]] = {}
    for prompt in prompts:
        for position, text in enumerate(prompt.texts[:-1]):
            for kind, spans in _spans(text).items():
                place = (kind, prompt.role(position), position)
                groups.setdefault((place, mask(text)), []).append(spans)
    places: dict[Place, list[VolatileSpans]] = {}
    for (place, _), alike in groups.items():
        if len({spans.texts for spans in alike}) > 1:
            places.setdefault(place, []).extend(alike)
    found = [PrefixBreaker(*place, min(one.at for one in spans), len(spans)) for place, spans in places.items()]
    return sorted(found, key=lambda one: (-one.prompts, one.position, one.at))


@lru_cache(CACHE_SIZE)
def mask(text: str, kinds: frozenset[str] = ALL_KINDS) -> str:
    """Replace volatile spans of these kinds by `<kind>`."""
    return _VOLATILE.sub(lambda match: f"<{match.lastgroup}>" if match.lastgroup in kinds else match.group(), text)


@lru_cache(CACHE_SIZE)
def _spans(text: str) -> dict[str, VolatileSpans]:
    """Return the volatile spans of a text by kind."""
    found: dict[str, list[re.Match[str]]] = {}
    for match in _VOLATILE.finditer(text):
        found.setdefault(str(match.lastgroup), []).append(match)
    return {
        kind: VolatileSpans(matches[0].start(), tuple(match.group() for match in matches))
        for kind, matches in found.items()
    }


# Reading a log


class _LoggedRequest(BaseModel):
    """The relevant fields of a chat completion's body."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


def read_prompts(path: Path) -> list[LoggedPrompt]:
    """Read lines `{"messages": [...], "tools": [...]}`, or such an object under `request` or `body`. Raises
    `LogUnusable`."""
    interned: dict[bytes, tuple[bytes, str]] = {}  # equal messages share their memory
    prompts = []
    for place, line in read_objects(path):
        request = _request(place, line.get("request", line.get("body", line)))
        try:
            tools = orjson.dumps(request.tools or [], option=orjson.OPT_SORT_KEYS)
            links = [canonical(message) for message in request.messages]
        except TypeError as error:
            raise LogUnusable(f"{place} is nested too deep") from error
        pairs = zip(links, request.messages, strict=True)
        kept = [interned.setdefault(link, (link, message.text)) for link, message in pairs]
        prompts.append(LoggedPrompt((tools, *(link for link, _ in kept)), tuple(text for _, text in kept)))
    if not prompts:
        raise LogUnusable(f"{path} holds no request")
    return prompts


def _request(place: str, body: Any) -> _LoggedRequest:
    if not isinstance(body, dict) or "messages" not in body:
        raise LogUnusable(f'{place} needs "messages": a list, as in a chat completion\'s body')
    try:
        return _LoggedRequest.model_validate(body)
    except ValidationError as error:
        # Invalid content is reported once per possible type; the deepest location says most.
        deepest = max(error.errors(), key=lambda one: len(one["loc"]))
        raise LogUnusable(f"{place}: {'.'.join(map(str, deepest['loc']))}: {deepest['msg']}") from error
