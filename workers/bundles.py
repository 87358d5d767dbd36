"""Whether a mapper that serves is as good as its gate asks: decided from what was compared last.

The mapper bundles that a worker may use on what it receives: loaded and judged once, at start.

A bundle is used only if it was fitted for exactly the worker's weights and tokenizer, and its evaluation passes the
gate. One that does not is reported with the reason, in the log and in `/v1/info`, and stands in nobody's way.

What a bundle promises is looked at in service too: answers over its caches are compared with native ones, and when the
last of them are below the same gate it is switched off, in the same way. After a rest it is on trial: what it would
have made is compared, and nobody served from it, until the last of that is well within the gate.

    in use ──the last answers below the gate──► off ──rest──► on trial ──the last trials well within the gate──► in use
                                                 └──────────────────── an operator says so ────────────────────────▲
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

RETURN_MARGIN = 0.2  # of what a gate allows


@dataclass(frozen=True)
class Comparison:
    """Of one answer's tokens over a mapped and over a native cache: how many, on how many both expect the same next
    one, and their KL divergences (native to mapped, nats) summed. `digest` names the text, prompt and all."""

    num_tokens: int
    num_agreed: int
    kl_sum: float
    digest: str = ""

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / self.num_tokens


def stricter(gate: QualityGate) -> QualityGate:
    """What a bundle that was switched off must reach to be used again: less than what its gate allows, so that one on
    the edge does not go on and off."""
    allowed = 1 - RETURN_MARGIN
    return gate.model_copy(
        update={
            "max_ppl_ratio": 1 + allowed * (gate.max_ppl_ratio - 1),
            "min_top1": 1 - allowed * (1 - gate.min_top1),
        }
    )


class ComparisonWindow:
    """The last `num_answers` comparisons of one bundle, against a gate; with `each_text_once`, the last of each."""

    def __init__(self, gate: QualityGate, num_answers: int, *, each_text_once: bool = False):
        self._gate = gate
        self._size = num_answers
        self._each_text_once = each_text_once
        self._last: deque[Comparison] = deque(maxlen=num_answers)

    @property
    def is_full(self) -> bool:
        return len(self._last) == self._size

    def emptied(self) -> ComparisonWindow:
        """For what is compared from now on."""
        return ComparisonWindow(self._gate, self._size)

    def for_trials(self) -> ComparisonWindow:
        """For what is compared while the bundle is off. What is served counts as often as it is; nobody is served then,
        and one prompt that is asked again and again says no more than once."""
        return ComparisonWindow(stricter(self._gate), self._size, each_text_once=True)

    def add(self, comparison: Comparison) -> None:
        if self._each_text_once:
            self._last = deque((one for one in self._last if one.digest != comparison.digest), self._size)
        self._last.append(comparison)

    @property
    def info(self) -> ShadowInfo | None:
        """None until something was compared. To a text drawn from the native distributions, the mapped cache has a
        perplexity so many times higher: e to the mean KL divergence."""
        if not self._last:
            return None
        num_tokens = sum(one.num_tokens for one in self._last)
        return ShadowInfo(
            num_answers=len(self._last),
            top1=sum(one.num_agreed for one in self._last) / num_tokens,
            ppl_ratio=math.exp(sum(one.kl_sum for one in self._last) / num_tokens),
        )

    @property
    def objection(self) -> str | None:
        """What speaks against the bundle; nothing does until the window is full."""
        info = self.info
        if info is None or not self.is_full:
            return None
        over = f"over the last {info.num_answers} answers compared in service"
        if info.top1 < self._gate.min_top1:
            return f"top-1 agreement {info.top1:.3f} {over} is below the gate's {self._gate.min_top1:.3g}"
        if info.ppl_ratio > self._gate.max_ppl_ratio:
            return f"perplexity ratio {info.ppl_ratio:.3f} {over} is above the gate's {self._gate.max_ppl_ratio:.3g}"
        return None


log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedBundle:
    """What a bundle says of itself, and its mapper if it could be loaded; it is used unless a `reason` says why not.
    `window` holds what was found in service; where that switched it `off_at` (an instant of the clock), `trials` what
    was found since."""

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
        """In use again, and judged anew."""
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
    """The bundles of one worker. One that was switched off in service is on trial `rest_s` later."""

    def __init__(
        self,
        judged: Iterable[LoadedBundle] = (),
        *,
        rest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._judged = {bundle.manifest.bundle_id: bundle for bundle in judged}
        self._rest_s = rest_s
        self._clock = clock

    def usable(self) -> list[Mapper]:
        """Mappers into this worker's model that pass the gate."""
        return [bundle.mapper for bundle in self._judged.values() if bundle.mapper is not None and bundle.is_usable]

    def on_trial(self) -> list[Mapper]:
        """Mappers that were switched off in service, and have rested."""
        return [
            bundle.mapper
            for bundle in self._judged.values()
            if bundle.mapper is not None and self._has_rested(bundle)
        ]

    def compared(self, bundle_id: str, comparison: Comparison) -> bool:
        """What is expected over a cache of this bundle's was compared with what is over a native one. Whether that
        switched the bundle off, or on again."""
        bundle = self._judged[bundle_id]
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
        self._change_to(after)
        return True

    def resume(self, bundle_id: str) -> BundleInfo:
        """Uses a bundle again that was switched off in service, and judges it anew; one in use stays as it is. Raises
        `BundleUnusable` for one that was refused at the start, or is none of this worker's."""
        bundle = self._judged.get(bundle_id)
        if bundle is None:
            raise BundleUnusable(f"unknown bundle {bundle_id!r}; known: {', '.join(self._judged) or 'none'}")
        if bundle.off_at is not None:
            bundle = bundle.resumed()
            self._change_to(bundle)
        if not bundle.is_usable:
            raise BundleUnusable(f"{bundle_id} was refused at the start: {bundle.reason}")
        return bundle.info

    def _has_rested(self, bundle: LoadedBundle) -> bool:
        return bundle.off_at is not None and bundle.off_at <= self._clock() - self._rest_s

    def _change_to(self, bundle: LoadedBundle) -> None:
        name = bundle.manifest.bundle_id
        self._judged[name] = bundle
        log.warning("bundle_on" if bundle.is_usable else "bundle_off", bundle=name, reason=bundle.reason)

    @property
    def refusals(self) -> str:
        """Which are refused, and why; for messages."""
        refused = {name: bundle for name, bundle in self._judged.items() if not bundle.is_usable}
        return "; ".join(f"{name}: {bundle.reason}" for name, bundle in refused.items())

    @property
    def infos(self) -> list[BundleInfo]:
        return [
            bundle.info.model_copy(update={"on_trial": self._has_rested(bundle)}) for bundle in self._judged.values()
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
    """Load and judge. Raises `SettingsError` for a path that holds no bundle: that is a mistake in the settings.
    In service, the last `shadow_window` answers that were compared decide whether one stays, and after `rest_s` whether
    it comes back; without that number none is switched off."""
    judged = [_judge(path, target_fingerprint, target_tokenizer, gate, device, shadow_window) for path in paths]
    for bundle in judged:
        tell = log.info if bundle.is_usable else log.warning
        tell("bundle", bundle=bundle.manifest.bundle_id, usable=bundle.is_usable, reason=bundle.reason)
    return Bundles(judged, rest_s=rest_s)


def _judge(
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
