"""What `mappers` raises; the message names the value and what is allowed.

MapperError (ValueError)
├── GeometryMismatch     a cache or a model has another shape than the one asked for
├── BundleCorrupt        a bundle's files do not match its digests, or make no sense
├── FingerprintMismatch  a bundle, or a derived model's record, speaks of other weights
├── TokenizerMismatch    the two models do not read the same tokens
├── UnsupportedModel     a model that no mapper can serve: its RoPE, its layers, its files
├── PositionOutOfRange   a token that stands where the model's RoPE can't be known
├── UnknownMethod        no mapping method of that name
├── UnknownFamily        neither a bundle nor a family of that name
├── CalibrationTooSmall  too few tokens for the features of a fit
├── RankDeficient        the features of a fit depend on one another
├── CheckpointMismatch   a checkpoint of another fit, or of other documents
└── DataUnreadable       a file that holds no conversations and no text
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
