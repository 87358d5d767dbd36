"""Scores: from next-token distributions to the figures of an evaluation."""

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
    """One arm on one document at one prefix length, compared with the native cache. `kl` (N,) is in nats per token."""

    arm: str
    document: int
    length: int
    log_ratio: float  # mean log-loss of the arm minus that of the native cache
    top1: float
    kl: Tensor


@dataclass(frozen=True)
class AttentionScores:
    """Cosines (layers, heads) between attention outputs over the native cache and over the served one.

    `by_distance` is the mean with only one span of tokens mapped, by the span's name.
    """

    cosines: Tensor
    by_distance: dict[str, float]


@dataclass(frozen=True)
class PrefixScores:
    """All scores of one mapper on one document at one prefix length.

    `attention` and `greedy`, the agreement of free generation, are measured on control documents only.
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
    """Return one row per scored arm, in the order of `arms`: mean over documents, then over prefix lengths."""
    by_arm: dict[str, list[DocumentScore]] = defaultdict(list)
    for score in scores:
        by_arm[score.arm].append(score)
    return tuple(_arm_score(arm, by_arm[arm]) for arm in arms if by_arm[arm])


@dataclass(frozen=True)
class PairedRatio:
    """Perplexity of one mapper over another's on the same documents, averaged as by `summarise`.

    `low` and `high` are the 95% interval; `ratios` are by document and prefix length.
    """

    arm: str
    ratio: float
    low: float
    high: float
    ratios: dict[tuple[int, int], float]

    @property
    def is_tie(self) -> bool:
        """Whether the difference is not significant, as on a single document."""
        return len({document for document, _ in self.ratios}) < 2 or self.low <= 1 <= self.high


def paired(arm: str, first: Iterable[DocumentScore], second: Iterable[DocumentScore]) -> PairedRatio:
    """Compare one arm of two mappers where both were scored."""
    base = {(score.document, score.length): score.log_ratio for score in second if score.arm == arm}
    scores = [score for score in first if score.arm == arm and (score.document, score.length) in base]
    differences = [score.log_ratio - base[score.document, score.length] for score in scores]
    table = _table(scores, differences)
    low, high = _interval(table)
    ratios = {(each.document, each.length): math.exp(d) for each, d in zip(scores, differences, strict=True)}
    return PairedRatio(arm, _mean_exp(table), low, high, ratios)


def summarise_attention(prefixes: Iterable[PrefixScores]) -> tuple[LayerCosine, ...]:
    """Return one row per layer; empty if no attention was measured."""
    cosines = [prefix.attention.cosines for prefix in prefixes if prefix.attention]
    if not cosines:
        return ()
    heads = torch.stack(cosines).mean(0)  # (layers, heads)
    return tuple(
        LayerCosine(layer=layer, mean=round(float(row.mean()), 6), min=round(float(row.min()), 6))
        for layer, row in enumerate(heads)
    )


def summarise_distances(prefixes: Iterable[PrefixScores]) -> tuple[DistanceCosine, ...]:
    """Return one row per span, nearest first, averaged over the prefixes that reach it."""
    cosines: dict[str, list[float]] = defaultdict(list)
    for prefix in prefixes:
        for name, cosine in prefix.attention.by_distance.items() if prefix.attention else ():
            cosines[name].append(cosine)
    means = {name: sum(cosines[name]) / len(cosines[name]) for name in SPANS if cosines[name]}
    return tuple(DistanceCosine(distance=name, mean=round(mean, 6)) for name, mean in means.items())


def summarise_greedy(prefixes: Iterable[PrefixScores], tokens: int) -> GreedyScore | None:
    """Summarise all generations of `tokens` tokens, None without any."""
    agreements = [prefix.greedy for prefix in prefixes if prefix.greedy is not None]
    if not agreements:
        return None
    return GreedyScore(
        tokens=tokens,
        generations=len(agreements),
        agreement=round(sum(agreements) / len(agreements), 6),
        identical=round(sum(agreement == 1 for agreement in agreements) / len(agreements), 6),
    )


def _arm_score(arm: str, scores: list[DocumentScore]) -> ArmScore:
    log_ratios = _table(scores, [score.log_ratio for score in scores])
    low, high = _interval(log_ratios)
    kl = torch.cat([score.kl for score in scores])
    return ArmScore(
        arm=arm,
        ppl_ratio=round(_mean_exp(log_ratios), 6),
        ppl_low=round(low, 6),
        ppl_high=round(high, 6),
        top1=round(float(_mean(_table(scores, [score.top1 for score in scores]))), 6),
        kl_mean=round(float(_mean(_table(scores, [float(score.kl.mean()) for score in scores]))), 6),
        kl_p95=round(float(kl.quantile(0.95)), 6),
        documents=len({score.document for score in scores}),
    )


def _table(scores: list[DocumentScore], figures: list[float]) -> Tensor:
    """Return (documents, lengths), NaN where a document was not scored at a length."""
    rows = {document: row for row, document in enumerate(dict.fromkeys(score.document for score in scores))}
    columns = {length: column for column, length in enumerate(dict.fromkeys(score.length for score in scores))}
    table = torch.full((len(rows), len(columns)), torch.nan, dtype=torch.float64)
    for score, figure in zip(scores, figures, strict=True):
        table[rows[score.document], columns[score.length]] = figure
    return table


def _mean(table: Tensor) -> Tensor:
    """Return the mean over documents, then over lengths, of (..., documents, lengths)."""
    return table.nanmean(-2).nanmean(-1)


def _mean_exp(table: Tensor) -> float:
    return float(_mean(table).exp())


def _interval(table: Tensor) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the ratio, resampling whole documents."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(table), (RESAMPLES, len(table)), generator=generator)
    ratios = _mean(table[drawn]).exp()
    ratios = ratios[ratios.isfinite()]
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
