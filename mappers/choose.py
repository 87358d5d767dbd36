"""Chooses the source layers of each target layer: the fewest that are about as good as any on held-out documents.

    top        the layers that explain most alone, best first; compared by R²
    forward    greedy: the block that explains most in addition to those taken; compared by R²
    attention  greedy: of the blocks that explain most alone, the one that brings the target's attention closest to
               its native one; compared by attention, together with the candidates of the two other ways

The number of layers and the penalty are also chosen on held-out documents. The chosen map is then refitted to all
documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mappers.attention import AttentionJudge
from mappers.collect import FeatureGroup
from mappers.errors import CalibrationTooSmall
from mappers.manifest import KINDS, Block, Target
from mappers.methods import Method, Solution
from mappers.methods.base import TINY
from mappers.methods.hidden import Projections, project
from mappers.methods.ridge import cholesky_solve
from mappers.settings import AUTO, FitSettings, Wanted
from mappers.stats import MAX_KEPT, MAX_SHARED, Moments

MIN_GAIN = 0.01  # share of the error that more layers must remove
EXACT = 1e-6  # errors up to this are treated as zero
TOKENS_PER_FEATURE = 10  # to compare source layers by
COLUMNS = 32  # of a target, at most, to compare source layers by
AUTO_LAYERS = 8  # bound of `layers="auto"`
POOL = 3  # candidate blocks per block that may be taken
FORWARD_RIDGE = 1e-3  # relative to each block's own scale; for the comparison only

Blocks = tuple[Block, ...]
Path = list[Blocks]  # sets of increasing size
Search = Callable[["Ranking", int], list[list[Path]]]  # for each target one or more paths, of sets up to this size


@dataclass(frozen=True)
class Choice:
    """Source blocks of one target, ascending, and the map from them.

    `r2` is held-out R² before the refit to all documents. `error` is what the blocks were chosen by.
    """

    blocks: Blocks
    solution: Solution
    r2: float
    error: float


class Chooser:
    """Chooses for the targets of a group. Needs `judge` to choose by attention, `projections` for hidden states."""

    def __init__(
        self, settings: FitSettings, judge: AttentionJudge | None = None, projections: Projections | None = None
    ):
        self._settings, self._method = settings, settings.mapping_method
        self._judge, self._projections = judge, projections

    def choices(self, group: FeatureGroup) -> Iterator[Choice]:
        """Yield a choice for every target in turn. Uses the group up."""
        if group.held_out.count == 0:
            raise CalibrationTooSmall("one document; at least 2 are needed, one of them held out to compare maps on")
        size = self._settings.max_layers(group.source.num_layers, auto=AUTO_LAYERS)
        ranking = Ranking(self._method, group)
        found = SEARCHES[self._settings.choose](ranking, size)
        if self._settings.layers == AUTO:
            found = [[self._affordable(group, path) for path in paths] for paths in found]
        cache = _MomentsCache(group)
        for index, paths in enumerate(self._with_attention_paths(ranking, size, found) if self._judge else found):
            cache.select_target(index, {blocks for path in paths for blocks in path})
            yield self._choice(cache, paths)

    def outputs(self, wanted: Wanted, solution: Solution) -> dict[Target, Solution]:
        """Return the maps to keys and values that a solution for `wanted` stands for."""
        kind, layer = wanted
        if kind != "hidden":
            return {(kind, layer): solution}
        assert self._projections is not None
        return {(kind, layer): project(solution, self._projections[layer][kind]) for kind in KINDS}

    def _affordable(self, group: FeatureGroup, path: Path) -> Path:
        """Return the sets with enough tokens for a fit, at least the smallest one."""
        return [blocks for blocks in path if _is_affordable(self._method, group, blocks)] or [min(path, key=len)]

    def _with_attention_paths(self, ranking: Ranking, size: int, found: list[list[Path]]) -> Iterator[list[Path]]:
        """Yield each target's paths and one found greedily by its attention."""
        group = ranking.group
        size *= len(group.kinds)
        for index, paths in enumerate(found):
            pool = ranking.alone[:, index].argsort(stable=True, descending=True)[: POOL * size].tolist()
            blocks = [group.blocks[i] for i in pool]
            yield [*paths, greedy_path(partial(self._attention_error, group, index), blocks, size)]

    def _attention_error(self, group: FeatureGroup, index: int, blocks: Blocks) -> float:
        """Return the error of a rough fit, infinite with too few tokens for one."""
        assert self._judge is not None
        if not _is_affordable(self._method.rough, group, blocks):
            return math.inf
        columns = group.features(blocks), group.outputs(index)
        train, held_out = group.train.select(*columns), group.held_out.select(*columns)
        solution = self._method.rough.solve(train, group.layout, held_out)
        return self._judge.error(blocks, self.outputs(group.targets[index], solution))

    def _choice(self, cache: _MomentsCache, paths: list[Path]) -> Choice:
        """Return the best set of these paths, refitted to all documents."""
        solved: dict[Blocks, Choice] = {}
        for path in paths:
            # From the largest set on, while smaller ones are about as good.
            least = math.inf
            for blocks in sorted(path, key=len, reverse=True):
                if blocks not in solved:
                    solved[blocks] = self._solve(cache, blocks)
                error = solved[blocks].error
                if not _is_about_as_good(error, least):
                    break
                least = min(least, error)
        choice = best_choice(list(solved.values()))
        everything = cache.everything(choice.blocks)
        return replace(choice, solution=self._method.refit(choice.solution, everything, cache.group.layout))

    def _solve(self, cache: _MomentsCache, blocks: Blocks) -> Choice:
        group, train, held_out = cache.group, cache.train(blocks), cache.held_out(blocks)
        solution = self._method.solve(train, group.layout, held_out)
        r2 = solution.r2(held_out)
        error = 1 - r2
        if self._judge:
            error = self._judge.error(blocks, self.outputs(group.targets[cache.index], solution))
        return Choice(blocks, solution, r2, error)


