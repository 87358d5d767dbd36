"""Moves a KV cache from one model to another by a closed-form linear map: `KVCache` in, `KVCache` out.

Knows no HTTP, no pool, no worker. What is listed here is imported when it is first asked for: `import mappers` alone
costs nothing and needs no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappers.bundle import load, load_manifest, save
    from mappers.cache import KVCache, KVGeometry
    from mappers.compose import compose
    from mappers.errors import (
        BundleCorrupt,
        CalibrationTooSmall,
        CheckpointMismatch,
        DataUnreadable,
        FingerprintMismatch,
        GeometryMismatch,
        MapperError,
        PositionOutOfRange,
        RankDeficient,
        TokenizerMismatch,
        UnknownFamily,
        UnknownMethod,
        UnsupportedModel,
    )
    from mappers.evaluate import evaluate, evaluate_all
    from mappers.fingerprint import content_digest, fingerprint, tokenizer_digest
    from mappers.fit import fit
    from mappers.manifest import ArmScore, Evaluation, Manifest, QualityGate
    from mappers.mapper import Mapper, replay
    from mappers.protocol import QualityProtocol

__all__ = [
    "ArmScore",
    "BundleCorrupt",
    "CalibrationTooSmall",
    "CheckpointMismatch",
    "DataUnreadable",
    "Evaluation",
    "FingerprintMismatch",
    "QualityGate",
    "GeometryMismatch",
    "KVCache",
    "KVGeometry",
    "Manifest",
    "Mapper",
    "MapperError",
    "PositionOutOfRange",
    "QualityProtocol",
    "RankDeficient",
    "TokenizerMismatch",
    "UnknownFamily",
    "UnknownMethod",
    "UnsupportedModel",
    "compose",
    "content_digest",
    "evaluate",
    "evaluate_all",
    "fingerprint",
    "fit",
    "load",
    "load_manifest",
    "replay",
    "save",
    "tokenizer_digest",
]

_HOMES = {
    "ArmScore": "manifest",
    "Evaluation": "manifest",
    "QualityGate": "manifest",
    "KVCache": "cache",
    "KVGeometry": "cache",
    "Manifest": "manifest",
    "Mapper": "mapper",
    "QualityProtocol": "protocol",
    "compose": "compose",
    "content_digest": "fingerprint",
    "evaluate": "evaluate",
    "evaluate_all": "evaluate",
    "fingerprint": "fingerprint",
    "fit": "fit",
    "load": "bundle",
    "load_manifest": "bundle",
    "replay": "mapper",
    "save": "bundle",
    "tokenizer_digest": "fingerprint",
}  # the others are errors


class _Package(ModuleType):
    """Imports what is asked for. `fit` means the function, also once its module of the same name has been imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'mappers' has no attribute {name!r}")
        return getattr(import_module(f"mappers.{_HOMES.get(name, 'errors')}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
