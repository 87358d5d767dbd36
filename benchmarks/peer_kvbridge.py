"""Side by side with the public implementation souvikDevloper/kvbridge: same pair, same tokens, same number of layers.

    git clone https://github.com/souvikDevloper/kvbridge ../kvbridge
    python benchmarks/peer_kvbridge.py ../kvbridge --family smol --tokens 12000 --json peer.json

Both fit on the keys and values of both models over the same calibration tokens, without the first few tokens of each
document. Both are judged by the target's perplexity on the same test documents, with the same native head. The
intervals are wide because documents differ, so the comparison uses the ratio of the two perplexities per document and
length: its mean and its interval.

The peer gets the caches as a list. Ours computes them itself and keeps none, so its forward passes are excluded from
its time. Ours copies layers that both models share; the peer fits them, and with `--no-copies` ours does too.

    fit    seconds from the first document on, without the models' forward passes
    map    one cache of 1,024 tokens; the two take turns, and the median counts

The peer is imported from the given checkout only. The result holds its commit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from mappers import Evaluation, FitSettings, KVCache, Mapper, MapperError, QualityProtocol, evaluate, fit
from mappers.choose import SEARCHES
from mappers.collect import MAX_DOCUMENT_TOKENS
from mappers.commands.common import Meter, Pair, pair_of_family, say, token_counts
from mappers.families import find_family
from mappers.manifest import DEFAULT_HEAD
from mappers.models import load_model, load_tokenizer, prefill
from mappers.rope import Rope
from mappers.scores import PairedRatio, paired
from mappers.speed import measure

ARMS = ("mapped", "hybrid", "no_cache")
PAIRED_ARMS = ("mapped", "hybrid")
TIMED_TOKENS = 1024


@dataclass(frozen=True)
class Result:
    """One implementation: median times, perplexity ratios against the target's own cache, and top-1 agreement."""

    who: str  # the implementation; the key of the JSON report
    fit_s: float
    map_ms_per_1024: float
    weight_bytes: int
    mapped: float
    hybrid: float
    hybrid_low: float
    hybrid_high: float
    hybrid_top1: float


class Peer:
    """The other implementation, from a checkout. Raises `MapperError` for any other folder."""

    def __init__(self, checkout: Path):
        package = checkout / "src" / "kvbridge"
        if not (package / "__init__.py").exists():
            raise MapperError(f"{checkout} is not a checkout of kvbridge: {package} is missing")
        sys.path.insert(0, str(package.parent))
        self.commit = _git(checkout, "rev-parse", "HEAD")
        self.is_changed = bool(_git(checkout, "status", "--porcelain", "--untracked-files=no"))
        names = ("cache", "config", "fit", "huggingface")
        self._cache, self._config, self._fit, self._live = (import_module(f"kvbridge.{name}") for name in names)

    def cache(self, cache: KVCache, rope: Rope) -> Any:
        """Convert one of our caches to theirs, with the rotary factors of its positions."""
        return self._cache.KVCache(
            [key[None] for key in cache.keys], [value[None] for value in cache.values], self.factors(cache, rope)
        )

    def factors(self, cache: KVCache, rope: Rope) -> Any:
        return self._cache.RotaryFactors(*rope.rows(cache.positions, 0))

    def fit(self, models: Sequence[Any], tokenizer: Any, pairs: Sequence[tuple[Any, Any]], layers: int) -> Any:
        """Fit their mapper on `pairs` of their caches, with their defaults except for the number of layers."""
        examples = [self._fit.CalibrationPair(*pair) for pair in pairs]
        signatures = [self._live.model_signature(model, tokenizer, revision="local") for model in models]
        return self._fit.fit_mapper(examples, *signatures, self._config.FitConfig(top_k=layers))


class PeerMapper:
    """Their mapper behind our interface."""

    bundle_id = "peer"

    def __init__(self, peer: Peer, mapper: Any, ropes: tuple[Rope, Rope], manifest: Any):
        self._peer, self._mapper, self._ropes = peer, mapper, ropes
        self.manifest = manifest

    def check(self, source_fingerprint: str, target_fingerprint: str) -> None:
        """Accept any: it was fitted in this run, on the same models."""

    def map(self, source: KVCache) -> KVCache:
        target_rotary = self._peer.factors(source, self._ropes[1])
        mapped = self._mapper.map(self._peer.cache(source, self._ropes[0]), target_rotary=target_rotary)
        keys, values = (tuple(states[0] for states in kind) for kind in (mapped.keys, mapped.values))
        return KVCache(keys, values, source.start)

    @property
    def weight_bytes(self) -> int:
        kinds = ("key_weights", "value_weights", "key_biases", "value_biases")
        return _bytes(tensor for kind in kinds for tensor in getattr(self._mapper, kind))


