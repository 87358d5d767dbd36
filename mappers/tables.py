"""What `kvrelay eval` prints: figures as text, a row each."""

from __future__ import annotations

from collections.abc import Sequence

from mappers.diagnose import PartScore
from mappers.manifest import ArmScore, Evaluation
from mappers.report import EvaluatedBundle
from mappers.speed import Speed

FIGURES = f"{'ppl ratio':>10}  {'95% interval':<16}{'top-1':>7}{'KL mean':>9}{'KL p95':>9}{'documents':>11}"


def evaluation_table(evaluation: Evaluation) -> str:
    """Every arm over all prefix lengths, then what is served at each, then what else was measured."""
    lines = [f"{'arm':<16}{FIGURES}"]
    lines += [_row(f"{score.arm:<16}", score) for score in evaluation.arms]
    for at in evaluation.lengths:
        lines += [_row(f"{f'hybrid {at.length}':<16}", score) for score in at.arms if score.arm == "hybrid"]
    if evaluation.attention:
        worst = min(evaluation.attention, key=lambda layer: layer.mean)
        mean = sum(layer.mean for layer in evaluation.attention) / len(evaluation.attention)
        lines.append(f"attention output, cosine: mean {mean:.4f}; lowest in layer {worst.layer}: {worst.mean:.4f}")
    if evaluation.by_distance:
        told = ", ".join(f"{row.distance} {row.mean:.4f}" for row in evaluation.by_distance)
        lines.append(f"the same by distance before the native tail: {told}")
    if evaluation.greedy:
        found = evaluation.greedy
        lines.append(
            f"greedy, {found.tokens} tokens: {found.agreement:.3f} of the tokens agree, {found.identical:.2f} of "
            f"{found.generations} generations are identical"
        )
    return "\n".join(lines)


def diagnosis_table(rows: Sequence[PartScore]) -> str:
    """What mapping each part alone costs."""
    lines = [f"{'mapped alone':<24}{FIGURES}"]
    lines += [_row(f"{row.by:<10}{row.part:<14}", row.score) for row in rows]
    return "\n".join(lines)


def comparison(judged: Sequence[EvaluatedBundle]) -> str:
    """A line a bundle: quality as served, size, the map's time and what it makes of the processor."""
    width = max(len(each.name) for each in judged) + 2
    lines = [
        f"{'bundle':<{width}}{'method':<12}{'hybrid':>8}  {'95% interval':<15}{'top-1':>6}{'KL p95':>8}"
        f"{'mapped':>8}{'cosine':>8}{'MB':>8}{'ms/1024':>9}{'of peak':>9}"
    ]
    return "\n".join(lines + [_compared(each, width) for each in judged])


def speed_table(measured: Sequence[tuple[str, str, Speed]]) -> str:
    """A line a bundle (name, method, speed): milliseconds by tokens, and what it makes of the processor."""
    width = max(len(name) for name, _, _ in measured) + 2
    _, _, first = measured[0]
    tokens = "".join(f"{length:>9}" for length in first.map_ms)
    lines = [
        f"milliseconds by tokens; {first.threads} threads, one large float32 product reaches "
        f"{max(speed.peak_gflops for _, _, speed in measured):.0f} GFLOPS",
        f"{'bundle':<{width}}{'method':<12}{tokens}{'ms/1024':>9}{'of peak':>9}",
    ]
    for name, method, speed in measured:
        times = "".join(f"{ms:>9.1f}" for ms in speed.map_ms.values())
        lines.append(f"{name:<{width}}{method:<12}{times}{speed.ms_per_1024:>9.1f}{speed.share_of_peak:>9.0%}")
    return "\n".join(lines)


def _compared(each: EvaluatedBundle, width: int) -> str:
    hybrid, mapped = each.evaluation.arm("hybrid"), each.evaluation.arm("mapped")
    cells = [f"{each.name:<{width}}{each.mapper.manifest.method:<12}"]
    if hybrid:
        interval = f"{hybrid.ppl_low:.3f}-{hybrid.ppl_high:.3f}"
        cells.append(f"{hybrid.ppl_ratio:>8.4f}  {interval:<15}{hybrid.top1:>6.3f}{hybrid.kl_p95:>8.3f}")
    else:
        cells.append(f"{'-':>8}  {'-':<15}{'-':>6}{'-':>8}")
    cells.append(f"{mapped.ppl_ratio:>8.4f}" if mapped else f"{'-':>8}")
    cells.append(f"{each.cosine:>8.4f}" if each.cosine is not None else f"{'-':>8}")
    cells.append(f"{each.mapper.weight_bytes / 1e6:>8.2f}")
    if each.speed:
        cells.append(f"{each.speed.ms_per_1024:>9.1f}{each.speed.share_of_peak:>9.0%}")
    return "".join(cells)


def _row(name: str, score: ArmScore) -> str:
    interval = f"{score.ppl_low:.3f}-{score.ppl_high:.3f}"
    figures = f"{score.top1:>7.3f}{score.kl_mean:>9.4f}{score.kl_p95:>9.4f}{score.documents:>11}"
    return f"{name}{score.ppl_ratio:>10.4f}  {interval:<16}{figures}"