def best_choice(choices: Sequence[Choice]) -> Choice:
    """Return the choice with the fewest blocks among those about as good as the best; of several, the best."""
    least = min(choice.error for choice in choices)
    good = [choice for choice in choices if _is_about_as_good(choice.error, least)]
    return min(good, key=lambda choice: (len(choice.blocks), choice.error))


def _is_about_as_good(error: float, least: float) -> bool:
    return error <= (1 + MIN_GAIN) * least + EXACT


def _is_affordable(method: Method, group: FeatureGroup, blocks: Blocks) -> bool:
    return method.tokens_needed(len(blocks) * group.source.width, group.layout) <= group.train.effective


class _MomentsCache:
    """Moments of sets of blocks for one target after another.

    Targets are often computed from the same blocks. What depends on the blocks alone is kept in memory for the next
    targets if it is small, the least recently used first to go.
    """

    def __init__(self, group: FeatureGroup):
        self.group, self.index = group, 0
        self._union: Blocks = ()
        self._of_union: dict[str, Moments] = {}  # by split, with the current target
        self._kept: dict[tuple[str, Blocks], Moments] = {}  # most recently used last

    def select_target(self, index: int, needed: Collection[Blocks]) -> None:
        """Start with a target and the sets of blocks that will be asked for."""
        self.index, self._union, self._of_union = index, _union(needed), {}

    def train(self, blocks: Blocks) -> Moments:
        return self._part("train", blocks)

    def held_out(self, blocks: Blocks) -> Moments:
        return self._part("held out", blocks)

    def everything(self, blocks: Blocks) -> Moments:
        """Return the moments of both splits."""
        columns, like = self._columns(blocks), self._kept.get(("everything", blocks))
        merged = self._all_blocks("train").select(*columns, like=like)
        merged.merge(self._all_blocks("held out").select(*columns, like=like))
        return self._keep("everything", blocks, merged)

    def _part(self, split: str, blocks: Blocks) -> Moments:
        union = self._all_blocks(split)
        if blocks == self._union:
            return union
        return self._keep(split, blocks, union.select(*self._columns(blocks), like=self._kept.get((split, blocks))))

    def _all_blocks(self, split: str) -> Moments:
        if split not in self._of_union:
            accumulator = self.group.train if split == "train" else self.group.held_out
            columns = self.group.features(self._union), self.group.outputs(self.index)
            like = self._kept.get((split, self._union))
            self._of_union[split] = self._keep(split, self._union, accumulator.select(*columns, like=like))
        return self._of_union[split]

    def _columns(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return the columns of these blocks and of the target among those of the union."""
        width, device = self.group.source.width, self.group.device
        starts = [self._union.index(block) * width for block in blocks]
        features = torch.cat([torch.arange(start, start + width) for start in starts])
        return features.to(device), torch.arange(self.group.layout.target_width, device=device)

    def _keep(self, split: str, blocks: Blocks, moments: Moments) -> Moments:
        if moments.num_features <= MAX_SHARED:
            self._kept.pop((split, blocks), None)
            self._kept[split, blocks] = moments
            while sum(kept.num_features**2 for kept in self._kept.values()) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return moments


# Ranking: how much blocks explain alone.


def rank(method: Method, group: FeatureGroup, candidates: Sequence[Blocks]) -> Tensor:
    """Return held-out R² of each candidate alone, (candidates, targets). One solve serves all targets.

    Uses only some columns of each target and, while rows are raw, only as many tokens as needed.
    """
    targets = _compared_columns(method, group)
    rows = []
    for blocks in candidates:
        features = group.features(blocks)
        enough = max(TOKENS_PER_FEATURE * len(features), method.rough.tokens_needed(len(features), group.layout))
        train, held_out = group.train.select(features, targets, enough), group.held_out.select(features, targets)
        lost = method.rough.solve(train, group.layout).lost(held_out)
        rows.append(1 - _per_target(lost, group) / _per_target(held_out.yy, group).clamp_min(TINY))
    return torch.stack(rows)


class Ranking:
    """Caches `rank` by candidates."""

    def __init__(self, method: Method, group: FeatureGroup):
        self.group = group
        self._method = method
        self._known: dict[tuple[Blocks, ...], Tensor] = {}

    def of(self, candidates: Sequence[Blocks]) -> Tensor:
        key = tuple(candidates)
        if key not in self._known:
            self._known[key] = rank(self._method, self.group, key)
        return self._known[key]

    @property
    def alone(self) -> Tensor:
        """Held-out R² of every block alone, (blocks, targets)."""
        return self.of([(block,) for block in self.group.blocks])


def _compared_columns(method: Method, group: FeatureGroup) -> Tensor:
    """Return columns of all targets: a regular sample of each where the method fits columns independently."""
    width = group.layout.target_width
    some = torch.arange(0, width, -(-width // COLUMNS) if method.rough.is_columnwise else 1)
    return (width * torch.arange(len(group.targets))[:, None] + some).flatten().to(group.device)


def _per_target(per_column: Tensor, group: FeatureGroup) -> Tensor:
    return per_column.view(len(group.targets), -1).sum(1)


def _union(parts: Iterable[Blocks]) -> Blocks:
    return tuple(sorted({block for part in parts for block in part}))


# Searches: candidate sets of blocks.


def _top(ranking: Ranking, size: int) -> list[list[Path]]:
    group = ranking.group
    layers = [tuple((kind, layer) for kind in group.kinds) for layer in range(group.source.num_layers)]
    best_first = ranking.of(layers).argsort(stable=True, dim=0, descending=True).T.tolist()
    return [[[_union([layers[i] for i in order[:k]]) for k in range(1, size + 1)]] for order in best_first]


def _forward(ranking: Ranking, size: int) -> list[list[Path]]:
    """Joint features are chosen kind by kind, as many blocks in total as with `top`."""
    group = ranking.group
    group.fold()  # nearly all columns are needed
    size *= len(group.kinds)
    return [[forward_path(group, index, ranking.alone[:, index], size)] for index in range(len(group.targets))]


def _top_and_forward(ranking: Ranking, size: int) -> list[list[Path]]:
    ranking.group.fold()
    return [a + b for a, b in zip(_top(ranking, size), _forward(ranking, size), strict=True)]


SEARCHES: dict[str, Search] = {"top": _top, "forward": _forward, "attention": _top_and_forward}


def greedy_path(error: Callable[[Blocks], float], pool: Sequence[Block], size: int) -> list[Blocks]:
    """Return sets of 1, 2, ... up to `size` blocks of the pool, each extending the last by the block of least error.

    Stops when the error no longer falls.
    """
    path: list[Blocks] = []
    least = math.inf
    while len(path) < min(size, len(pool)):
        taken = path[-1] if path else ()
        sets = [_union([taken, (block,)]) for block in pool if block not in taken]
        errors = {blocks: error(blocks) for blocks in sets}
        nearest = min(errors, key=errors.__getitem__)
        if errors[nearest] >= least:
            break
        least = errors[nearest]
        path.append(nearest)
    return path


def forward_path(group: FeatureGroup, index: int, r2_alone: Tensor, size: int) -> list[Blocks]:
    """Return sets of 1, 2, ..., `size` blocks for one target by forward selection, each extending the last.

    `r2_alone` (blocks,) is the R² of each block alone; the first block is the best of them. Linear algebra on the
    statistics: one solve for all candidates per step instead of one fit per candidate. Beside the selected columns S, a
    candidate block c adds only its residual Z_c:

        Z_c = X_c - X_S W_c,    W_c = P_SS^-1 G_Sc                (G the training Gram, P the same with its penalty)
        B_c = (P_cc - G_cS W_c)^-1 (X_c'Y - W_c' X_S'Y)           its part of the map, fitted on training moments
        gain = 2 <Z_c'E, B_c> - <B_c, Z_c'Z_c B_c>                reduction of the held-out squared error E
    """
    pool = r2_alone.argsort(stable=True, descending=True)[: POOL * size].tolist()
    selection = _Selection(group, index, [group.blocks[i] for i in pool])
    taken = [0]
    while len(taken) < min(size, len(pool)):
        gains = selection.gains(taken)
        taken.append(max(gains, key=gains.__getitem__))
    blocks = [group.blocks[pool[i]] for i in taken]
    return [tuple(sorted(blocks[:k])) for k in range(1, len(blocks) + 1)]


class _Selection:
    """Moments of one target and its candidate blocks, in the candidates' order."""

    def __init__(self, group: FeatureGroup, index: int, candidates: list[Block]):
        features, targets = group.features(candidates), group.outputs(index)
        train, held_out = group.train.select(features, targets), group.held_out.select(features, targets)
        self._gram, self._cross = train.gram(), train.xy
        self._held_gram, self._held_cross = held_out.gram(), held_out.xy
        self._num, self._width = len(candidates), len(features) // len(candidates)
        self._resolution = train.resolution
        diagonal = self._gram.diagonal().view(self._num, -1)
        self._penalty = (FORWARD_RIDGE * diagonal.mean(1, keepdim=True)).expand_as(diagonal).flatten()

    def gains(self, taken: list[int]) -> dict[int, float]:
        """Return how much each other candidate reduces the held-out squared error in addition to those taken."""
        s = torch.cat([torch.arange(i * self._width, (i + 1) * self._width) for i in taken]).to(self._gram.device)
        g, h = self._gram[s], self._held_gram[s]  # (s, p)
        inner = g[:, s] + torch.diag(self._penalty[s])
        solved = cholesky_solve(inner, torch.cat([g, self._cross[s]], dim=1), self._resolution)
        w, b = solved[:, : len(self._gram)], solved[:, len(self._gram) :]  # (s, p), (s, q)
        left = self._held_cross[s] - h[:, s] @ b  # X_S'E
        curved = h - h[:, s] @ w  # X_S'Z
        others = [i for i in range(self._num) if i not in taken]
        return {i: self._gain(i, g, h, w, b, left, curved) for i in others}

    def _gain(self, i: int, g: Tensor, h: Tensor, w: Tensor, b: Tensor, left: Tensor, curved: Tensor) -> float:
        c = slice(i * self._width, (i + 1) * self._width)
        inner = self._gram[c, c] + torch.diag(self._penalty[c]) - g[:, c].T @ w[:, c]
        added = cholesky_solve(inner, self._cross[c] - g[:, c].T @ b, self._resolution)  # W_c' X_S'Y = G_cS B_S
        explained = self._held_cross[c] - h[:, c].T @ b - w[:, c].T @ left  # Z_c'E
        power = self._held_gram[c, c] - h[:, c].T @ w[:, c] - w[:, c].T @ curved[:, c]  # Z_c'Z_c
        return float((added * (2 * explained - power @ added)).sum())
