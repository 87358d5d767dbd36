"""The mapper bundles that a worker may use on what it receives: loaded and judged once, at start.

A bundle is used only if it was fitted for exactly the worker's weights and tokenizer, and its evaluation passes the
gate. One that does not is reported with the reason, in the log and in `/v1/info`, and stands in nobody's way.

What a bundle promises is looked at in service too: answers over its caches are compared with native ones, and when the
last of them are below the same gate it is switched off, in the same way, until the worker is started again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from mappers.bundle import load, load_manifest
from mappers.errors import MapperError
from mappers.manifest import Manifest
from mappers.mapper import Mapper
from workers.api.schemas import BundleInfo
from workers.quality import Comparison, Window
from workers.settings import Gate, SettingsError

log = structlog.get_logger()


@dataclass(frozen=True)
class JudgedBundle:
    """What a bundle says of itself, and its mapper if it may be used; else `reason` says why not. `window` holds what
    was found in service."""

    manifest: Manifest
    mapper: Mapper | None = None
    reason: str | None = None
    window: Window | None = None

    @property
    def info(self) -> BundleInfo:
        return BundleInfo(
            bundle_id=self.manifest.bundle_id,
            source_model=self.manifest.source.name,
            source_fingerprint=self.manifest.source.fingerprint,
            target_fingerprint=self.manifest.target.fingerprint,
            method=self.manifest.method,
            usable=self.mapper is not None,
            reason=self.reason,
            shadow=self.window.info if self.window else None,
        )


class Bundles:
    """The bundles of one worker."""

    def __init__(self, judged: Iterable[JudgedBundle] = ()):
        self._judged = {bundle.manifest.bundle_id: bundle for bundle in judged}

    def usable(self) -> list[Mapper]:
        """Mappers into this worker's model that pass the gate."""
        return [bundle.mapper for bundle in self._judged.values() if bundle.mapper is not None]

    def compared(self, bundle_id: str, comparison: Comparison) -> bool:
        """An answer over a cache of this bundle's was compared with a native one. Whether that switched it off."""
        bundle = self._judged[bundle_id]
        if bundle.mapper is None or bundle.window is None:
            return False
        bundle.window.add(comparison)
        reason = bundle.window.objection
        if reason is not None:
            self._judged[bundle_id] = replace(bundle, mapper=None, reason=reason)
            log.warning("bundle_off", bundle=bundle_id, reason=reason)
        return reason is not None

    @property
    def refusals(self) -> str:
        """Which are refused, and why; for messages."""
        return "; ".join(f"{name}: {bundle.reason}" for name, bundle in self._judged.items() if bundle.mapper is None)

    @property
    def infos(self) -> list[BundleInfo]:
        return [bundle.info for bundle in self._judged.values()]


def load_bundles(
    paths: Iterable[str],
    *,
    target_fingerprint: str,
    target_tokenizer: str | None,
    gate: Gate,
    device: str,
    shadow_window: int | None = None,
) -> Bundles:
    """Load and judge. Raises `SettingsError` for a path that holds no bundle: that is a mistake in the settings.
    In service, the last `shadow_window` answers that were compared decide whether one stays; without that number
    none is switched off."""
    judged = [_judge(path, target_fingerprint, target_tokenizer, gate, device, shadow_window) for path in paths]
    for bundle in judged:
        tell = log.info if bundle.mapper else log.warning
        tell("bundle", bundle=bundle.manifest.bundle_id, usable=bundle.mapper is not None, reason=bundle.reason)
    return Bundles(judged)


def _judge(
    path: str, target_fingerprint: str, tokenizer: str | None, gate: Gate, device: str, shadow_window: int | None
) -> JudgedBundle:
    try:
        manifest = load_manifest(path)
    except MapperError as error:
        raise SettingsError(f"bundle {path!r}: {error}") from error
    try:
        mapper = load(path, device)
        mapper.check(manifest.source.fingerprint, target_fingerprint)
        mapper.check_tokenizers(target=tokenizer)
    except MapperError as error:
        return JudgedBundle(manifest, reason=str(error))
    reason = mapper.refusal(**gate.model_dump())
    window = Window(mapper.gate(**gate.model_dump()), shadow_window) if shadow_window else None
    return JudgedBundle(manifest, mapper if reason is None else None, reason, window)
