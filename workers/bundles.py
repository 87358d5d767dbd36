"""The mapper bundles that a worker may use for handoffs into it: loaded and judged at start, and watched in service.

A bundle is used only if it was fitted for exactly the worker's weights and tokenizer, and its evaluation passes the
gate. Otherwise the log and `/v1/info` report the reason.

In service, answers over its caches are compared with native ones. If the last comparisons are below the same gate, the
bundle is switched off. After a rest it is on trial: its caches are made and compared, but serve no request, until the
last trials are well within the gate.

    in use ──last answers below the gate──► off ──rest──► on trial ──last trials well within the gate──► in use
                                             └─────────────────── an operator resumes it ───────────────────▲
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import structlog

from mappers.bundle import load, load_manifest
from mappers.errors import MapperError
from mappers.manifest import Manifest, QualityGate
from mappers.mapper import Mapper
from workers.api.config import SettingsError
from workers.api.errors import BundleUnusable
from workers.api.schemas import BundleInfo, ShadowInfo
from workers.settings import GateSettings

log = structlog.get_logger()

RETURN_MARGIN = 0.2  # of what a gate allows


@dataclass(frozen=True)
class Comparison:
    """One answer's predictions over a mapped and over a native cache: number of tokens, of equal top-1 predictions, and
    the sum of KL divergences (native to mapped, nats). `digest` names the text, prompt included."""

    num_tokens: int
    num_agreed: int
    kl_sum: float
    digest: str = ""

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / self.num_tokens


def stricter(gate: QualityGate) -> QualityGate:
    """Return the gate for using a bundle again. It is stricter, so that a bundle at the limit does not switch back and
    forth."""
    allowed = 1 - RETURN_MARGIN
    return gate.model_copy(
        update={
            "max_ppl_ratio": 1 + allowed * (gate.max_ppl_ratio - 1),
            "min_top1": 1 - allowed * (1 - gate.min_top1),
        }
    )


class ComparisonWindow:
    """The last `num_answers` comparisons of one bundle, against a gate. With `each_text_once`, only the last comparison
    of each text counts."""

    def __init__(self, gate: QualityGate, num_answers: int, *, each_text_once: bool = False):
        self._gate = gate
        self._size = num_answers
        self._each_text_once = each_text_once
        self._last: deque[Comparison] = deque(maxlen=num_answers)

    @property
    def is_full(self) -> bool:
        return len(self._last) == self._size

    def emptied(self) -> ComparisonWindow:
        """Return an empty window with the same gate and size."""
        return ComparisonWindow(self._gate, self._size)

    def for_trials(self) -> ComparisonWindow:
        """Return the window for trials. A served text counts as often as it is served; in trials, a prompt that is
        repeated counts once."""
        return ComparisonWindow(stricter(self._gate), self._size, each_text_once=True)

    def add(self, comparison: Comparison) -> None:
        if self._each_text_once:
            self._last = deque((other for other in self._last if other.digest != comparison.digest), self._size)
        self._last.append(comparison)

    @property
    def info(self) -> ShadowInfo | None:
        """The averages, None before the first comparison. The perplexity ratio is e to the mean KL divergence: that of
        text drawn from the native distributions."""
        if not self._last:
            return None
        num_tokens = sum(comparison.num_tokens for comparison in self._last)
        return ShadowInfo(
            num_answers=len(self._last),
            top1=sum(comparison.num_agreed for comparison in self._last) / num_tokens,
            ppl_ratio=math.exp(sum(comparison.kl_sum for comparison in self._last) / num_tokens),
        )

    @property
    def objection(self) -> str | None:
        """Why the bundle fails the gate; None if it passes, or the window is not full."""
        info = self.info
        if info is None or not self.is_full:
            return None
        over = f"over the last {info.num_answers} answers compared in service"
        if info.top1 < self._gate.min_top1:
            return f"top-1 agreement {info.top1:.3f} {over} is below the gate's {self._gate.min_top1:.3g}"
        if info.ppl_ratio > self._gate.max_ppl_ratio:
            return f"perplexity ratio {info.ppl_ratio:.3f} {over} is above the gate's {self._gate.max_ppl_ratio:.3g}"
        return None


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle's manifest, and its mapper if it could be loaded. A bundle with a `reason` is not used.

    `window` holds the comparisons in service. If they switched the bundle off, `off_at` is that instant of the clock,
    and `trials` holds the comparisons since then.
    """

    manifest: Manifest
    mapper: Mapper | None = None
    reason: str | None = None
    window: ComparisonWindow | None = None
    trials: ComparisonWindow | None = None
    off_at: float | None = None

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    def resumed(self) -> LoadedBundle:
        """Return the bundle in use again, without earlier comparisons."""
        window = self.window.emptied() if self.window else None
        return replace(self, reason=None, window=window, trials=None, off_at=None)

    @property
    def info(self) -> BundleInfo:
        compared = self.trials or self.window
        return BundleInfo(
            bundle_id=self.manifest.bundle_id,
            source_model=self.manifest.source.name,
            source_fingerprint=self.manifest.source.fingerprint,
            target_fingerprint=self.manifest.target.fingerprint,
            method=self.manifest.method,
            usable=self.is_usable,
            reason=self.reason,
            shadow=compared.info if compared else None,
        )


