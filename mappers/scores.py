"""From next-token distributions to the figures of an evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.manifest import ArmScore, DistanceCosine, GreedyScore, LayerCosine
from mappers.protocol import SPANS

RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True)
class DocumentScore:
    """One arm on one document at one prefix length, against the target's native cache. `kl` is nats a token, (N,)."""

    arm: str
    document: int
    length: int
    log_ratio: float  # mean log-loss of the arm less that of the native cache
    top1: float
    kl: Tensor


@dataclass(frozen=True)
class AttentionScores:
    """Cosines between the attention's outputs over the native cache and over the served one, (layers, heads).

    `by_distance`: the mean where only one span of tokens is mapped, by its name.
    """

    cosines: Tensor
    by_distance: dict[str, float]


@dataclass(frozen=True)
class PrefixScores:
    """All that one mapper's caches score on one document at one prefix length.

    Where they were measured: `attention`, and `greedy`, the agreement of what is generated freely.
    """

    scores: tuple[DocumentScore, ...]
    attention: AttentionScores | None = None
    greedy: float | None = None


def compare(arm: str, document: int, length: int, native: Tensor, other: Tensor, tokens: Tensor) -> DocumentScore:
    """Score log-probabilities `other` against `native`, (N, vocabulary) each, on the true `tokens` (N,)."""
    losses = [-log_probs.gather(1, tokens[:, None]).mean() for log_probs in (native, other)]
    return DocumentScore(
        arm,
        document,
        length,
        log_ratio=float(losses[1] - losses[0]),
        top1=float((native.argmax(-1) == other.argmax(-1)).float().mean()),
        kl=(native.exp() * (native - other)).sum(-1).cpu(),
    )


def summarise(scores: Iterable[DocumentScore], arms: Iterable[str]) -> tuple[ArmScore, ...]:
    """One row an arm, in the order of `arms`: means over documents at each length, then over lengths."""
    by_arm: dict[str, list[DocumentScore]] = defaultdict(list)
    for score in scores:
        by_arm[score.arm].append(score)
    return tuple(_row(arm, by_arm[arm]) for arm in arms if by_arm[arm])


@dataclass(frozen=True)
class PairedRatio:
    """One mapper's perplexity over another's, on the same documents: the mean as `summarise` takes it, and its 95%
    interval. `ratios` are by document and prefix length."""

    arm: str
    ratio: float
    low: float
    high: float
    ratios: dict[tuple[int, int], float]

    @property
    def is_tie(self) -> bool:
        """Whether they may be equal for all that is known: one document tells of no other."""
        return len({document for document, _ in self.ratios}) < 2 or self.low <= 1 <= self.high


def paired(arm: str, ours: Iterable[DocumentScore], theirs: Iterable[DocumentScore]) -> PairedRatio:
    """Compare what two mappers score in one arm, where both were scored."""
    other = {(score.document, score.length): score.log_ratio for score in theirs if score.arm == arm}
    mine = [score for score in ours if score.arm == arm and (score.document, score.length) in other]
    differences = [score.log_ratio - other[score.document, score.length] for score in mine]
    table = _table(mine, differences)
    low, high = _interval(table)
    ratios = {(each.document, each.length): math.exp(d) for each, d in zip(mine, differences, strict=True)}
    return PairedRatio(arm, _mean_exp(table), low, high, ratios)


def attention_of(verdicts: Iterable[PrefixScores]) -> tuple[LayerCosine, ...]:
    """A row a layer; none if no attention was watched."""
    found = [verdict.attention.cosines for verdict in verdicts if verdict.attention]
    if not found:
        return ()
    heads = torch.stack(found).mean(0)  # (layers, heads)
    return tuple(
        LayerCosine(layer=layer, mean=round(float(row.mean()), 6), min=round(float(row.min()), 6))
        for layer, row in enumerate(heads)
    )


def distances_of(verdicts: Iterable[PrefixScores]) -> tuple[DistanceCosine, ...]:
    """A row a span, nearest first; a mean over those prefixes that reach so far."""
    found: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, cosine in verdict.attention.by_distance.items() if verdict.attention else ():
            found[name].append(cosine)
    means = {name: sum(found[name]) / len(found[name]) for name in SPANS if found[name]}
    return tuple(DistanceCosine(distance=name, mean=round(mean, 6)) for name, mean in means.items())


def greedy_of(verdicts: Iterable[PrefixScores], tokens: int) -> GreedyScore | None:
    """Over all free generations of `tokens` tokens; None if there were none."""
    found = [verdict.greedy for verdict in verdicts if verdict.greedy is not None]
    if not found:
        return None
    return GreedyScore(
        tokens=tokens,
        generations=len(found),
        agreement=round(sum(found) / len(found), 6),
        identical=round(sum(agreement == 1 for agreement in found) / len(found), 6),
    )


def _row(arm: str, scores: list[DocumentScore]) -> ArmScore:
    low, high = _interval(_table(scores, [score.log_ratio for score in scores]))
    kl = torch.cat([score.kl for score in scores])
    return ArmScore(
        arm=arm,
        ppl_ratio=round(_mean_exp(_table(scores, [score.log_ratio for score in scores])), 6),
        ppl_low=round(low, 6),
        ppl_high=round(high, 6),
        top1=round(float(_mean(_table(scores, [score.top1 for score in scores]))), 6),
        kl_mean=round(float(_mean(_table(scores, [float(score.kl.mean()) for score in scores]))), 6),
        kl_p95=round(float(kl.quantile(0.95)), 6),
        documents=len({score.document for score in scores}),
    )


def _table(scores: list[DocumentScore], figures: list[float]) -> Tensor:
    """(documents, lengths), NaN where a document was not scored at a length."""
    rows = {document: row for row, document in enumerate(dict.fromkeys(score.document for score in scores))}
    columns = {length: column for column, length in enumerate(dict.fromkeys(score.length for score in scores))}
    table = torch.full((len(rows), len(columns)), torch.nan, dtype=torch.float64)
    for score, figure in zip(scores, figures, strict=True):
        table[rows[score.document], columns[score.length]] = figure
    return table


def _mean(table: Tensor) -> Tensor:
    """Mean over documents, then over lengths, of (..., documents, lengths)."""
    return table.nanmean(-2).nanmean(-1)


def _mean_exp(table: Tensor) -> float:
    return float(_mean(table).exp())


def _interval(table: Tensor) -> tuple[float, float]:
    """Bootstrap 95% interval of the ratio, whole documents resampled."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(table), (RESAMPLES, len(table)), generator=generator)
    ratios = _mean(table[drawn]).exp()
    ratios = ratios[ratios.isfinite()]
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
