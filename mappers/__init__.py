"""Moves a KV cache from one model to another by a closed-form linear map: `KVCache` in, `KVCache` out.

    fit        collect ─► choose, by a method ─► bundle
    map        bundle ─► mapper ─► apply
    evaluate   protocol ─► arms ─► scores ─► report

Knows no HTTP, no pool, no worker. Public names are imported on first use: `import mappers` alone needs no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappers.bundle import load as load
    from mappers.bundle import load_manifest as load_manifest
    from mappers.bundle import save as save
    from mappers.cache import KVCache as KVCache
    from mappers.cache import KVGeometry as KVGeometry
    from mappers.compose import compose as compose
    from mappers.errors import BundleCorrupt as BundleCorrupt
    from mappers.errors import CalibrationTooSmall as CalibrationTooSmall
    from mappers.errors import CheckpointMismatch as CheckpointMismatch
    from mappers.errors import DataUnreadable as DataUnreadable
    from mappers.errors import FingerprintMismatch as FingerprintMismatch
    from mappers.errors import GeometryMismatch as GeometryMismatch
    from mappers.errors import MapperError as MapperError
    from mappers.errors import PositionOutOfRange as PositionOutOfRange
    from mappers.errors import RankDeficient as RankDeficient
    from mappers.errors import TokenizerMismatch as TokenizerMismatch
    from mappers.errors import UnknownFamily as UnknownFamily
    from mappers.errors import UnknownMethod as UnknownMethod
    from mappers.errors import UnsupportedModel as UnsupportedModel
    from mappers.evaluate import evaluate as evaluate
    from mappers.fingerprint import content_digest as content_digest
    from mappers.fingerprint import fingerprint as fingerprint
    from mappers.fingerprint import tokenizer_digest as tokenizer_digest
    from mappers.fit import fit as fit
    from mappers.manifest import ArmScore as ArmScore
    from mappers.manifest import Evaluation as Evaluation
    from mappers.manifest import Manifest as Manifest
    from mappers.manifest import QualityGate as QualityGate
    from mappers.mapper import Mapper as Mapper
    from mappers.mapper import replay as replay
    from mappers.protocol import QualityProtocol as QualityProtocol
    from mappers.settings import FitSettings as FitSettings

_NAMES = {
    "bundle": ("load", "load_manifest", "save"),
    "cache": ("KVCache", "KVGeometry"),
    "compose": ("compose",),
    "errors": (
        "BundleCorrupt",
        "CalibrationTooSmall",
        "CheckpointMismatch",
        "DataUnreadable",
        "FingerprintMismatch",
        "GeometryMismatch",
        "MapperError",
        "PositionOutOfRange",
        "RankDeficient",
        "TokenizerMismatch",
        "UnknownFamily",
        "UnknownMethod",
        "UnsupportedModel",
    ),
    "evaluate": ("evaluate",),
    "fingerprint": ("content_digest", "fingerprint", "tokenizer_digest"),
    "fit": ("fit",),
    "manifest": ("ArmScore", "Evaluation", "Manifest", "QualityGate"),
    "mapper": ("Mapper", "replay"),
    "protocol": ("QualityProtocol",),
    "settings": ("FitSettings",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


class _LazyPackage(ModuleType):
    """Imports public names on first access. `fit` is the function, even after its module of that name is imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'mappers' has no attribute {name!r}")
        return getattr(import_module(f"mappers.{_MODULES[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_MODULES})


sys.modules[__name__].__class__ = _LazyPackage
