"""What every method must do, run over the registry, and what `ridge` promises besides."""

from __future__ import annotations

import pytest
import torch

from mappers import CalibrationTooSmall, GeometryMismatch, RankDeficient, UnknownMethod, methods
from mappers.methods.ridge import Ridge
from mappers.stats import Moments

FEATURES, TARGETS = 24, 24


def planted(count: int, noise: float = 0.0, scale: float = 1.0, seed: int = 0) -> tuple[Moments, torch.Tensor]:
    """Moments of features `scale * x` and targets x @ weight + 3 + noise, and the weight; the columns of x span four
    orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64) + 5
    x = x * torch.logspace(-2, 2, FEATURES, dtype=torch.float64)
    y = x @ weight + 3 + noise * torch.randn(count, TARGETS, generator=generator, dtype=torch.float64)
    moments = Moments(FEATURES, TARGETS)
    moments.update(scale * x, y)
    return moments, weight


def of_equals(count: int) -> Moments:
    """Moments of targets that are the features."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
    moments = Moments(FEATURES, FEATURES)
    moments.update(x, x)
    return moments


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_equal_features_and_targets_give_the_identity(name: str) -> None:
    solution = methods.get(name).solve(of_equals(400), of_equals(50))
    torch.testing.assert_close(solution.weight, torch.eye(FEATURES, dtype=torch.float64), atol=1e-3, rtol=0)
    assert solution.bias.abs().max() < 1e-3
    assert solution.r2(of_equals(100)) > 0.99999


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_method_is_registered_under_its_own_name(name: str) -> None:
    assert methods.get(name).name == name


def test_ridge_recovers_a_planted_map() -> None:
    moments, weight = planted(500)
    solution = Ridge(ridges=(0.0,)).solve(moments)
    torch.testing.assert_close(solution.weight, weight, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(solution.bias, torch.full((TARGETS,), 3.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert solution.r2(planted(200, seed=1)[0]) > 1 - 1e-12


def test_losses_are_those_of_the_rows_themselves() -> None:
    moments, weight = planted(300, noise=0.5)
    solution = Ridge(ridges=(0.1,)).solve(moments)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(50, TARGETS, generator=generator, dtype=torch.float64) + 2
    unseen = Moments(FEATURES, TARGETS)
    unseen.update(x, y)
    expected = (y - x @ solution.weight - solution.bias).square().sum(0)
    torch.testing.assert_close(solution.lost(unseen), expected)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_penalty_follows_the_scale_of_the_features(scale: float) -> None:
    plain = Ridge(ridges=(1e-2,)).solve(planted(400, noise=1.0)[0])
    scaled = Ridge(ridges=(1e-2,)).solve(planted(400, noise=1.0, scale=scale)[0])
    torch.testing.assert_close(scale * scaled.weight, plain.weight)


def test_the_penalty_follows_the_number_of_tokens() -> None:
    once, _ = planted(400, noise=1.0)
    thrice = Moments(FEATURES, TARGETS)
    for _ in range(3):
        thrice.merge(once)
    ridge = Ridge(ridges=(1e-2,))
    torch.testing.assert_close(ridge.solve(thrice).weight, ridge.solve(once).weight)


def test_the_penalty_is_chosen_on_held_out_data() -> None:
    train, held_out = planted(110, noise=1e5)[0], planted(500, noise=1e5, seed=1)[0]
    assert Ridge(ridges=(1e-9, 10.0)).solve(train, held_out).ridge == 10.0
    train, held_out = planted(500)[0], planted(500, seed=1)[0]
    assert Ridge(ridges=(1e-9, 10.0)).solve(train, held_out).ridge == 1e-9


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(CalibrationTooSmall, match=f"60 tokens for {FEATURES} features; at least 96"):
        Ridge().solve(planted(60)[0])


def test_dependent_features_are_refused_without_a_penalty() -> None:
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments(16, 4)
    moments.update(torch.cat([x, x], dim=1), x[:, :4])
    with pytest.raises(RankDeficient, match="16 features depend on one another"):
        Ridge(ridges=(0.0,)).solve(moments)
    assert Ridge(ridges=(1e-6,)).solve(moments).r2(moments) > 0.999


def test_a_feature_that_never_varies_does_no_harm() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments(5, 4)
    moments.update(torch.cat([x, torch.full((200, 1), 9.0)], dim=1), x)
    assert Ridge(ridges=(1e-6,)).solve(moments).r2(moments) > 0.999


def test_identity_needs_equal_widths() -> None:
    with pytest.raises(GeometryMismatch, match="24 features to as many; the target has 20"):
        methods.get("identity").solve(Moments(24, 20))


def test_an_unknown_method_is_told_with_those_known() -> None:
    with pytest.raises(UnknownMethod, match="unknown mapper 'rige'; known: identity, ridge"):
        methods.get("rige")