class ForwardClock:
    """Seconds that transformers models spend in forward passes; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._began = 0, 0.0

    def enter(self, module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self._depth += 1
            if self._depth == 1:
                self._began = time.perf_counter()

    def leave(self, module: Any, _: Any, __: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - self._began


@contextmanager
def forward_clock() -> Iterator[ForwardClock]:
    """Measure the forward passes of every model of the process within the block."""
    clock = ForwardClock()
    hooks = register_module_forward_pre_hook(clock.enter), register_module_forward_hook(clock.leave)
    try:
        yield clock
    finally:
        for hook in hooks:
            hook.remove()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    try:
        report = compare(options)
    except MapperError as error:
        print(f"peer_kvbridge: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    # 1. What both work on
    peer = Peer(options.checkout)
    pair = pair_of_family(find_family(options.family), argparse.Namespace(data=None))
    models = load_model(pair.source), load_model(pair.target)
    ropes = Rope.of(models[0]), Rope.of(models[1])
    texts = calibration(pair, options.tokens)
    # 2. Fit, taking turns
    say(f"prefilling {sum(map(len, texts))} calibration tokens with both models, for the peer")
    examples = [_example(peer, models, ropes, ids) for ids in texts]
    seconds: dict[str, list[float]] = {"kvrelay": [], "kvbridge": []}
    for turn in range(options.fits):
        say(f"fitting, {turn + 1} of {options.fits}")
        ours, took = _our_fit(pair, texts, options)
        seconds["kvrelay"].append(took)
        began = time.perf_counter()
        theirs = peer.fit(models, load_tokenizer(pair.target), examples, options.layers)
        seconds["kvbridge"].append(time.perf_counter() - began)
    del examples
    peer_mapper = PeerMapper(peer, theirs, ropes, ours.manifest)
    mappers = {"kvrelay": ours, "kvbridge": peer_mapper}
    # 3. Map, taking turns, and judge
    map_ms = _map_times(mappers, prefill(models[0], _long(texts)), options.repeats)
    protocol = QualityProtocol(options.lengths, options.documents, num_controls=options.documents)
    judged = evaluate(
        list(mappers.values()),  # type: ignore[arg-type]
        *models,
        pair.documents("test"),
        protocol,
        arms=ARMS,
        progress=Meter("tokens"),
    )
    sizes = {"kvrelay": _bytes(ours.weights.values()), "kvbridge": peer_mapper.weight_bytes}
    rows = [
        _result(name, statistics.median(seconds[name]), map_ms[name], sizes[name], each.evaluation)
        for name, each in zip(mappers, judged, strict=True)
    ]
    without = judged[0].evaluation.arm("no_cache")
    return {
        "peer": {"name": "souvikDevloper/kvbridge", "commit": peer.commit, "changed": peer.is_changed},
        "machine": platform.machine(),
        "threads": options.threads,
        "family": options.family,
        "tokens": sum(map(len, texts)),
        "layers": options.layers,
        "method": options.method,
        "joint": options.joint,
        "choose": options.choose,
        "lengths": list(options.lengths),
        "documents": options.documents,
        "no_cache": without.ppl_ratio if without else None,
        "rows": [asdict(row) for row in rows],
        "paired": [comparison_of(paired(arm, judged[0].scores, judged[1].scores)) for arm in PAIRED_ARMS],
        "kvrelay_speed": measure(ours).as_json(),
    }


def calibration(pair: Pair, tokens: int) -> list[list[int]]:
    """Return the documents that a fit on `tokens` tokens uses, truncated as it truncates them."""
    texts: list[list[int]] = []
    for ids in pair.documents("calibrate"):
        if len(ids) > DEFAULT_HEAD + 1:
            texts.append(list(ids[:MAX_DOCUMENT_TOKENS]))
        if sum(map(len, texts)) >= tokens:
            break
    return texts


def comparison_of(comparison: PairedRatio) -> dict[str, Any]:
    """Return the ratio of ours to theirs, as plain values."""
    by_document = [
        {"document": document, "length": length, "ratio": round(ratio, 6)}
        for (document, length), ratio in comparison.ratios.items()
    ]
    return {
        "arm": comparison.arm,
        "ratio": round(comparison.ratio, 6),
        "low": round(comparison.low, 6),
        "high": round(comparison.high, 6),
        "better": None if comparison.is_tie else "kvrelay" if comparison.ratio < 1 else "kvbridge",
        "by_document": by_document,
    }


def table(report: dict[str, Any]) -> str:
    peer, joint = report["peer"], " of keys and values" if report["joint"] else ""
    lines = [
        f"{report['family']}, {report['tokens']} calibration tokens, {report['layers']} layers{joint} chosen by "
        f"{report['choose']}, {report['threads']} threads; "
        f"{peer['name']} at {peer['commit'][:12]}{' (changed)' if peer['changed'] else ''}",
        f"{'':<10}{'fit s':>9}{'map ms':>9}{'MB':>8}{'mapped':>9}{'hybrid':>9}  {'95% interval':<15}{'top-1':>6}",
    ]
    for row in report["rows"]:
        interval = f"{row['hybrid_low']:.3f}-{row['hybrid_high']:.3f}"
        lines.append(
            f"{row['who']:<10}{row['fit_s']:>9.1f}{row['map_ms_per_1024']:>9.1f}{row['weight_bytes'] / 1e6:>8.2f}"
            f"{row['mapped']:>9.4f}{row['hybrid']:>9.4f}  {interval:<15}{row['hybrid_top1']:>6.3f}"
        )
    lines += [verdict(comparison) for comparison in report["paired"]]
    speed = report["kvrelay_speed"]
    by_length = ", ".join(f"{row['tokens']}: {row['ms']:.1f} ms" for row in speed["map"])
    lines.append(f"no cache {report['no_cache']:.4f}")
    lines.append(f"kvrelay's map by tokens, in place: {by_length}; {speed['share_of_peak']:.0%} of the matmul peak")
    return "\n".join(lines)


def verdict(comparison: dict[str, Any]) -> str:
    """One arm's comparison in a line."""
    interval = f"{comparison['low']:.4f}-{comparison['high']:.4f}"
    better = f"{comparison['better']} is better" if comparison["better"] else "a tie within the interval"
    return (
        f"{comparison['arm']}: perplexity of kvrelay over kvbridge, paired by document and length, "
        f"{comparison['ratio']:.4f} ({interval}): {better}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peer_kvbridge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of a clone of kvbridge")
    parser.add_argument("--family", default="smol")
    parser.add_argument("--tokens", type=int, default=12_000, help="calibration tokens (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="source layers per target layer (default %(default)s)")
    parser.add_argument("--method", default="ridge", help="our method (default %(default)s)")
    parser.add_argument("--joint", action="store_true", help="ours maps keys and values from both")
    parser.add_argument("--choose", default="top", help=f"how ours selects layers: {', '.join(sorted(SEARCHES))}")
    parser.add_argument("--no-copies", action="store_true", help="fit layers that both models share as well")
    parser.add_argument("--fits", type=int, default=1, help="fits per implementation (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="maps per implementation (default %(default)s)")
    parser.add_argument("--lengths", type=token_counts, default=(384, 1024), help="prefix lengths (384,1024)")
    parser.add_argument("--documents", type=int, default=10, help="test documents per length (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _our_fit(pair: Pair, texts: list[list[int]], options: argparse.Namespace) -> tuple[Mapper, float]:
    """Return a mapper, and the seconds of its fit without the models' forward passes."""
    begun: list[float] = []

    def documents(clock: ForwardClock) -> Iterator[list[int]]:
        begun.append(time.perf_counter() - clock.seconds)
        yield from texts

    with forward_clock() as clock:
        mapper = fit(
            pair.source,
            pair.target,
            documents(clock),
            FitSettings(
                method=options.method,
                layers=options.layers,
                joint=options.joint,
                choose=options.choose,
                copies=not options.no_copies,
                precision="float32",
            ),
        )
    return mapper, time.perf_counter() - clock.seconds - begun[0]


def _example(peer: Peer, models: tuple[Any, Any], ropes: tuple[Rope, Rope], ids: list[int]) -> tuple[Any, Any]:
    caches = (prefill(model, ids).slice(DEFAULT_HEAD, len(ids)) for model in models)
    source, target = (peer.cache(cache, rope) for cache, rope in zip(caches, ropes, strict=True))
    return source, target


def _long(texts: list[list[int]]) -> list[int]:
    """The first calibration tokens, for the timing of maps."""
    return [token for ids in texts for token in ids][:TIMED_TOKENS]


def _map_times(mappers: dict[str, Any], cache: KVCache, repeats: int) -> dict[str, float]:
    """Return the median milliseconds per 1,024 tokens, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in mappers}
    for turn in range(repeats + 1):
        for name, mapper in mappers.items():
            began = time.perf_counter()
            mapper.map(cache)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) * 1e3 * 1024 / cache.num_tokens for name, found in seconds.items()}


def _result(name: str, fit_s: float, map_ms: float, weight_bytes: int, evaluation: Evaluation) -> Result:
    arms = SimpleNamespace(**{score.arm: score for score in evaluation.arms})
    return Result(
        who=name,
        fit_s=round(fit_s, 3),
        map_ms_per_1024=round(map_ms, 3),
        weight_bytes=weight_bytes,
        mapped=arms.mapped.ppl_ratio,
        hybrid=arms.hybrid.ppl_ratio,
        hybrid_low=arms.hybrid.ppl_low,
        hybrid_high=arms.hybrid.ppl_high,
        hybrid_top1=arms.hybrid.top1,
    )


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MapperError(f"{folder} has no git history; its version is unknown") from error
    return result.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
