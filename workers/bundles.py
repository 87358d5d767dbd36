"""The mapper bundles that a worker may use on what it receives: loaded and judged once, at start.

A bundle is used only if it was fitted for exactly the worker's weights and tokenizer, and its evaluation passes the
gate. One that does not is reported with the reason, in the log and in `/v1/info`, and stands in nobody's way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from mappers.bundle import load, load_manifest
from mappers.errors import MapperError
from mappers.manifest import Manifest
from mappers.mapper import Mapper
from workers.api.schemas import BundleInfo
from workers.settings import Gate, SettingsError

log = structlog.get_logger()


@dataclass(frozen=True)
class JudgedBundle:
    """What a bundle says of itself, and its mapper if it may be used; else `reason` says why not."""

    manifest: Manifest
    mapper: Mapper | None = None
    reason: str | None = None

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
        )


class Bundles:
    """The bundles of one worker."""

    def __init__(self, judged: Iterable[JudgedBundle] = ()):
        self._judged = tuple(judged)

    def usable(self) -> list[Mapper]:
        """Mappers into this worker's model that pass the gate."""
        return [bundle.mapper for bundle in self._judged if bundle.mapper is not None]

    @property
    def infos(self) -> list[BundleInfo]:
        return [bundle.info for bundle in self._judged]


def load_bundles(
    paths: Iterable[str], *, target_fingerprint: str, target_tokenizer: str | None, gate: Gate, device: str
) -> Bundles:
    """Load and judge. Raises `SettingsError` for a path that holds no bundle: that is a mistake in the settings."""
    judged = [_judge(path, target_fingerprint, target_tokenizer, gate, device) for path in paths]
    for bundle in judged:
        tell = log.info if bundle.mapper else log.warning
        tell("bundle", bundle=bundle.manifest.bundle_id, usable=bundle.mapper is not None, reason=bundle.reason)
    return Bundles(judged)


def _judge(path: str, target_fingerprint: str, tokenizer: str | None, gate: Gate, device: str) -> JudgedBundle:
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
    return JudgedBundle(manifest, mapper if reason is None else None, reason)
