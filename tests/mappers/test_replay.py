from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mappers import Mapper, MapperError, replay
from mappers.models import load_model, log_probs, prefill, run
from tests.mappers.pairs import largest_difference, random_documents

TOKENS = random_documents(1, 90, seed=5)[0]


def test_a_replay_is_a_native_head_followed_by_the_map(sibling_mapper: Mapper, folders: dict[str, Path]) -> None:
    source, target = load_model(folders["sibling"]), load_model(folders["large"])
    cache = replay(sibling_mapper, source, target, TOKENS, 60, head=4)
    assert (cache.start, cache.num_tokens) == (0, 60)
    assert largest_difference(cache.slice(0, 4), prefill(target, TOKENS[:4])) == 0
    mapped = sibling_mapper.map(prefill(source, TOKENS[:60])).slice(4, 60)
    assert largest_difference(cache.slice(4, 60), mapped) < 1e-5


def test_an_exact_map_replays_the_native_cache(twin_mapper: Mapper, folders: dict[str, Path]) -> None:
    source, target = load_model(folders["twin"]), load_model(folders["large"])
    cache = replay(twin_mapper, source, target, TOKENS, 80)
    native, handed = run(target, TOKENS)[1][80:], run(target, TOKENS[80:], cache)[1]
    assert (log_probs(target, native) - log_probs(target, handed)).abs().max() < 1e-2


@pytest.mark.parametrize("head", [0, 60])
def test_the_head_may_be_empty_or_everything(sibling_mapper: Mapper, folders: dict[str, Path], head: int) -> None:
    source, target = load_model(folders["sibling"]), load_model(folders["large"])
    cache = replay(sibling_mapper, source, target, TOKENS, 60, head=head)
    expected = prefill(target, TOKENS[:60]) if head else sibling_mapper.map(prefill(source, TOKENS[:60]))
    assert largest_difference(cache, expected) == 0


@pytest.mark.parametrize(("num_tokens", "head"), [(0, 0), (91, 4), (10, 11), (10, -1)])
def test_invalid_bounds_are_refused(
    sibling_mapper: Mapper, folders: dict[str, Path], num_tokens: int, head: int
) -> None:
    model = load_model(folders["large"])
    with pytest.raises(MapperError, match=f"head {head}, num_tokens {num_tokens}; allowed"):
        replay(sibling_mapper, model, model, TOKENS, num_tokens, head)


def test_a_gap_in_the_positions_shifts_the_keys(folders: dict[str, Path]) -> None:
    """Tokens after a gap keep their own positions, which their keys show."""
    model = load_model(folders["large"])
    head = prefill(model, TOKENS[:4])
    near, far = (run(model, TOKENS[40:50], head, start=start)[0] for start in (4, 40))
    assert torch.equal(near.keys[0][:, :4], far.keys[0][:, :4])
    assert not torch.allclose(near.keys[0][:, 4:], far.keys[0][:, 4:])
    assert torch.allclose(far.keys[0][:, 4:], prefill(model, TOKENS[:50]).keys[0][:, 40:], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 90])
def test_chunked_prefill_equals_a_single_one(folders: dict[str, Path], chunk: int) -> None:
    model = load_model(folders["large"])
    cache = prefill(model, TOKENS[:chunk])
    while cache.num_tokens < len(TOKENS):
        cache = prefill(model, TOKENS[cache.num_tokens : cache.num_tokens + chunk], cache)
    assert largest_difference(cache, prefill(model, TOKENS)) < 2e-3
