from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mappers.cache import KVCache
from mappers.manifest import KINDS
from tests.workers.pool.support import LAYOUT, assert_same, random_kv
from workers.api.errors import InvalidRequest
from workers.pool.blocks import BlockSpan, block_runs, block_shape, copy_in, copy_out, empty_cache, torch_dtype

NUM_BLOCKS = 12
SIZE = LAYOUT.block_tokens


def random_data() -> torch.Tensor:
    return torch.randn((NUM_BLOCKS, *block_shape(LAYOUT)), generator=torch.Generator().manual_seed(3))


def copy_by_token(data: torch.Tensor, blocks: list[int], begin: int, end: int) -> KVCache:
    """Copy every token on its own, the slow way."""
    rows = [data[blocks[t // SIZE], :, :, t % SIZE] for t in range(begin, end)]  # (L, 2, H, D) each
    stack = torch.stack(rows, dim=3)  # (L, 2, H, T, D)
    return KVCache(tuple(stack[:, 0].unbind()), tuple(stack[:, 1].unbind()), begin)


block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8, unique=True)
contiguous_blocks = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda p: list(range(p[0], p[0] + p[1])))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    blocks = draw(block_lists | contiguous_blocks)
    begin = draw(st.integers(0, len(blocks) * SIZE - 1))
    return blocks, begin, draw(st.integers(begin + 1, len(blocks) * SIZE))


@settings(deadline=None)  # the first call loads kernels
@given(ranges())
def test_copy_out_matches_token_by_token_copy(case: tuple[list[int], int, int]) -> None:
    blocks, begin, end = case
    data, out = random_data(), empty_cache(LAYOUT, begin, end)
    copy_out(data, blocks, out)
    assert_same(out, copy_by_token(data, blocks, begin, end))


@given(ranges())
def test_copy_in_writes_only_the_range(case: tuple[list[int], int, int]) -> None:
    blocks, begin, end = case
    data, source = random_data(), random_kv(begin, end, seed=9)
    copy_in(data, blocks, source)
    whole = copy_by_token(data, blocks, 0, len(blocks) * SIZE)
    before = copy_by_token(random_data(), blocks, 0, len(blocks) * SIZE)
    assert_same(whole.slice(begin, end), source)
    assert_same(whole.slice(0, begin), before.slice(0, begin))
    assert_same(whole.slice(end, whole.num_tokens), before.slice(end, whole.num_tokens))
    others = [b for b in range(NUM_BLOCKS) if b not in blocks]
    assert torch.equal(data[others], random_data()[others])


@given(ranges(), st.integers(0, 20))
def test_span_parts_are_its_tokens(case: tuple[list[int], int, int], start: int) -> None:
    blocks, begin, end = case
    span = BlockSpan(random_data(), blocks, begin, end - begin, start)
    expected = copy_by_token(random_data(), blocks, begin, end)
    for kind in KINDS:
        for layer, states in enumerate(expected.of(kind)):
            parts = [part.flatten(0, 1) for part in span.parts(kind, layer)]  # (n * t, H, D)
            assert torch.equal(torch.cat(parts).transpose(0, 1), states)
    assert (span.geometry, span.start) == (expected.geometry, start)


@given(ranges(), st.integers(1, 7), st.integers(0, 9), st.permutations(range(NUM_BLOCKS * SIZE)))
def test_copy_layers_between_different_block_lengths(
    case: tuple[list[int], int, int], size: int, at: int, order: list[int]
) -> None:
    """Copy layers 0 and 1 to 1 and 2, and layer 2 to 0. Nothing else is written."""
    blocks, begin, end = case
    layers, num_tokens = {1: 0, 2: 1, 0: 2}, end - begin
    theirs = torch.zeros(NUM_BLOCKS * SIZE, 4, 2, size, LAYOUT.num_kv_heads, LAYOUT.head_dim, dtype=torch.float64)
    BlockSpan(random_data(), blocks, begin, num_tokens, start=5).copy_layers(theirs, order, at, layers)
    copied = BlockSpan(theirs, order, at, num_tokens, start=0)
    for kind in KINDS:
        for to_layer, from_layer in layers.items():
            expected = copy_by_token(random_data(), blocks, begin, end).of(kind)[from_layer]
            found = torch.cat([part.flatten(0, 1) for part in copied.parts(kind, to_layer)])
            assert torch.equal(found.transpose(0, 1), expected.double())
    assert theirs.count_nonzero() == 3 * 2 * num_tokens * LAYOUT.num_kv_heads * LAYOUT.head_dim


def test_copies_accept_views_and_other_dtypes() -> None:
    tokens_first = torch.randn(LAYOUT.num_layers, 2, 10, LAYOUT.num_kv_heads, LAYOUT.head_dim, dtype=torch.float64)
    heads_first = tokens_first.transpose(2, 3)  # (L, 2, H, T, D)
    source = KVCache(tuple(heads_first[:, 0].unbind()), tuple(heads_first[:, 1].unbind()), 1)
    data, blocks = random_data(), [7, 2, 3]
    copy_in(data, blocks, source)
    expected = KVCache(tuple(k.float() for k in source.keys), tuple(v.float() for v in source.values), 1)
    assert_same(copy_by_token(data, blocks, 1, 11), expected)

    memory = torch.empty(LAYOUT.num_layers, 2, 16, LAYOUT.num_kv_heads, LAYOUT.head_dim).transpose(2, 3)
    out = KVCache(tuple(memory[:, 0, :, 2:12].unbind()), tuple(memory[:, 1, :, 2:12].unbind()), 1)
    copy_out(data, blocks, out)
    assert_same(out, expected)


def test_whole_blocks_form_one_run() -> None:
    runs = list(block_runs([5, 6, 9, 1, 2], 2, 18, SIZE))
    assert [(run.blocks, run.low, run.high, run.at) for run in runs] == [
        ((5,), 2, 4, 0), ((6, 9, 1), 0, 4, 2), ((2,), 0, 2, 14),
    ]  # fmt: skip


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 9)])
def test_tokens_outside_blocks_are_rejected(begin: int, end: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"tokens \[{begin}, {end}\) are outside of 2 blocks of 4"):
        list(block_runs([0, 1], begin, end, SIZE))


def test_unknown_dtype_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="unknown KV dtype 'int4'; known: float32, float16, bfloat16"):
        torch_dtype("int4")
