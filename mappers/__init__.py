"""Moves a KV cache from one model to another by a closed-form linear map: `KVCache` in, `KVCache` out.

Knows no HTTP, no pool, no worker.
"""

from mappers.bundle import load, load_manifest, save
from mappers.cache import KVCache, KVGeometry
from mappers.errors import (
    BundleCorrupt,
    CalibrationTooSmall,
    DataUnreadable,
    FingerprintMismatch,
    GeometryMismatch,
    MapperError,
    RankDeficient,
    TokenizerMismatch,
    UnknownFamily,
    UnknownMethod,
    UnsupportedModel,
)
from mappers.evaluate import evaluate, evaluate_all
from mappers.fingerprint import content_digest, fingerprint, tokenizer_digest
from mappers.fit import fit
from mappers.manifest import ArmScore, Evaluation, Gate, Manifest
from mappers.mapper import Mapper
from mappers.protocol import Protocol
from mappers.replay import replay

__all__ = [
    "ArmScore",
    "BundleCorrupt",
    "CalibrationTooSmall",
    "DataUnreadable",
    "Evaluation",
    "FingerprintMismatch",
    "Gate",
    "GeometryMismatch",
    "KVCache",
    "KVGeometry",
    "Manifest",
    "Mapper",
    "MapperError",
    "Protocol",
    "RankDeficient",
    "TokenizerMismatch",
    "UnknownFamily",
    "UnknownMethod",
    "UnsupportedModel",
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
