"""Exceptions of `mappers`. Each message names the value given and what is allowed.

MapperError (ValueError)
├── GeometryMismatch     a cache or a model has an unexpected shape
├── BundleCorrupt        a bundle's files do not match their digests or contradict each other
├── FingerprintMismatch  a bundle or a derived model's record belongs to other weights
├── TokenizerMismatch    two models do not share their token ids
├── UnsupportedModel     no mapper can serve the model: its RoPE, its layers, its files
├── PositionOutOfRange   a position beyond those for which the model's RoPE is known
├── UnknownMethod        no mapping method has this name
├── UnknownFamily        neither a bundle nor a family has this name
├── CalibrationTooSmall  too few tokens for the features of a fit
├── RankDeficient        the features of a fit are linearly dependent
├── CheckpointMismatch   the checkpoint belongs to another fit or to other documents
└── DataUnreadable       a file without conversations or text
"""

from __future__ import annotations


class MapperError(ValueError):
    """Base of the tree."""


class GeometryMismatch(MapperError):
    pass


class BundleCorrupt(MapperError):
    pass


class FingerprintMismatch(MapperError):
    pass


class TokenizerMismatch(MapperError):
    pass


class UnsupportedModel(MapperError):
    pass


class PositionOutOfRange(MapperError):
    pass


class UnknownMethod(MapperError):
    pass


class UnknownFamily(MapperError):
    pass


class CalibrationTooSmall(MapperError):
    pass


class RankDeficient(MapperError):
    pass


class DataUnreadable(MapperError):
    pass


class CheckpointMismatch(MapperError):
    pass
