"""Requirements on every method of the registry, and further ones on `ridge`."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch

from mappers import CalibrationTooSmall, GeometryMismatch, MapperError, RankDeficient, UnknownMethod, methods
from mappers.methods import Layout
from mappers.methods.ridge import Ridge
from mappers.stats import Moments

FEATURES, TARGETS = 24, 24
ONE_HEAD = Layout(1, FEATURES, 1, TARGETS)
HEADS = Layout(source_heads=3, source_dim=8, target_heads=3, target_dim=8)


def planted(count: int, noise: float = 0.0, scale: float = 1.0, seed: int = 0) -> tuple[Moments, torch.Tensor]:
    """Return moments of features `scale * x` and targets x @ weight + 3 + noise, and the weight.

    The columns of x span four orders of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64) + 5
    x = x * torch.logspace(-2, 2, FEATURES, dtype=torch.float64)
    y = x @ weight + 3 + noise * torch.randn(count, TARGETS, generator=generator, dtype=torch.float64)
    moments = Moments(FEATURES, TARGETS)
    moments.update(scale * x, y)
    return moments, weight


def of_equals(count: int) -> Moments:
    """Return moments of targets equal to the features."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
    moments = Moments(FEATURES, FEATURES)
    moments.update(x, x)
    return moments


def mapped(weight: torch.Tensor, count: int, noise: float = 0.0, seed: int = 0) -> Moments:
    """Return moments of white features far from 0 and targets x @ weight - 2 + noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, len(weight), generator=generator, dtype=torch.float64) + 5
    y = x @ weight - 2
    y += noise * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    moments = Moments(*weight.shape)
    moments.update(x, y)
    return moments


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def by_heads() -> torch.Tensor:
    """Target heads 0, 1, 2 from heads 2, 0, 2 of one block and 1, 1, 0 of another."""
    weight = torch.zeros(2 * FEATURES, TARGETS, dtype=torch.float64)
    for target, (first, second) in enumerate([(2, 1), (0, 1), (2, 0)]):
        for block, head in enumerate((first, second)):
            begin = block * FEATURES + head * 8
            weight[begin : begin + 8, target * 8 : (target + 1) * 8] = drawn(8, 8) + block
    return weight


