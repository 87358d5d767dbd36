"""Which source layers a target layer is computed from: as few as are about as good as any on held-out documents.

    top        the layers that explain most alone, best first; judged by R²
    forward    greedily, the one that explains most beside those already taken (see `mappers.choose`); judged by R²
    attention  greedily, of those that explain most alone the one with which the target's attention comes nearest to its
               native one; judged by that, as what the two other ways take is too (see `mappers.attention`)

How many layers are taken, and with what penalty, is decided on held-out documents as well; then each map is fitted once
more to all documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mappers.attention import AttentionJudge
from mappers.collect import Group, Wanted
from mappers.errors import CalibrationTooSmall, MapperError
from mappers.manifest import KINDS, Block, Target
from mappers.methods import Method, Solution
from mappers.methods.base import TINY
from mappers.methods.hidden import Projections, projected
from mappers.methods.ridge import cholesky_solve
from mappers.stats import MOST_KEPT, MOST_SHARED, Moments

WORTH = 0.01  # more layers must take at least this share off what is lost
EXACT = 1e-6  # an error that can't be told from none
ENOUGH = 10  # tokens a feature, to compare source layers by
COLUMNS = 32  # of a target, at most, to compare them by
AUTO = "auto"  # as many layers as pay and as the tokens allow, up to:
AUTO_LAYERS = 8

Blocks = tuple[Block, ...]
Path = list[Blocks]  # ever more of them
Outputs = dict[Target, Solution]
Way = Callable[["Ranking", int], list[list[Path]]]  # one or several of each target


@dataclass(frozen=True)
class Choice:
    """The source blocks of one target, ascending, with the map from them, and its R² on held-out documents before these
    were added to the rest. `error` is what it was chosen by."""

    blocks: Blocks
    solution: Solution
    r2: float
    error: float


class Chooser:
    """Chooses for the targets of a group. `judge` is needed for the way `attention`, `projections` for targets that are
    hidden states."""

    def __init__(
        self, method: Method, way: str, judge: AttentionJudge | None = None, projections: Projections | None = None
    ):
        self._method, self._paths, self._judge, self._projections = method, _way(way), judge, projections

    def choices(self, group: Group, layers: int | str) -> Iterator[Choice]:
        """A choice for every target in turn, from at most so many source layers. Uses the group up."""
        if group.held_out.count == 0:
            raise CalibrationTooSmall("one document; at least 2 are needed, to judge a fit on what it has not seen")
        most = AUTO_LAYERS if isinstance(layers, str) else layers
        most = min(most, group.source.num_layers, self._method.max_layers or most)
        ranking = Ranking(self._method, group)
        found = self._paths(ranking, most)
        if layers == AUTO:
            found = [[self._affordable(group, path) for path in paths] for paths in found]
        shared = _Shared(group)
        for index, paths in enumerate(self._attended(ranking, most, found) if self._judge else found):
            shared.go_to(index, {blocks for path in paths for blocks in path})
            yield self._choice(shared, paths)

    def outputs(self, wanted: Wanted, solution: Solution) -> Outputs:
        """The keys and values that a solution gives."""
        kind, layer = wanted
        if kind != "hidden":
            return {(kind, layer): solution}
        assert self._projections is not None
        return {(kind, layer): projected(solution, self._projections[layer][kind]) for kind in KINDS}

    def _affordable(self, group: Group, path: Path) -> Path:
        """Those that there are enough tokens for; the smallest in any case."""
        return [blocks for blocks in path if _is_affordable(self._method, group, blocks)] or [min(path, key=len)]

    def _attended(self, ranking: Ranking, most: int, found: list[list[Path]]) -> Iterator[list[Path]]:
        """These paths, and with each target's the one that is found greedily by its attention."""
        group = ranking.group
        most *= len(group.kinds)
        for index, paths in enumerate(found):
            pool = ranking.alone[:, index].argsort(stable=True, descending=True)[: POOL * most].tolist()
            blocks = [group.blocks[i] for i in pool]
            yield [*paths, greedy_path(partial(self._attention_error, group, index), blocks, most)]

    def _attention_error(self, group: Group, index: int, blocks: Blocks) -> float:
        """By a rough fit; infinite where there are too few tokens for one."""
        assert self._judge is not None
        if not _is_affordable(self._method.rough, group, blocks):
            return math.inf
        columns = group.features(blocks), group.outputs(index)
        train, held_out = group.train.select(*columns), group.held_out.select(*columns)
        solution = self._method.rough.solve(train, group.layout, held_out)
        return self._judge.error(blocks, self.outputs(group.targets[index], solution))

    def _choice(self, shared: _Shared, paths: list[Path]) -> Choice:
        """The best of these paths, fitted to all documents."""
        solved: dict[Blocks, Choice] = {}
        for path in paths:
            self._walk(shared, path, solved)
        choice = best(list(solved.values()))
        everything = shared.everything(choice.blocks)
        return replace(choice, solution=self._method.refit(choice.solution, everything, shared.group.layout))

    def _walk(self, shared: _Shared, path: Path, solved: dict[Blocks, Choice]) -> None:
        """Solves what is not solved yet, from the path's end on as long as fewer blocks do about as well."""
        least = math.inf
        for blocks in sorted(path, key=len, reverse=True):
            if blocks not in solved:
                solved[blocks] = self._solved(shared, blocks)
            error = solved[blocks].error
            if not _is_about(error, least):
                break
            least = min(least, error)

    def _solved(self, shared: _Shared, blocks: Blocks) -> Choice:
        group, train, held_out = shared.group, shared.train(blocks), shared.held_out(blocks)
        solution = self._method.solve(train, group.layout, held_out)
        r2 = solution.r2(held_out)
        error = 1 - r2
        if self._judge:
            error = self._judge.error(blocks, self.outputs(group.targets[shared.index], solution))
        return Choice(blocks, solution, r2, error)


