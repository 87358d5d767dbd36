"""Starts vLLM with kvrelay's connector for one worker of the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from mappers.errors import MapperError
from mappers.models import load_tokenizer, local_folder
from workers.api.config import SettingsError
from workers.engines.base import ModelInfo, describe
from workers.engines.scheduling import Admission, Compute, set_compute_threads
from workers.engines.tokenizer import Tokenizer
from workers.settings import WorkerSettings

CHUNK_TOKENS = 256  # the longest prefill step: what a hang-up or another request waits for at most
BLOCK_MULTIPLE = 32  # of vLLM's CPU kernels
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single rank runs in the engine's process, which else spins for its word
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GOMP_SPINCOUNT": "30000",  # by default a thread that waits for another keeps a core for milliseconds
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def load(settings: WorkerSettings) -> Any:
    """The engine of one worker, vLLM's process started and its model in memory. Raises `SettingsError`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)  # of vLLM's process
    torch.set_num_threads(1)  # in this one, only the compute thread shares its work out
    try:
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers.engines.vllm.engine import VllmEngine
    except ImportError as error:
        raise SettingsError(
            f"worker {settings.id!r}: engine vllm is not installed here ({error}); see docs/vllm.md"
        ) from error
    try:
        info, tokenizer = _describe(settings)
        llm = AsyncLLM.from_engine_args(_arguments(settings, info))
    except (MapperError, ValueError, RuntimeError) as error:
        raise SettingsError(f"worker {settings.id!r}: vLLM cannot serve {settings.model!r}: {error}") from error
    admission = Admission(max_running=settings.max_running, max_waiting=settings.max_queue)
    compute = Compute(on_start=lambda: set_compute_threads(settings.num_threads))
    return VllmEngine(llm, info, tokenizer, admission, compute)


def _describe(settings: WorkerSettings) -> tuple[ModelInfo, Tokenizer]:
    _check_block_tokens(settings)
    folder = local_folder(settings.model)
    config = AutoConfig.from_pretrained(folder)
    info = describe(settings, folder, config, _generation_config(folder))
    tokenizer = Tokenizer(
        load_tokenizer(folder), model=info.name, vocab_size=info.vocab_size, max_tokens=info.max_model_len
    )
    return info, tokenizer


def _generation_config(folder: Path) -> Any:
    """None where the model has none."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None


def connector_config(settings: WorkerSettings) -> Mapping[str, Any]:
    """vLLM's `kv_transfer_config`. Mapping is the worker's own business: the connector only loads what is exact or was
    mapped already."""
    return {
        "kv_connector": "KvrelayConnector",
        "kv_connector_module_path": "workers.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "name": f"{settings.id}-vllm"[-64:],
            "model": settings.model_name,
            "exchange_bytes": settings.pool_bytes,
            "block_tokens": settings.block_tokens,
            "transports": ["shm", "cuda_ipc"],
            "parent": os.getpid(),
        },
    }


def _arguments(settings: WorkerSettings, info: ModelInfo) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig

    defaults = {
        "model": str(local_folder(settings.model)),
        "dtype": settings.dtype,
        "max_model_len": info.max_model_len,
        "block_size": settings.block_tokens,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,  # by which a step may run over what the step before could not load
        "enforce_eager": settings.device == "cpu",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "kv_transfer_config": KVTransferConfig(**connector_config(settings)),
    }
    return AsyncEngineArgs(**defaults | settings.engine_options)


def _check_block_tokens(settings: WorkerSettings) -> None:
    if settings.device == "cpu" and settings.block_tokens % BLOCK_MULTIPLE:
        raise SettingsError(
            f"worker {settings.id!r}: block_tokens is {settings.block_tokens}; vLLM on the CPU takes multiples of "
            f"{BLOCK_MULTIPLE}"
        )
