from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import Mapper, QualityProtocol
from mappers.diagnose import PartScore, diagnose, layer_groups, parts
from mappers.models import load_model
from mappers.protocol import spans
from tests.mappers.pairs import evaluate_one, random_cache, random_documents

PROTOCOL = QualityProtocol(lengths=(40, 90), num_documents=2, head=4, tail=8, scored=16)
DOCUMENTS = random_documents(3, 120, seed=21)


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> tuple[Any, Any]:
    return load_model(folders["sibling"]), load_model(folders["large"])


@pytest.fixture(scope="module")
def rows(sibling_mapper: Mapper, models: tuple[Any, Any]) -> dict[tuple[str, str], PartScore]:
    return {(row.by, row.part): row for row in diagnose(sibling_mapper, *models, DOCUMENTS, PROTOCOL)}


def loss(rows: dict[tuple[str, str], PartScore], by: str, part: str) -> float:
    return rows[by, part].score.kl_mean


def test_all_parts_together_equal_the_served_cache(
    rows: dict[tuple[str, str], PartScore], sibling_mapper: Mapper, models: tuple[Any, Any]
) -> None:
    served = evaluate_one(sibling_mapper, *models, DOCUMENTS, PROTOCOL, arms=["hybrid"]).arm("hybrid")
    assert served is not None
    assert loss(rows, "all", "all") == pytest.approx(served.kl_mean, rel=1e-3)
    assert rows["all", "all"].score.ppl_ratio == pytest.approx(served.ppl_ratio, rel=1e-3)


def test_copied_layers_lose_nothing_and_mapped_ones_do(rows: dict[tuple[str, str], PartScore]) -> None:
    """Layers 0 and 1 are copies; 2 and 3 are fitted from other source layers."""
    assert max(loss(rows, "layers", layer) for layer in ("0-0", "1-1")) < 1e-5
    assert min(loss(rows, "layers", layer) for layer in ("2-2", "3-3")) > 1e-3
    for by, part in (("what", "keys"), ("what", "values"), ("head", "0"), ("head", "1"), ("distance", "0-64")):
        assert 1e-4 < loss(rows, by, part) < 2 * loss(rows, "all", "all")


def test_a_part_replaces_only_itself(sibling_mapper: Mapper) -> None:
    native, mapped = random_cache(4, 82), random_cache(4, 82, seed=1)
    covered = torch.zeros(2, 4, 2, 82)
    for part in parts(sibling_mapper, 4, 82):
        mixed = part.replace(native, mapped)
        moved = torch.stack(
            [
                torch.stack([(a != b).any(-1) for a, b in zip(mixed.of(k), native.of(k), strict=True)])
                for k in ("keys", "values")
            ]
        )  # (2, layers, heads, tokens)
        expected = torch.zeros_like(moved)
        kinds = [("keys", "values").index(kind) for kind in part.kinds]
        for kind in kinds:
            expected[kind, part.layers.start : part.layers.stop, part.heads.start : part.heads.stop][
                ..., part.begin : part.end
            ] = True
        assert torch.equal(moved, expected), part
        covered += moved if part.by == "distance" else 0
    assert torch.equal(covered[..., 4:], torch.ones(2, 4, 2, 78)) and not covered[..., :4].any()


@pytest.mark.parametrize(
    ("num_layers", "groups"), [(3, ["0-0", "1-1", "2-2"]), (30, ["0-5", "6-11", "12-17", "18-23", "24-29"])]
)
def test_layers_are_grouped_evenly(num_layers: int, groups: list[str]) -> None:
    assert [f"{group.start}-{group.stop - 1}" for group in layer_groups(num_layers)] == groups


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (40, {"0-64": (0, 40)}),
        (64, {"0-64": (0, 64)}),
        (300, {"0-64": (0, 64), "64-256": (64, 256), "256-512": (256, 300)}),
        (1980, {"1024+": (1024, 1980)}),
    ],
)
def test_distances_divide_the_mapped_tokens(num_tokens: int, expected: dict[str, tuple[int, int]]) -> None:
    found = spans(num_tokens)
    assert expected.items() <= found.items() and max(far for _, far in found.values()) == num_tokens


def test_rows_have_the_same_names_at_all_lengths_and_are_ordered_by_division(
    rows: dict[tuple[str, str], PartScore],
) -> None:
    """28 mapped tokens at one length, 78 at the other: their farthest spans are clipped differently."""
    whole = [("all", "all"), ("what", "keys"), ("what", "values")]
    layers = [("layers", f"{i}-{i}") for i in range(4)]
    assert list(rows) == [*whole, *layers, ("distance", "0-64"), ("distance", "64-256"), ("head", "0"), ("head", "1")]
