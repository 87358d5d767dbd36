"""Loads a Hugging Face model, its tokenizer and what the worker must know of them, from a folder or a hub name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mappers.errors import MapperError
from mappers.models import load_tokenizer, local_folder
from workers.api.config import SettingsError
from workers.engines.admission import Admission
from workers.engines.described import describe
from workers.engines.tokenizer import Tokenizer
from workers.engines.transformers.attention import attention_for
from workers.engines.transformers.batch import can_batch
from workers.engines.transformers.engine import TransformersEngine
from workers.engines.transformers.rowwise import make_rowwise
from workers.settings import WorkerSettings


def load(settings: WorkerSettings) -> TransformersEngine:
    """The engine of one worker, its model in memory. Raises `SettingsError`."""
    torch.set_num_threads(1)  # only the engine's own thread shares its work out
    disable_progress_bar()  # a worker's log is no terminal
    try:
        folder = local_folder(settings.model)
        model = _load_model(settings, folder)
        info = describe(settings, folder, model.config, model.generation_config)
        tokenizer = Tokenizer(
            load_tokenizer(folder), model=info.name, vocab_size=info.vocab_size, max_tokens=info.max_model_len
        )
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
    if can_batch(loaded):
        make_rowwise(loaded)
    return loaded
