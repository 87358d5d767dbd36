"""Choice of source layers, on constructed statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import CalibrationTooSmall, KVGeometry, MapperError, methods
from mappers.attention import NEAR, AttentionJudge
from mappers.choose import COLUMNS, FORWARD_RIDGE, Choice, Chooser, forward_path, greedy_path, rank
from mappers.collect import HELD_OUT_EVERY, DocumentStates, FeatureGroup
from mappers.manifest import Block
from mappers.methods import Layout, Solution
from mappers.methods.ridge import Ridge, cholesky_solve
from mappers.models import load_model, prefill
from mappers.rope import Rope
from mappers.settings import FitSettings, Wanted
from mappers.stats import Moments
from tests.mappers.pairs import HEAD_DIM, KV_HEADS, fit_with, random_cache, random_documents

LAYERS, WIDTH = 5, 3
RIDGE_ONLY = Ridge(ridges=(FORWARD_RIDGE,))


def group(x: torch.Tensor, *y: torch.Tensor) -> FeatureGroup:
    """Rows x (n, LAYERS * WIDTH) and (n, WIDTH) of each target, a third of them held out."""
    targets: list[Wanted] = [("keys", layer) for layer in range(len(y))]
    made = FeatureGroup(("keys",), targets, KVGeometry(LAYERS, 1, WIDTH), Layout(1, WIDTH, 1, WIDTH), "cpu", len(x))
    return add_rows(made, x, torch.cat(y, dim=1))


def add_rows(made: FeatureGroup, x: torch.Tensor, y: torch.Tensor) -> FeatureGroup:
    cut = len(x) * 2 // 3
    made.train.update(x[:cut], y[:cut])
    made.held_out.update(x[cut:], y[cut:])
    return made


def folded(made: FeatureGroup) -> FeatureGroup:
    made.fold()
    return made


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices(group: FeatureGroup, **settings: Any) -> Iterator[Choice]:
    return Chooser(FitSettings(**settings)).choices(group)


def complementary() -> FeatureGroup:
    """y = a + b / 2: layers 1 and 3 contain a, layer 4 contains b, the others are noise."""
    a, b = noise(600, WIDTH, seed=1), noise(600, WIDTH, seed=2)
    parts = [noise(600, WIDTH, seed=10 + layer) for layer in range(LAYERS)]
    parts[1], parts[3], parts[4] = a + 0.3 * parts[1], a + 0.4 * parts[3], b + 0.1 * parts[4]
    return group(torch.cat(parts, dim=1), a + b / 2)


def test_top_takes_the_best_layers_alone_and_forward_those_that_add_most() -> None:
    (top,) = choices(complementary(), method="ridge", choose="top", layers=2)
    (forward,) = choices(complementary(), method="ridge", choose="forward", layers=2)
    assert top.blocks == (("keys", 1), ("keys", 3)) and forward.blocks == (("keys", 1), ("keys", 4))
    assert forward.r2 > 0.9 > top.r2


def test_rows_and_their_moments_lead_to_the_same_choice() -> None:
    for layers in (1, 2, "auto"):
        (choice,) = choices(complementary(), method="ridge", choose="top", layers=layers)
        (again,) = choices(folded(complementary()), method="ridge", choose="top", layers=layers)
        assert choice.blocks == again.blocks and choice.r2 == pytest.approx(again.r2)
        torch.testing.assert_close(choice.solution.weight, again.solution.weight)


@pytest.mark.parametrize("method", ["ridge", "lowrank", "ridge-head", "procrustes"])
@pytest.mark.parametrize("way", ["top", "forward"])
def test_targets_are_chosen_and_fitted_independently(method: str, way: str) -> None:
    x, targets = noise(600, LAYERS * WIDTH), [noise(600, WIDTH, seed=20 + index) for index in range(4)]
    for index, y in enumerate(targets):  # the first three from layers 1 and 2, the last from 3
        y += 3 * (x[:, WIDTH : 2 * WIDTH] + x[:, 2 * WIDTH : 3 * WIDTH] if index < 3 else x[:, 3 * WIDTH : 4 * WIDTH])
    together = list(choices(group(x, *targets), method=method, choose=way, layers=2))
    for y, choice in zip(targets, together, strict=True):
        (alone,) = choices(group(x, y), method=method, choose=way, layers=2)
        assert choice.blocks == alone.blocks and choice.r2 == pytest.approx(alone.r2)
        torch.testing.assert_close(choice.solution.weight, alone.solution.weight)
        torch.testing.assert_close(choice.solution.bias, alone.solution.bias)


def test_wide_targets_are_compared_on_a_sample_of_columns() -> None:
    width = 3 * COLUMNS + 1
    x = noise(60 * width, 2 * width, seed=3)
    targets: list[Wanted] = [("keys", 0), ("keys", 1)]
    made = FeatureGroup(("keys",), targets, KVGeometry(2, 1, width), Layout(1, width, 1, width), "cpu", len(x))
    y = torch.cat([x[:, width:].roll(7, 1), x[:, :width].roll(7, 1)], dim=1)
    r2 = rank(
        methods.get("ridge"), add_rows(made, x, y + noise(len(x), 2 * width)), [(block,) for block in made.blocks]
    )
    assert r2.shape == (2, 2) and r2.diagonal().max() < 0.1 and r2.flip(0).diagonal().min() > 0.4


def test_too_many_rows_are_folded_to_moments() -> None:
    layout = Layout(KV_HEADS, HEAD_DIM, KV_HEADS, HEAD_DIM)
    made = FeatureGroup(("keys",), [("keys", 0)], KVGeometry(2, KV_HEADS, HEAD_DIM), layout, "cpu", max_rows=25)
    states = DocumentStates(random_cache(2, 10), {})
    for held_out, is_folded in ((False, False), (True, False), (False, True), (False, True)):
        made.update(states, states, held_out)
        assert (made.train.moments is not None) == (made.held_out.moments is not None) == is_folded
    assert (made.train.count, made.held_out.count) == (30, 10)
    assert [batch.count for batch in made.train.batches] == [20], "rows since the fold wait for a full batch"


@pytest.mark.parametrize("seed", range(3))
def test_forward_selection_is_greedy_on_held_out_data(seed: int) -> None:
    """Compare with one fit per candidate and step."""
    mixed = noise(300, LAYERS * WIDTH, seed=seed) @ noise(LAYERS * WIDTH, LAYERS * WIDTH, seed=20 + seed)
    made = group(mixed, mixed @ noise(LAYERS * WIDTH, WIDTH, seed=40 + seed) + 9 * noise(300, WIDTH, seed=60 + seed))

    def lost(blocks: list[tuple[Any, int]]) -> float:
        train, held_out = (m.select(made.features(blocks), made.outputs(0)) for m in (made.train, made.held_out))
        diagonal = train.gram().diagonal().view(len(blocks), -1)
        penalty = FORWARD_RIDGE * diagonal.mean(1, keepdim=True).expand_as(diagonal).flatten()
        weight = cholesky_solve(train.gram() + torch.diag(penalty), train.xy, train.resolution)
        bias = held_out.mean_y - held_out.mean_x @ weight  # the selection ignores a shift of the means
        return float(Solution(weight, bias).lost(held_out).sum())

    path = forward_path(made, 0, rank(RIDGE_ONLY, made, [(block,) for block in made.blocks])[:, 0], 4)
    for before, after in zip(path, path[1:], strict=False):
        left = [block for block in made.blocks if block not in before]
        assert set(after) - set(before) == {min(left, key=lambda block: lost(sorted([*before, block])))}
    assert [len(blocks) for blocks in path] == [1, 2, 3, 4]


def test_joint_features_are_chosen_one_by_one(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(folders["other"], folders["large"], documents, layers=2, joint=True, choose="forward")
    specs = [spec.keys for spec in mapper.manifest.layers]
    assert any(spec.key_layers != spec.value_layers for spec in specs)
    assert max(len(spec.key_layers) + len(spec.value_layers) for spec in specs) <= 4
    assert mapper.manifest.options["choose"] == "forward"


def test_auto_takes_the_layers_that_help_and_the_tokens_allow() -> None:
    """56 tokens are enough for 12 features (48 needed), but too few for 15."""
    x = noise(84, LAYERS * WIDTH)  # 56 of them for training
    (choice,) = choices(group(x, x[:, :WIDTH] + x[:, WIDTH : 2 * WIDTH]), method="ridge", choose="top", layers="auto")
    assert [layer for _, layer in choice.blocks] == [0, 1]
    (choice,) = choices(group(x, x.unflatten(1, (LAYERS, -1)).sum(1)), method="ridge", choose="top", layers="auto")
    assert len(choice.blocks) == 4
    with pytest.raises(CalibrationTooSmall, match="56 tokens for 15 features; at least 60"):
        next(choices(group(x, x[:, :WIDTH]), method="ridge", choose="top", layers=5))


def test_the_refit_includes_the_held_out_documents() -> None:
    x, y = noise(300, LAYERS * WIDTH), noise(300, WIDTH, seed=1)
    made = group(x, x[:, :WIDTH] + y)
    (choice,) = choices(made, choose="top", layers=1, method_options={"ridges": (FORWARD_RIDGE,)})
    whole = Moments(WIDTH, WIDTH)
    whole.update(x[:, made.features(choice.blocks)], x[:, :WIDTH] + y)
    expected = RIDGE_ONLY.solve(whole, made.layout)
    torch.testing.assert_close(choice.solution.weight, expected.weight)


class FakeJudge:
    """A judge that prefers layer 2, then layers 0 and 2, unlike R²; otherwise more layers are better."""

    def error(self, blocks: Any, outputs: Any) -> float:
        others = 0.9 - 0.1 * len(blocks)
        return {frozenset({2}): 0.5, frozenset({0, 2}): 0.1}.get(frozenset(layer for _, layer in blocks), others)


def test_choosing_by_attention_is_greedy_in_the_attention_error() -> None:
    chooser = Chooser(FitSettings(choose="attention", layers=3), FakeJudge())  # type: ignore[arg-type]
    (choice,) = chooser.choices(complementary())
    assert choice.blocks == (("keys", 0), ("keys", 2)) and choice.error == 0.1


def test_a_greedy_path_ends_when_the_error_stops_falling() -> None:
    pool: list[Any] = [("keys", layer) for layer in range(5)]
    calls: list[Any] = []

    def error(blocks: Any) -> float:
        calls.append(blocks)
        return float(abs(7 - sum(layer for _, layer in blocks)))

    assert greedy_path(error, pool, 4) == [(("keys", 4),), (("keys", 3), ("keys", 4))]
    assert len(calls) == 5 + 4 + 3 and len(greedy_path(error, pool, 1)) == 1 and greedy_path(error, [], 4) == []
    assert greedy_path(lambda blocks: math.inf, pool, 4) == []


@pytest.fixture(scope="module")
def judge(folders: dict[str, Path]) -> AttentionJudge:
    model = load_model(folders["large"])
    return AttentionJudge((model, model), (Rope.of(model), Rope.of(model)), random_documents(2, 100), 4)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_attention_over_its_own_states_has_no_error(judge: AttentionJudge, kind: Any) -> None:
    width = KV_HEADS * HEAD_DIM
    exact = Solution(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
    noisy = Solution(exact.weight + 0.1 * noise(width, width), exact.bias)
    nothing = Solution(0 * exact.weight, exact.bias)
    errors = [judge.error([(kind, 2)], {(kind, 2): solution}) for solution in (exact, noisy, nothing)]
    assert errors[0] < 1e-6 < 1e-3 < errors[1] < errors[2]


def test_documents_too_short_for_mapped_tokens_are_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["large"])
    with pytest.raises(CalibrationTooSmall, match=f"no held-out document of more than {NEAR + 4} tokens"):
        AttentionJudge((model, model), (Rope.of(model), Rope.of(model)), random_documents(2, NEAR + 4), 4)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_head_and_near_tokens_are_native(folders: dict[str, Path], kind: Any) -> None:
    """The only measured query sees one mapped token: errors for other tokens make no difference."""
    model = load_model(folders["large"])
    (document,) = random_documents(1, NEAR + 5)
    width = KV_HEADS * HEAD_DIM
    judge = AttentionJudge((model, model), (Rope.of(model), Rope.of(model)), [document], 4)
    plain = Rope.of(model).strip_cache(prefill(model, document))
    mapped = plain.of(kind)[1][:, 4].flatten().double()
    right = Solution(torch.zeros(width, width, dtype=torch.float64), mapped)  # right for token 4 only
    wrong = Solution(right.weight, -30 * right.bias)
    assert judge.error([(kind, 1)], {(kind, 1): right}) < 1e-6 < judge.error([(kind, 1)], {(kind, 1): wrong})


def test_choosing_by_attention_is_at_least_as_good_by_attention(
    folders: dict[str, Path], documents: list[list[int]]
) -> None:
    """Measure the choice of each way by attention on the held-out documents."""
    given: dict[str, Any] = {"layers": 2, "precision": "float32", "method": "ridge", "ridges": (1e-2,)}
    models = load_model(folders["other"]), load_model(folders["large"])
    ropes = Rope.of(models[0]), Rope.of(models[1])
    held_out = [ids for i, ids in enumerate(documents) if i % HELD_OUT_EVERY == 1]
    judge = AttentionJudge(models, ropes, held_out, 4)
    found = {}
    for way in ("top", "forward", "attention"):
        mapper = fit_with(folders["other"], folders["large"], documents, choose=way, **given)
        errors = []
        for layer, spec in enumerate(mapper.manifest.layers):
            weight, bias = (mapper.weights[f"layers.{layer}.keys.{part}"].double() for part in ("weight", "bias"))
            blocks: list[Block] = [("keys", i) for i in spec.keys.key_layers]
            errors.append(judge.error(blocks, {("keys", layer): Solution(weight, bias)}))
        found[way] = sum(errors)
    assert found["attention"] <= 1.02 * min(found.values())


def test_an_unknown_way_to_choose_is_refused(folders: dict[str, Path], documents: list[list[int]]) -> None:
    with pytest.raises(MapperError, match="choose is 'best'; allowed: attention, forward, top"):
        fit_with(folders["twin"], folders["large"], documents, choose="best")
