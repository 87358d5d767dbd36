from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mappers import GeometryMismatch, KVCache, Mapper
from mappers.apply import SLOTS_BYTES
from mappers.cache import KVGeometry
from mappers.manifest import KINDS, Kind, LayerSpec, OutputSpec
from tests.mappers.pairs import HEAD_DIM, KV_HEADS, fit_with, largest_difference, random_cache


@pytest.fixture(scope="module", params=["twin", "sibling", "joint", "float16", "lowrank", "ridge-head"])
def mapper(request: pytest.FixtureRequest, folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    if request.param in ("twin", "sibling"):
        made: Mapper = request.getfixturevalue(f"{request.param}_mapper")
        return made
    precision: Any = "float16" if request.param == "float16" else "float32"
    given: dict[str, Any] = {"layers": 2, "copies": False}
    if request.param in ("lowrank", "ridge-head"):
        given |= {"method": request.param} | ({"rank": 5} if request.param == "lowrank" else {})
    joint = request.param in ("joint", "ridge-head")
    return fit_with(folders["other"], folders["large"], documents, joint=joint, precision=precision, **given)


def by_hand(mapper: Mapper, cache: KVCache) -> KVCache:
    """Apply the map as the manifest defines it, one token at a time."""
    out: dict[str, list[Tensor]] = {"keys": [], "values": []}
    plain = list(mapper.source_rope.strip_cache(cache).keys)
    for layer, spec in enumerate(mapper.manifest.layers):
        for kind in KINDS:
            states = one_output(mapper, spec.of(kind), f"layers.{layer}.{kind}", cache, plain, kind)
            has_rope = kind == "keys" and spec.of(kind).method != "copy"
            out[kind].append(mapper.target_rope.apply(states, cache.positions, layer) if has_rope else states)
    return KVCache(tuple(out["keys"]), tuple(out["values"]), cache.start)


def one_output(mapper: Mapper, spec: OutputSpec, name: str, cache: KVCache, plain: list[Tensor], kind: str) -> Tensor:
    if spec.method == "copy":
        return cache.keys[spec.key_layers[0]] if kind == "keys" else cache.values[spec.value_layers[0]]
    weight, bias = whole_weight(mapper, spec, name), mapper.weights[f"{name}.bias"].double()
    rows = []
    for token in range(cache.num_tokens):
        parts = [plain[i][:, token].flatten() for i in spec.key_layers]
        parts += [cache.values[i][:, token].flatten() for i in spec.value_layers]
        rows.append(torch.cat(parts).double() @ weight + bias)
    return torch.stack(rows).float().view(cache.num_tokens, KV_HEADS, HEAD_DIM).transpose(0, 1)


def whole_weight(mapper: Mapper, spec: OutputSpec, name: str) -> Tensor:
    """Return the full weight (p, W) of an output, whatever form it is stored in."""
    stored = mapper.weights[f"{name}.weight"].double()
    if spec.rank:
        return stored @ mapper.weights[f"{name}.up"].double()
    if not spec.heads:
        return stored
    whole = torch.zeros(len(spec.heads[0]), KV_HEADS, HEAD_DIM, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    for target, chosen in enumerate(spec.heads):
        for block, head in enumerate(chosen):
            whole[block, head, :, target] = stored[target, block * HEAD_DIM : (block + 1) * HEAD_DIM]
    return whole.view(-1, KV_HEADS * HEAD_DIM)


@pytest.mark.parametrize("start", [0, 4, 400])
def test_a_map_matches_its_manifest(mapper: Mapper, start: int) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 30, start)
    mapped = mapper.map(cache)
    assert mapped.start == start and mapped.geometry == mapper.manifest.target.geometry
    assert largest_difference(mapped, by_hand(mapper, cache)) < 2e-4


def test_target_heads_share_a_source_head_or_not(folders: dict[str, Path], documents: list[list[int]]) -> None:
    """In the first block no heads share one, in the second all do."""
    fitted = fit_with(
        folders["other"], folders["large"], documents, method="ridge-head", layers=2, joint=True, copies=False
    )

    def matched(spec: OutputSpec) -> OutputSpec:
        heads = tuple((target, *[0] * (len(spec.blocks) - 1)) for target in range(KV_HEADS))
        return spec.model_copy(update={"heads": heads})

    layers = tuple(LayerSpec(keys=matched(each.keys), values=matched(each.values)) for each in fitted.manifest.layers)
    mapper = Mapper(fitted.manifest.model_copy(update={"layers": layers}), fitted.weights)
    cache = random_cache(3, 30)
    assert largest_difference(mapper.map(cache), by_hand(mapper, cache)) < 2e-4


def test_chunks_of_any_length_give_the_same_cache(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 50, 3)
    bounds = [0, 1, 17, 20, 50]
    chunks = [mapper.map(cache.slice(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert largest_difference(KVCache.concatenate(chunks), mapper.map(cache)) < 1e-5


def test_the_sink_receives_every_layer_in_order(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 12)
    seen: list[int] = []

    def sink(layer: int, keys: Tensor, values: Tensor) -> None:
        assert keys.shape == values.shape == (KV_HEADS, 12, HEAD_DIM)
        seen.append(layer)

    mapper.map_into(cache, sink)
    assert seen == list(range(mapper.manifest.target.num_layers))


def test_the_source_is_not_modified(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 12)
    mapped = mapper.map(cache)
    for states in mapped.keys + mapped.values:
        states.zero_()
    assert largest_difference(cache, random_cache(mapper.manifest.source.num_layers, 12)) == 0


def test_threads_do_not_share_scratch(mapper: Mapper) -> None:
    caches = [random_cache(mapper.manifest.source.num_layers, 40, start=i, seed=i) for i in range(8)]
    alone = [mapper.map(cache) for cache in caches]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            together = list(threads.map(mapper.map, caches))
            assert all(largest_difference(a, b) == 0 for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_lower_precision_is_mapped_in_float32(mapper: Mapper, dtype: torch.dtype) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 16)
    low = KVCache(tuple(k.to(dtype) for k in cache.keys), tuple(v.to(dtype) for v in cache.values))
    exact = KVCache(tuple(k.float() for k in low.keys), tuple(v.float() for v in low.values))
    assert largest_difference(mapper.map(low), mapper.map(exact)) < 1e-5


def test_token_major_memory_gives_the_same_map(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 16)

    def token_major(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(s.transpose(0, 1).contiguous().transpose(0, 1) for s in states)

    assert (
        largest_difference(mapper.map(KVCache(token_major(cache.keys), token_major(cache.values))), mapper.map(cache))
        < 1e-5
    )


def test_copied_layers_equal_the_source(sibling_mapper: Mapper) -> None:
    cache = random_cache(3, 10)
    mapped = sibling_mapper.map(cache)
    assert sibling_mapper.manifest.copied_layers == (0, 1)
    assert all(torch.equal(mapped.keys[i], cache.keys[i]) for i in (0, 1))
    assert all(torch.equal(mapped.values[i], cache.values[i]) for i in (0, 1))


@dataclass(frozen=True)
class InParts:
    """A cache whose tokens are stored in parts."""

    cache: KVCache
    bounds: tuple[int, ...]

    @property
    def geometry(self) -> KVGeometry:
        return self.cache.geometry

    @property
    def start(self) -> int:
        return self.cache.start

    @property
    def num_tokens(self) -> int:
        return self.cache.num_tokens

    def parts(self, kind: Kind, layer: int) -> Iterator[Tensor]:
        """Yield each part as two halves, if its length is even."""
        for begin, end in zip(self.bounds, self.bounds[1:], strict=False):
            rows = self.cache.of(kind)[layer][:, begin:end].transpose(0, 1)
            yield rows.unflatten(0, (2, -1)) if len(rows) % 2 == 0 else rows[None]


def test_a_source_in_parts_gives_the_same_bits(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 50, 3)
    mapped, seen = mapper.map(cache), []

    def sink(layer: int, keys: Tensor, values: Tensor) -> None:
        assert torch.equal(keys, mapped.keys[layer]) and torch.equal(values, mapped.values[layer])
        seen.append(layer)

    mapper.map_into(InParts(cache, (0, 1, 17, 20, 50)), sink)
    assert seen == list(range(mapper.manifest.target.num_layers))


def test_copies_can_be_left_to_the_caller(mapper: Mapper) -> None:
    cache = random_cache(mapper.manifest.source.num_layers, 12)
    seen: list[int] = []
    mapped, copies = mapper.map(cache), mapper.manifest.copies

    def sink(first: int, states: Tensor) -> None:
        seen.extend(range(first, first + len(states)))

    mapper.map_together(cache, sink, copies=False)
    assert sorted([*seen, *copies]) == list(range(mapper.manifest.target.num_layers))
    for layer, source_layer in copies.items():
        assert torch.equal(mapped.keys[layer], cache.keys[source_layer])
        assert torch.equal(mapped.values[layer], cache.values[source_layer])


def test_layers_are_passed_on_together_up_to_the_scratch_bound(sibling_mapper: Mapper) -> None:
    cache, seen = random_cache(3, 30_000), []
    mapped = sibling_mapper.map(cache)

    def sink(first: int, states: Tensor) -> None:
        assert states.nbytes <= SLOTS_BYTES
        for layer, (keys, values) in enumerate(states.transpose(2, 3), first):
            assert torch.equal(keys, mapped.keys[layer]) and torch.equal(values, mapped.values[layer])
            seen.append((first, layer))

    sibling_mapper.map_together(cache, sink)
    assert seen == [(layer - layer % 2, layer) for layer in range(sibling_mapper.manifest.target.num_layers)]


def test_a_cache_of_another_shape_is_refused(mapper: Mapper) -> None:
    with pytest.raises(GeometryMismatch, match="num_layers=9.*this map takes"):
        mapper.map(random_cache(9, 5))


@pytest.mark.parametrize(
    ("options", "share"), [({"method": "lowrank", "rank": 3}, 0.4), ({"method": "ridge-head"}, 0.5)]
)
def test_a_structured_map_takes_less_memory_and_fewer_multiplications(
    folders: dict[str, Path], documents: list[list[int]], options: dict[str, Any], share: float
) -> None:
    """Rank 3 stores at most 3 * (16 + 16) of 16 * 16 numbers per source layer; head matching one of two heads."""
    given: dict[str, Any] = {"layers": 2, "joint": False, "precision": "float32", "copies": False}
    sizes, costs = [], []
    for method in ({"method": "ridge"}, options):
        mapper = fit_with(folders["other"], folders["large"], documents, **given, **method)
        spec = mapper.manifest.layers[1].keys
        stored = {name: mapper.weights[name].numel() for name in mapper.weights if name.startswith("layers.1.keys")}
        sizes.append((sum(stored.values()) - stored["layers.1.keys.bias"]) / len(spec.key_layers))
        with FlopCounterMode(display=False) as counter:
            mapper.map(random_cache(3, 10))
        costs.append(counter.get_total_flops())
    assert sizes[1] <= share * sizes[0] and costs[1] < costs[0]