class Bundles:
    """The bundles of one worker. A bundle switched off in service is on trial `rest_s` later."""

    def __init__(
        self,
        bundles: Iterable[LoadedBundle] = (),
        *,
        rest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._bundles = {bundle.manifest.bundle_id: bundle for bundle in bundles}
        self._rest_s = rest_s
        self._clock = clock

    def usable(self) -> list[Mapper]:
        """Return the mappers into this worker's model that pass the gate."""
        return [bundle.mapper for bundle in self._bundles.values() if bundle.mapper is not None and bundle.is_usable]

    def on_trial(self) -> list[Mapper]:
        """Return the mappers that were switched off in service and have rested."""
        return [
            bundle.mapper for bundle in self._bundles.values() if bundle.mapper is not None and self._has_rested(bundle)
        ]

    def record(self, bundle_id: str, comparison: Comparison) -> bool:
        """Add a comparison. Returns whether it switched the bundle off, or on again."""
        bundle = self._bundles[bundle_id]
        if bundle.window is None:
            return False
        compared = bundle.trials or bundle.window
        compared.add(comparison)
        reason = compared.objection
        if bundle.is_usable and reason is not None:
            after = replace(bundle, reason=reason, trials=compared.for_trials(), off_at=self._clock())
        elif bundle.trials is not None and compared.is_full and reason is None:
            after = bundle.resumed()
        else:
            return False
        self._replace(after)
        return True

    def resume(self, bundle_id: str) -> BundleInfo:
        """Use a bundle again that was switched off in service; one in use is left as it is. Raises `BundleUnusable` for
        an unknown bundle, or one refused at the start."""
        bundle = self._bundles.get(bundle_id)
        if bundle is None:
            raise BundleUnusable(f"unknown bundle {bundle_id!r}; known: {', '.join(self._bundles) or 'none'}")
        if bundle.off_at is not None:
            bundle = bundle.resumed()
            self._replace(bundle)
        if not bundle.is_usable:
            raise BundleUnusable(f"{bundle_id} was refused at the start: {bundle.reason}")
        return bundle.info

    def _has_rested(self, bundle: LoadedBundle) -> bool:
        return bundle.off_at is not None and bundle.off_at <= self._clock() - self._rest_s

    def _replace(self, bundle: LoadedBundle) -> None:
        name = bundle.manifest.bundle_id
        self._bundles[name] = bundle
        log.warning("bundle_on" if bundle.is_usable else "bundle_off", bundle=name, reason=bundle.reason)

    @property
    def refusals(self) -> str:
        """The refused bundles and the reasons, for messages."""
        refused = {name: bundle for name, bundle in self._bundles.items() if not bundle.is_usable}
        return "; ".join(f"{name}: {bundle.reason}" for name, bundle in refused.items())

    @property
    def infos(self) -> list[BundleInfo]:
        return [
            bundle.info.model_copy(update={"on_trial": self._has_rested(bundle)}) for bundle in self._bundles.values()
        ]


def load_bundles(
    paths: Iterable[str],
    *,
    target_fingerprint: str,
    target_tokenizer: str | None,
    gate: GateSettings,
    device: str,
    shadow_window: int | None = None,
    rest_s: float = 0.0,
) -> Bundles:
    """Load and judge bundles. Raises `SettingsError` for a path without a bundle.

    In service, the last `shadow_window` comparisons decide whether a bundle stays in use. Without that number none is
    switched off. After `rest_s` a bundle is on trial.
    """
    bundles = [_load(path, target_fingerprint, target_tokenizer, gate, device, shadow_window) for path in paths]
    for bundle in bundles:
        level = log.info if bundle.is_usable else log.warning
        level("bundle", bundle=bundle.manifest.bundle_id, usable=bundle.is_usable, reason=bundle.reason)
    return Bundles(bundles, rest_s=rest_s)


def _load(
    path: str,
    target_fingerprint: str,
    tokenizer: str | None,
    gate: GateSettings,
    device: str,
    shadow_window: int | None,
) -> LoadedBundle:
    try:
        manifest = load_manifest(path)
    except MapperError as error:
        raise SettingsError(f"bundle {path!r}: {error}") from error
    try:
        mapper = load(path, device)
        mapper.check(manifest.source.fingerprint, target_fingerprint)
        mapper.check_tokenizers(target=tokenizer)
    except MapperError as error:
        return LoadedBundle(manifest, reason=str(error))
    reason = mapper.refusal(**gate.model_dump())
    window = ComparisonWindow(mapper.gate(**gate.model_dump()), shadow_window) if shadow_window else None
    return LoadedBundle(manifest, mapper if reason is None else None, reason, window)
