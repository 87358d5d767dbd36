"""Digests of a cache's tokens: SHA-256 over token ids and the tenant's salt, equal in every process.

    seed = H(domain, salt)
    c_i  = H(c_{i-1}, tokens of chunk i)      chunks of CHAIN_TOKENS, the last may be shorter; H is length-prefixed

`token_digest` names the first n tokens of a sequence. It is equal on two workers if tokens and salt are: its chunk
length is fixed, and independent of any pool's block size. `block_chain` is another chain, over the full blocks of one
pool. It keys that pool's prefix index and never leaves the worker. Its seed (`KVIdentity`) holds what else determines
the KV, so that caches which must not be used for each other share no key.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.api.errors import InvalidRequest
from workers.api.schemas import KVLayout, Provenance

CHAIN_TOKENS = 64
_SLICE_TOKENS = 256  # tokens compared at once: whole slices compare fast
_TOKENS_DOMAIN = b"kvrelay/tokens/1"
_BLOCKS_DOMAIN = b"kvrelay/blocks/2"


def token_digest(token_ids: Sequence[int], salt: str) -> str:
    """Return the digest of exactly these tokens under this tenant's salt, in hex."""
    return _chain(_hash(_TOKENS_DOMAIN, salt.encode()), pack_tokens(token_ids), CHAIN_TOKENS)[-1].hex()


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    limit = min(len(left), len(right))
    for begin in range(0, limit, _SLICE_TOKENS):
        part = slice(begin, min(begin + _SLICE_TOKENS, limit))
        mine, theirs = tuple(left[part]), tuple(right[part])
        if mine != theirs:
            return begin + next(at for at, token in enumerate(mine) if token != theirs[at])
    return limit


@dataclass(frozen=True)
class KVIdentity:
    """What two caches of equal tokens must share to be interchangeable: tenant, weights, KV layout and provenance. An
    adapter is merged into the weights, and so part of their fingerprint."""

    salt: str = field(repr=False)
    fingerprint: str
    layout: KVLayout
    provenance: Provenance

    @property
    def seed(self) -> bytes:
        layout = self.layout
        geometry = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens, layout.dtype)
        fields = (self.salt, self.fingerprint, repr(geometry), self.provenance)
        return _hash(_BLOCKS_DOMAIN, *(field.encode() for field in fields))


def block_chain(token_ids: Sequence[int], identity: KVIdentity) -> list[bytes]:
    """Return the cache keys of a sequence, one for each full block. Key i names the identity and all tokens up to the
    end of block i."""
    packed, size = pack_tokens(token_ids), identity.layout.block_tokens
    full = len(packed) - len(packed) % (size * _TOKEN_BYTES)
    return _chain(identity.seed, packed[:full], size)[1:]


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as unsigned 32-bit integers, little-endian. Raises `InvalidRequest`."""
    try:
        packed = array(_TYPECODE, token_ids)
    except (OverflowError, TypeError) as error:
        bad = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < 1 << 32), None)
        raise InvalidRequest(f"token id {bad!r} is not an integer in 0..{(1 << 32) - 1}", param="token_ids") from error
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _chain(head: bytes, packed: bytes, chunk_tokens: int) -> list[bytes]:
    """Return `head` and the state after each chunk of `packed`."""
    states, step = [head], chunk_tokens * _TOKEN_BYTES
    for at in range(0, len(packed), step):
        chunk = packed[at : at + step]
        states.append(_hash(states[-1], chunk))
    return states


def _hash(*fields: bytes) -> bytes:
    """SHA-256 over the fields, each prefixed by its length, so that different lists of fields differ."""
    state = hashlib.sha256()
    for part in fields:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


_TYPECODE = next(code for code in "IL" if array(code).itemsize == 4)
_TOKEN_BYTES = 4
_SWAP = array("H", [1]).tobytes() == b"\x00\x01"  # a big-endian machine
