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
from typing import Any

import orjson

from workers.api.schemas import Message

SEED = b"kvrelay-prefix-1"
MARK = "cache_control"
MAX_ASKED = 256  # of one chain at once; a conversation grows by a few messages a turn


def canonical(message: Message) -> bytes:
    """The message as every client writes it alike: keys sorted, text parts joined, no nulls and empties, no mark."""
    fields = message.model_dump(exclude_none=True)
    fields["content"] = message.text
    kept = {key: value for key, value in fields.items() if key != MARK and value not in ("", [], {})}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


@dataclass(frozen=True)
class Chain:
    """The hashes of one conversation for one model: `hashes[i]` names its first i messages."""

    salt: bytes
    hashes: tuple[str, ...]

    @classmethod
    def over(cls, messages: Sequence[Message], *, model: str, tools: list[dict[str, Any]] | None, salt: str) -> Chain:
        """Raises `ValueError` (orjson's) where tools are nested too deep to be written down."""
        key = bytes.fromhex(salt)
        seed = orjson.dumps({"model": model, "tools": tools or []}, option=orjson.OPT_SORT_KEYS)
        links = [_link(key, SEED, seed)]
        for message in messages:
            links.append(_link(key, bytes.fromhex(links[-1]), canonical(message)))
        return cls(key, tuple(links))

    def extended(self, message: Message) -> Chain:
        link = _link(self.salt, bytes.fromhex(self.hashes[-1]), canonical(message))
        return Chain(self.salt, (*self.hashes, link))

    @property
    def num_messages(self) -> int:
        return len(self.hashes) - 1

    def longest_first(self, most: int = MAX_ASKED) -> list[str]:
        """The names of the whole conversation, then of ever shorter beginnings, up to `most`; never of none."""
        return list(self.hashes[:0:-1])[:most]


def _link(key: bytes, before: bytes, content: bytes) -> str:
    return hmac.digest(key, before + b"|" + content, "sha256").hex()


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
    holders = [message, *(message.content if isinstance(message.content, list) else [])]
    return any((holder.model_extra or {}).get(MARK) for holder in holders)
