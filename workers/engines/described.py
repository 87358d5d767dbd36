"""What a worker must know of a model that it serves, from the model's files: the same for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mappers.fingerprint import fingerprint, tokenizer_digest
from mappers.model_config import context_of, geometry_of
from workers.api.config import SettingsError
from workers.api.schemas import KVLayout
from workers.engines.base import ModelInfo
from workers.settings import WorkerSettings


def describe(settings: WorkerSettings, folder: Path, config: Any, generation_config: Any) -> ModelInfo:
    """Raises `MapperError` for a model whose KV is of another kind, `SettingsError` for one that is too short."""
    geometry = geometry_of(config)
    return ModelInfo(
        name=settings.model_name,
        fingerprint=fingerprint(folder),
        layout=KVLayout(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=settings.block_tokens,
            dtype=settings.dtype,
        ),
        max_model_len=_max_model_len(settings, context_of(config)),
        vocab_size=config.vocab_size,
        eos_ids=_eos_ids(generation_config, config),
        device=settings.device,
        tokenizer_digest=tokenizer_digest(folder),
    )


def _max_model_len(settings: WorkerSettings, positions: int) -> int:
    if settings.max_model_len is not None and settings.max_model_len > positions:
        raise SettingsError(
            f"worker {settings.id!r}: max_model_len {settings.max_model_len} is more than the {positions} positions "
            f"of {settings.model!r}"
        )
    return settings.max_model_len or positions


def _eos_ids(*configs: Any) -> frozenset[int]:
    """The ids that end an answer: those of the generation config, else of the model's."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
