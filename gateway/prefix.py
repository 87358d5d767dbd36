"""Prefixes by name: a chain hash over the messages, one link a message.

    h_0 = HMAC-SHA256(salt, "kvrelay-prefix-1" | canonical JSON of {model, tools})
    h_i = HMAC-SHA256(salt, h_{i-1} | canonical JSON of message_i)

It is a hint: a worker checks the digest of the very tokens before it uses a cache. The tenant's salt keeps tenants
apart, the model keeps models apart.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from workers.api.schemas import Message

SEED = b"kvrelay-prefix-1"
MARK = "cache_control"
MAX_ASKED = 256  # of one chain at once; a conversation grows by a few messages a turn


def canonical(message: Message) -> bytes:
    """The message as every client writes it alike: keys sorted, text parts joined, no nulls and empties, no mark."""
    return _canonical(message.plain, message.text)


def _canonical(fields: dict[str, Any], text: str) -> bytes:
    told = (fields | {"content": text}).items()
    kept = {key: value for key, value in told if key != MARK and value not in ("", [], {})}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


@dataclass(frozen=True)
class Chain:
    """The hashes of one conversation for one model: `hashes[i]` names its first i messages."""

    mac: hmac.HMAC
    hashes: tuple[str, ...]

    @classmethod
    def over(cls, messages: Sequence[Message], *, model: str, tools: list[dict[str, Any]] | None, salt: str) -> Chain:
        """Raises `ValueError` (orjson's) where tools are nested too deep to be written down."""
        mac = mac_of(salt)
        links = [_first(mac, model, tools) if tools else _without_tools(mac, model)]
        for message in messages:
            links.append(_next(mac, links[-1], canonical(message)))
        return cls(mac, tuple(links))

    def extended(self, reply: dict[str, Any]) -> Chain:
        """By an assistant's message, as the OpenAI API writes it; `canonical` of what the client will send back."""
        link = _next(self.mac, self.hashes[-1], _canonical(reply, reply["content"] or ""))
        return Chain(self.mac, (*self.hashes, link))

    @property
    def num_messages(self) -> int:
        return len(self.hashes) - 1

    def longest_first(self, most: int = MAX_ASKED) -> list[str]:
        """The names of the whole conversation, then of ever shorter beginnings, up to `most`; never of none."""
        return list(self.hashes[:0:-1])[:most]


@lru_cache(maxsize=1024)
def mac_of(salt: str) -> hmac.HMAC:
    """Of a tenant; nothing is hashed with it, but with copies, which share what depends on the key alone."""
    return hmac.new(bytes.fromhex(salt), digestmod="sha256")


def _over(mac: hmac.HMAC, content: bytes) -> str:
    link = mac.copy()
    link.update(content)
    return link.hexdigest()


def _first(mac: hmac.HMAC, model: str, tools: list[dict[str, Any]]) -> str:
    return _over(mac, SEED + b"|" + orjson.dumps({"model": model, "tools": tools}, option=orjson.OPT_SORT_KEYS))


@lru_cache(maxsize=1024)
def _without_tools(mac: hmac.HMAC, model: str) -> str:
    return _first(mac, model, [])


def _next(mac: hmac.HMAC, before: str, content: bytes) -> str:
    return _over(mac, bytes.fromhex(before) + b"|" + content)


def num_stable(messages: Sequence[Message]) -> int:
    """How many of the first messages later requests will share.

    Up to the last one that bears a `cache_control` mark (on the message or on one of its parts), else everything
    before the last user turn.
    """
    marked = [index for index, message in enumerate(messages) if _is_marked(message)]
    if marked:
        return marked[-1] + 1
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    return users[-1] if users else len(messages)


def plain(message: Message) -> Message:
    """The message as workers get it: content as one text, no mark."""
    if isinstance(message.content, str) and not _is_marked(message):
        return message
    fields = message.model_dump(exclude_none=True, exclude={MARK})
    if message.content is not None:
        fields["content"] = message.text
    return Message.model_validate(fields)


def _is_marked(message: Message) -> bool:
    parts = message.content if isinstance(message.content, list) else ()
    return bool(message.model_extra and message.model_extra.get(MARK)) or any(
        part.model_extra and part.model_extra.get(MARK) for part in parts
    )