# For every method a map that it can represent.
PLANTS = {
    "hidden": drawn(2 * FEATURES, TARGETS),
    "lowrank": drawn(2 * FEATURES, 5) @ drawn(TARGETS, 5).T,
    "procrustes": torch.linalg.qr(drawn(FEATURES, FEATURES))[0],
    "ridge": drawn(2 * FEATURES, TARGETS),
    "ridge-head": by_heads(),
}
STRUCTURES = {"lowrank": {"rank": 5}, "ridge-head": {"heads": ((2, 1), (0, 1), (2, 0))}}
SIZES = {"lowrank": 5 * (2 * FEATURES + TARGETS), "ridge-head": 2 * FEATURES * TARGETS // 3}


def options(name: str) -> dict[str, Any]:
    """Return options that make a method exact on data without noise."""
    return {"ridges": (1e-12,)} if "ridges" in signature(type(methods.get(name))).parameters else {}


FITTED = sorted(methods.METHODS.keys() - {"identity"})  # identity ignores the data


@pytest.mark.parametrize("name", FITTED)
def test_a_planted_map_is_recovered_with_its_structure(name: str) -> None:
    plant = PLANTS[name]
    solution = methods.get(name, **options(name)).solve(mapped(plant, 400), HEADS, mapped(plant, 100, seed=1))
    torch.testing.assert_close(solution.weight, plant, atol=1e-6, rtol=1e-6)
    unseen = mapped(plant, 100, seed=2)
    assert solution.r2(unseen) > 1 - 1e-9
    assert solution.structure() == STRUCTURES.get(name, {})
    stored = sum(part.numel() for part in solution.parts().values())
    assert stored == SIZES.get(name, plant.numel())


@pytest.mark.parametrize("name", FITTED)
def test_noise_costs_no_more_than_the_noise(name: str) -> None:
    plant = PLANTS[name]
    solution = methods.get(name).solve(mapped(plant, 800, noise=0.3), HEADS, mapped(plant, 200, noise=0.3, seed=1))
    unseen = mapped(plant, 400, noise=0.3, seed=2)
    floor = 0.09 * unseen.count * TARGETS
    assert floor * 0.9 < float(solution.lost(unseen).sum()) < floor * 1.2


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_equal_features_and_targets_give_the_identity(name: str) -> None:
    solution = methods.get(name).solve(of_equals(400), HEADS, of_equals(50))
    torch.testing.assert_close(solution.weight, torch.eye(FEATURES, dtype=torch.float64), atol=1e-3, rtol=0)
    assert solution.bias.abs().max() < 1e-3
    assert solution.r2(of_equals(100)) > 0.99999


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_method_is_registered_under_its_own_name(name: str) -> None:
    assert methods.get(name).name == name


def test_ridge_recovers_a_planted_map() -> None:
    moments, weight = planted(500)
    solution = Ridge(ridges=(0.0,)).solve(moments, ONE_HEAD)
    torch.testing.assert_close(solution.weight, weight, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(solution.bias, torch.full((TARGETS,), 3.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert solution.r2(planted(200, seed=1)[0]) > 1 - 1e-12


def test_losses_from_moments_equal_those_from_rows() -> None:
    moments, weight = planted(300, noise=0.5)
    solution = Ridge(ridges=(0.1,)).solve(moments, ONE_HEAD)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(50, TARGETS, generator=generator, dtype=torch.float64) + 2
    unseen = Moments(FEATURES, TARGETS)
    unseen.update(x, y)
    expected = (y - x @ solution.weight - solution.bias).square().sum(0)
    torch.testing.assert_close(solution.lost(unseen), expected)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_penalty_follows_the_scale_of_the_features(scale: float) -> None:
    plain = Ridge(ridges=(1e-2,)).solve(planted(400, noise=1.0)[0], ONE_HEAD)
    scaled = Ridge(ridges=(1e-2,)).solve(planted(400, noise=1.0, scale=scale)[0], ONE_HEAD)
    torch.testing.assert_close(scale * scaled.weight, plain.weight)


def test_the_penalty_follows_the_number_of_tokens() -> None:
    once, _ = planted(400, noise=1.0)
    thrice = Moments(FEATURES, TARGETS)
    for _ in range(3):
        thrice.merge(once)
    ridge = Ridge(ridges=(1e-2,))
    torch.testing.assert_close(ridge.solve(thrice, ONE_HEAD).weight, ridge.solve(once, ONE_HEAD).weight)


def test_the_penalty_is_chosen_on_held_out_data() -> None:
    train, held_out = planted(110, noise=1e5)[0], planted(500, noise=1e5, seed=1)[0]
    assert Ridge(ridges=(1e-9, 10.0)).solve(train, ONE_HEAD, held_out).ridge == 10.0
    train, held_out = planted(500)[0], planted(500, seed=1)[0]
    assert Ridge(ridges=(10.0, 1e-9)).solve(train, ONE_HEAD, held_out).ridge == 1e-9


@pytest.mark.parametrize("noise", [1.0, 1e2, 1e3, 1e4, 1e5])
def test_the_best_penalty_is_taken(noise: float) -> None:
    ridges = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    train, held_out = planted(110, noise)[0], planted(500, noise, seed=1)[0]
    r2 = {ridge: Ridge(ridges=(ridge,)).solve(train, ONE_HEAD).r2(held_out) for ridge in ridges}
    assert Ridge(ridges=ridges).solve(train, ONE_HEAD, held_out).ridge == max(r2, key=r2.__getitem__)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(CalibrationTooSmall, match=f"60 tokens for {FEATURES} features; at least 96"):
        Ridge().solve(planted(60)[0], ONE_HEAD)


def dependent(dtype: torch.dtype, apart: float = 0.0, count: int = 5000, seed: int = 0) -> Moments:
    """Return moments of 100 features far from 0, of which 60 are sums of the others plus a share `apart` of their own.

    The 4 targets need these shares.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 40, generator=generator, dtype=torch.float64)
    own = apart * torch.randn(count, 60, generator=generator, dtype=torch.float64)
    mixed = x @ torch.linalg.qr(drawn(60, 40))[0].T + own
    targets = x[:, :4] + own[:, :4] / max(apart, 1e-300)
    moments = Moments(100, 4)
    moments.update((torch.cat([x, mixed], dim=1) + 10).to(dtype), targets.to(dtype))
    return moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_features_are_refused_without_a_penalty(dtype: torch.dtype) -> None:
    for seed in range(3):
        moments = dependent(dtype, seed=seed)
        with pytest.raises(RankDeficient, match="100 features are linearly dependent"):
            Ridge(ridges=(0.0,)).solve(moments, ONE_HEAD)
        solution = Ridge(ridges=(0.0, 1e-4)).solve(moments, ONE_HEAD, moments)
        assert solution.ridge == 1e-4 and solution.r2(moments) > 0.999


@pytest.mark.parametrize("ridge", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("apart", [0.01, 0.1])
def test_nearly_dependent_features_are_solved_in_float32_as_in_float64(apart: float, ridge: float) -> None:
    found, exact = (
        Ridge(ridges=(ridge,)).solve(dependent(dtype, apart), ONE_HEAD) for dtype in (torch.float32, torch.float64)
    )
    assert float((found.weight - exact.weight).norm() / exact.weight.norm()) < 0.01
    unseen = dependent(torch.float64, apart, seed=1)
    assert float(found.lost(unseen).sum()) < 1.001 * float(exact.lost(unseen).sum()) + 1e-5 * float(unseen.yy.sum())


def test_a_constant_feature_does_no_harm() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments(5, 4)
    moments.update(torch.cat([x, torch.full((200, 1), 9.0)], dim=1), x)
    assert Ridge(ridges=(1e-6,)).solve(moments, ONE_HEAD).r2(moments) > 0.999


@pytest.mark.parametrize("tolerance", [0.0, 0.5, 2.0])
def test_the_rank_is_the_smallest_within_the_tolerance(tolerance: float) -> None:
    """Compare with the losses of maps fitted with each rank."""
    plant = drawn(2 * FEATURES, TARGETS) * torch.logspace(0, -2, TARGETS, dtype=torch.float64)
    train, held_out = mapped(plant, 300, noise=0.3), mapped(plant, 100, noise=0.3, seed=1)

    def lost(rank: int) -> float:
        return float(methods.get("lowrank", rank=rank).solve(train, HEADS, held_out).lost(held_out).sum())

    most = 15  # from rank 16 on, two factors are not smaller than one matrix
    allowed = (1 + tolerance) * float(methods.get("ridge").solve(train, HEADS, held_out).lost(held_out).sum())
    smallest = next((rank for rank in range(1, most + 1) if lost(rank) <= allowed), None)
    structure = methods.get("lowrank", tolerance=tolerance).solve(train, HEADS, held_out).structure()
    assert structure == ({"rank": smallest} if smallest else {})
    assert (smallest is None) == (tolerance == 0.0)


def test_a_rank_that_saves_no_memory_gives_the_full_matrix() -> None:
    train = mapped(PLANTS["ridge"], 400)
    torch.testing.assert_close(
        methods.get("lowrank", rank=16).solve(train, HEADS).weight, methods.get("ridge").solve(train, HEADS).weight
    )


def test_heads_are_matched_only_if_their_numbers_are_equal() -> None:
    train = mapped(PLANTS["ridge"], 400)
    layout = Layout(source_heads=2, source_dim=12, target_heads=3, target_dim=8)
    assert methods.get("ridge-head").solve(train, layout).structure() == {}
    assert methods.get("ridge-head").solve(train, layout).r2(train) > 0.999


def test_matched_heads_need_fewer_tokens() -> None:
    method, train = methods.get("ridge-head"), mapped(PLANTS["ridge-head"], 70)
    assert (method.tokens_needed(48, HEADS), methods.get("ridge").tokens_needed(48, HEADS)) == (64, 192)
    assert method.solve(train, HEADS).r2(train) > 0.99
    with pytest.raises(CalibrationTooSmall, match="60 tokens for 48 features; at least 64"):
        method.solve(mapped(PLANTS["ridge-head"], 60), HEADS)


def test_rotation_is_by_head_if_the_numbers_of_heads_differ() -> None:
    rotations = [torch.linalg.qr(drawn(8, 8) + i)[0] for i in range(2)]
    weight = torch.zeros(FEATURES, 16, dtype=torch.float64)
    weight[16:, :8], weight[:8, 8:] = rotations
    solution = methods.get("procrustes").solve(mapped(weight, 400), Layout(3, 8, 2, 8))
    assert solution.structure() == {"heads": ((2,), (0,))}
    torch.testing.assert_close(solution.weight, weight, atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("layout", "features", "message"),
    [
        (Layout(3, 8, 2, 6), 24, "heads of equal size; the source has 3 x 8, the target 2 x 6"),
        (HEADS, 48, "procrustes on 48 features; allowed: one block of 24"),
    ],
)
def test_shapes_that_cannot_be_rotated_are_refused(layout: Layout, features: int, message: str) -> None:
    with pytest.raises(GeometryMismatch, match=message):
        methods.get("procrustes").solve(Moments(features, layout.target_width), layout)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lowrank", {"rank": 0}, "rank is 0; allowed: 1 or more"),
        ("lowrank", {"tolerance": -0.1}, "tolerance is -0.1; allowed: 0 or more"),
        ("ridge", {"ridges": ()}, r"ridges are \(\); allowed: at least one"),
        ("ridge", {"ridges": (-1.0,)}, "each 0 or more"),
        ("ridge", {"rank": 3}, "ridge has no option 'rank'; allowed: ridges, tokens_per_feature"),
        ("identity", {"rank": 3}, "identity has no option 'rank'; allowed: none"),
    ],
)
def test_invalid_options_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(MapperError, match=message):
        methods.get(name, **given)


def test_identity_needs_equal_widths() -> None:
    with pytest.raises(GeometryMismatch, match="24 features to as many outputs; the target has 20"):
        methods.get("identity").solve(Moments(24, 20), Layout(1, 24, 1, 20))


def test_an_unknown_method_is_reported_with_the_known_ones() -> None:
    with pytest.raises(UnknownMethod, match="unknown mapper 'rige'; known: hidden, identity, lowrank"):
        methods.get("rige")