def best(choices: Sequence[Choice]) -> Choice:
    """Of those that are about as good as any, one from the fewest blocks, and of these the best."""
    least = min(choice.error for choice in choices)
    good = [choice for choice in choices if _is_about(choice.error, least)]
    return min(good, key=lambda choice: (len(choice.blocks), choice.error))


def _is_about(error: float, least: float) -> bool:
    """Whether more blocks are not worth what they take off this error."""
    return error <= (1 + WORTH) * least + EXACT


def _is_affordable(method: Method, group: Group, blocks: Blocks) -> bool:
    return method.tokens_needed(len(blocks) * group.source.width, group.layout) <= group.train.effective


class _Shared:
    """Moments of blocks of one target's path after another's. Targets are often computed from the same blocks: what was
    made of those alone, and used last, is kept where it is not large."""

    def __init__(self, group: Group):
        self.group, self.index = group, 0
        self._path: Blocks = ()
        self._wholes: dict[str, Moments] = {}  # of all blocks of the path, and the target
        self._kept: dict[tuple[str, Blocks], Moments] = {}  # those used last at the end

    def go_to(self, index: int, asked_for: Collection[Blocks]) -> None:
        """A target, and the blocks that moments will be asked of."""
        self.index, self._path, self._wholes = index, _joined(asked_for), {}

    def train(self, blocks: Blocks) -> Moments:
        return self._part("train", blocks)

    def held_out(self, blocks: Blocks) -> Moments:
        return self._part("held out", blocks)

    def everything(self, blocks: Blocks) -> Moments:
        """Of both."""
        columns, like = self._columns(blocks), self._kept.get(("everything", blocks))
        merged = self._whole("train").select(*columns, like=like)
        merged.merge(self._whole("held out").select(*columns, like=like))
        return self._keep("everything", blocks, merged)

    def _part(self, which: str, blocks: Blocks) -> Moments:
        whole = self._whole(which)
        if blocks == self._path:
            return whole
        return self._keep(which, blocks, whole.select(*self._columns(blocks), like=self._kept.get((which, blocks))))

    def _whole(self, which: str) -> Moments:
        if which not in self._wholes:
            gathered = self.group.train if which == "train" else self.group.held_out
            columns = self.group.features(self._path), self.group.outputs(self.index)
            like = self._kept.get((which, self._path))
            self._wholes[which] = self._keep(which, self._path, gathered.select(*columns, like=like))
        return self._wholes[which]

    def _columns(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Of these blocks and the target, among those of the whole path."""
        width, device = self.group.source.width, self.group.device
        starts = [self._path.index(block) * width for block in blocks]
        features = torch.cat([torch.arange(start, start + width) for start in starts])
        return features.to(device), torch.arange(self.group.layout.target_width, device=device)

    def _keep(self, which: str, blocks: Blocks, moments: Moments) -> Moments:
        if moments.num_features <= MOST_SHARED:
            self._kept.pop((which, blocks), None)
            self._kept[which, blocks] = moments
            while sum(kept.num_features**2 for kept in self._kept.values()) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return moments


def greedy_path(error: Callable[[Blocks], float], pool: Sequence[Block], most: int) -> list[Blocks]:
    """Sets of 1, 2, ... blocks of the pool, up to `most`, ascending: each is the one before it and the block with which
    the error is least, as long as it falls."""
    path: list[Blocks] = []
    least = math.inf
    while len(path) < min(most, len(pool)):
        taken = path[-1] if path else ()
        sets = [_joined([taken, (block,)]) for block in pool if block not in taken]
        errors = {blocks: error(blocks) for blocks in sets}
        nearest = min(errors, key=errors.__getitem__)
        if errors[nearest] >= least:
            break
        least = errors[nearest]
        path.append(nearest)
    return path


def check_way(way: str) -> None:
    """Raise `MapperError` unless there is such a way to choose."""
    _way(way)


def rank(method: Method, group: Group, candidates: Sequence[Blocks]) -> Tensor:
    """Held-out R² of each candidate alone, (candidates, targets): one solve serves all targets.

    It comes from a part of the tokens, as long as these are there one by one, and of the targets' columns.
    """
    targets = _compared(method, group)
    rows = []
    for blocks in candidates:
        features = group.features(blocks)
        enough = max(ENOUGH * len(features), method.rough.tokens_needed(len(features), group.layout))
        train, held_out = group.train.select(features, targets, enough), group.held_out.select(features, targets)
        lost = method.rough.solve(train, group.layout).lost(held_out)
        rows.append(1 - _a_target(lost, group) / _a_target(held_out.yy, group).clamp_min(TINY))
    return torch.stack(rows)


class Ranking:
    """How much blocks of a group explain alone, by one method: the same candidates are looked at once."""

    def __init__(self, method: Method, group: Group):
        self.group = group
        self._method = method
        self._known: dict[tuple[Blocks, ...], Tensor] = {}

    def of(self, candidates: Sequence[Blocks]) -> Tensor:
        """As `rank`."""
        wanted = tuple(candidates)
        if wanted not in self._known:
            self._known[wanted] = rank(self._method, self.group, wanted)
        return self._known[wanted]

    @property
    def alone(self) -> Tensor:
        """Of every block."""
        return self.of([(block,) for block in self.group.blocks])


def _top(ranking: Ranking, most: int) -> list[list[Path]]:
    group = ranking.group
    layers = [tuple((kind, layer) for kind in group.kinds) for layer in range(group.source.num_layers)]
    best_first = ranking.of(layers).argsort(stable=True, dim=0, descending=True).T.tolist()
    return [[[_joined([layers[i] for i in order[:k]]) for k in range(1, most + 1)]] for order in best_first]


def _forward(ranking: Ranking, most: int) -> list[list[Path]]:
    """Where features join keys and values, each kind of a layer is taken for itself; in all as many as with `top`."""
    group = ranking.group
    group.fold()  # it looks at so many candidates that little is left out
    most *= len(group.kinds)
    return [[forward_path(group, index, ranking.alone[:, index], most)] for index in range(len(group.targets))]


def _both(ranking: Ranking, most: int) -> list[list[Path]]:
    ranking.group.fold()
    return [a + b for a, b in zip(_top(ranking, most), _forward(ranking, most), strict=True)]


WAYS: dict[str, Way] = {"top": _top, "forward": _forward, "attention": _both}


def _way(name: str) -> Way:
    if name not in WAYS:
        raise MapperError(f"unknown way to choose {name!r}; known: {', '.join(sorted(WAYS))}")
    return WAYS[name]


def _compared(method: Method, group: Group) -> Tensor:
    """Columns of all targets: of each some, evenly drawn, where a method fits every column by itself."""
    width = group.layout.target_width
    some = torch.arange(0, width, -(-width // COLUMNS) if method.rough.is_columnwise else 1)
    return (width * torch.arange(len(group.targets))[:, None] + some).flatten().to(group.device)


def _joined(parts: Iterable[Blocks]) -> Blocks:
    return tuple(sorted({block for part in parts for block in part}))


def _a_target(per_column: Tensor, group: Group) -> Tensor:
    return per_column.view(len(group.targets), -1).sum(1)


RIDGE = 1e-3  # relative to each block's own scale; for the comparison only
POOL = 3  # candidates for each block that may be taken: those that explain most alone


def forward_path(group: Group, index: int, r2_alone: Tensor, most: int) -> list[tuple[Block, ...]]:
    """Sets of 1, 2, ..., `most` blocks for one target, each with the one before it inside; blocks ascending.

    `r2_alone` (blocks,) tells how much each explains alone; the first is the best of them.
    """
    pool = r2_alone.argsort(stable=True, descending=True)[: POOL * most].tolist()
    selection = _Selection(group, index, [group.blocks[i] for i in pool])
    taken = [0]
    while len(taken) < min(most, len(pool)):
        gains = selection.gains(taken)
        taken.append(max(gains, key=gains.__getitem__))
    blocks = [group.blocks[pool[i]] for i in taken]
    return [tuple(sorted(blocks[:k])) for k in range(1, len(blocks) + 1)]


class _Selection:
    """The moments of one target and its candidates, in candidates' order."""

    def __init__(self, group: Group, index: int, candidates: list[Block]):
        features, targets = group.features(candidates), group.outputs(index)
        train, held_out = group.train.select(features, targets), group.held_out.select(features, targets)
        self._gram, self._cross = train.gram(), train.xy
        self._held_gram, self._held_cross = held_out.gram(), held_out.xy
        self._num, self._width = len(candidates), len(features) // len(candidates)
        self._resolution = train.resolution
        diagonal = self._gram.diagonal().view(self._num, -1)
        self._penalty = (RIDGE * diagonal.mean(1, keepdim=True)).expand_as(diagonal).flatten()

    def gains(self, taken: list[int]) -> dict[int, float]:
        """How much each candidate not yet taken takes off the held-out squared error, beside those that are."""
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
