from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.pool.support import FINGERPRINT, LAYOUT, OTHER_SALT, SALT
from workers.api.errors import InvalidRequest
from workers.digest import CHAIN_TOKENS, KVIdentity, block_chain, common_prefix_len, token_digest

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=3 * CHAIN_TOKENS)


def test_digest_is_pinned() -> None:
    """A changed digest would make the workers of a half-upgraded cluster reject every cache."""
    ids = list(range(100))

    def sha(*fields: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(f).to_bytes(8, "little") + f for f in fields)).digest()

    def packed(ids: list[int]) -> bytes:
        return b"".join(t.to_bytes(4, "little") for t in ids)

    seed = sha(b"kvrelay/tokens/1", SALT.encode())
    expected = sha(sha(seed, packed(ids[:64])), packed(ids[64:]))
    assert token_digest(ids, SALT) == expected.hex()


def test_digest_is_independent_of_process() -> None:
    code = f"from workers.digest import token_digest; print(token_digest(range(200), {SALT!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == token_digest(range(200), SALT)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([4], [5], 0),
        (range(700), (*range(600), 0, *range(601, 700)), 600),
        (range(512), tuple(range(900)), 512),
    ],
)
def test_common_prefix(left: Sequence[int], right: Sequence[int], shared: int) -> None:
    assert common_prefix_len(left, right) == common_prefix_len(right, left) == shared


@given(tokens, tokens)
def test_digest_depends_on_tokens_and_tenant(left: list[int], right: list[int]) -> None:
    assert (token_digest(left, SALT) == token_digest(right, SALT)) == (left == right)
    assert token_digest(left, SALT) != token_digest(left, OTHER_SALT)


def test_digest_depends_on_length() -> None:
    ids = [7] * (2 * CHAIN_TOKENS + 1)
    assert len({token_digest(ids[:n], SALT) for n in range(len(ids) + 1)}) == len(ids) + 1


@given(tokens, st.sampled_from([1, 4, 16]))
def test_block_chain_has_key_per_full_block_and_shares_prefixes(ids: list[int], block_tokens: int) -> None:
    identity = identity_of(layout=LAYOUT.model_copy(update={"block_tokens": block_tokens}))
    keys = block_chain(ids, identity)
    assert len(keys) == len(ids) // block_tokens
    assert block_chain([*ids, 1], identity)[: len(keys)] == keys
    if ids and len(ids) >= block_tokens:
        assert not set(keys) & set(block_chain([ids[0] ^ 1, *ids[1:]], identity))


@pytest.mark.parametrize("bad", [-1, 2**32, "7", 1.5, None])
def test_invalid_token_id_is_rejected(bad: object) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {bad!r} is not an integer in 0..4294967295"):
        token_digest([1, bad], SALT)  # type: ignore[list-item]


def identity_of(**changes: Any) -> KVIdentity:
    return replace(KVIdentity(SALT, FINGERPRINT, LAYOUT, "exact"), **changes)


def test_cache_key_depends_on_each_part_of_identity() -> None:
    """Equal tokens: a common key would let one cache be used for another."""
    layouts: list[dict[str, Any]] = [{"num_layers": 16}, {"num_kv_heads": 16}, {"head_dim": 16}, {"dtype": "float16"}]
    identities = [
        identity_of(),
        identity_of(salt=OTHER_SALT),
        identity_of(fingerprint="a" * 64),
        *(identity_of(layout=LAYOUT.model_copy(update=change)) for change in layouts),
        identity_of(provenance="mapped:x"),
    ]
    chains = [block_chain(range(4 * LAYOUT.block_tokens), identity) for identity in identities]
    assert len({key for chain in chains for key in chain}) == 4 * len(identities)
