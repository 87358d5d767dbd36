"""Loads a Hugging Face model, its tokenizer and what the worker must know of them, from a folder or a hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mappers.errors import MapperError
from mappers.fingerprint import fingerprint, tokenizer_digest
from mappers.models import context_of, geometry_of, load_tokenizer, local_folder
from workers.api.schemas import KVLayout
from workers.engines.admission import Admission
from workers.engines.base import ModelInfo
from workers.engines.tokenizer import Tokenizer
from workers.engines.transformers.attention import attention_for
from workers.engines.transformers.engine import TransformersEngine
from workers.settings import SettingsError, WorkerSettings


def load(settings: WorkerSettings) -> TransformersEngine:
    """The engine of one worker, its model in memory. Raises `SettingsError`."""
    torch.set_num_threads(settings.num_threads)  # this thread loads the weights
    disable_progress_bar()  # a worker's log is no terminal
    try:
        folder = local_folder(settings.model)
        model = _load_model(settings, folder)
        info = _describe(settings, folder, model)
        tokenizer = Tokenizer(load_tokenizer(folder), model=info.name, vocab_size=info.vocab_size)
    except MapperError as error:
        raise SettingsError(f"worker {settings.id!r}: {error}") from error
    admission = Admission(max_running=settings.max_running, max_waiting=settings.max_queue)
    return TransformersEngine(model, info, tokenizer, admission, settings.num_threads)


def _load_model(settings: WorkerSettings, folder: Path) -> PreTrainedModel:
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"worker {settings.id!r}: device {settings.device!r}; CUDA devices here: {torch.cuda.device_count()}"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, settings.dtype), attn_implementation=attention_for(device)
        )
    except (OSError, ValueError) as error:
        raise SettingsError(f"worker {settings.id!r}: cannot load model {settings.model!r}: {error}") from error
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded


def _describe(settings: WorkerSettings, folder: Path, model: PreTrainedModel) -> ModelInfo:
    geometry = geometry_of(model.config)
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
        max_model_len=_max_model_len(settings, context_of(model.config)),
        vocab_size=model.config.vocab_size,
        eos_ids=_eos_ids(model.generation_config, model.config),
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
