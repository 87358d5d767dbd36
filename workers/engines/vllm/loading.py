"""Starts vLLM with kvrelay's connector, from a worker's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from mappers.errors import MapperError
from mappers.models import local_folder
from workers.api.config import SettingsError
from workers.engines.base import ModelInfo, describe_model
from workers.engines.scheduling import Admission, Compute, set_compute_threads
from workers.settings import WorkerSettings

CHUNK_TOKENS = 256  # the longest prefill step, and so the longest delay of a cancellation or another request
BLOCK_MULTIPLE = 32  # required by vLLM's CPU kernels
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single rank runs in the engine's process, which otherwise spins for it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GOMP_SPINCOUNT": "30000",  # by default a waiting thread keeps its core for milliseconds
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def load(settings: WorkerSettings) -> Any:
    """Start vLLM's process, load the model and return the engine. Raises `SettingsError`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)  # for vLLM's process
    torch.set_num_threads(1)  # in this process, only the compute thread uses more
    try:
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers.engines.vllm.engine import VllmEngine
    except ImportError as error:
        raise SettingsError(
            f"worker {settings.id!r}: engine vllm is not installed here ({error}); see docs/vllm.md"
        ) from error
    try:
        if settings.device == "cpu" and settings.block_tokens % BLOCK_MULTIPLE:
            raise SettingsError(
                f"worker {settings.id!r}: block_tokens is {settings.block_tokens}; vLLM on the CPU needs a multiple of "
                f"{BLOCK_MULTIPLE}"
            )
        folder = local_folder(settings.model)
        has_config = (folder / "generation_config.json").exists()
        generation_config = GenerationConfig.from_pretrained(folder) if has_config else None
        info, tokenizer = describe_model(settings, folder, AutoConfig.from_pretrained(folder), generation_config)
        llm = AsyncLLM.from_engine_args(_arguments(settings, info))
    except (MapperError, ValueError, RuntimeError) as error:
        raise SettingsError(f"worker {settings.id!r}: vLLM cannot serve {settings.model!r}: {error}") from error
    admission = Admission(max_running=settings.max_running, max_waiting=settings.max_queue)
    compute = Compute(on_start=lambda: set_compute_threads(settings.num_threads))
    return VllmEngine(llm, info, tokenizer, admission, compute)


def connector_config(settings: WorkerSettings) -> Mapping[str, Any]:
    """Return vLLM's `kv_transfer_config`. It names no bundles: the worker maps, and the connector only loads KV that is
    exact or already mapped."""
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
        "async_scheduling": False,  # it could run a step over what the step before could not load
        "enforce_eager": settings.device == "cpu",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "kv_transfer_config": KVTransferConfig(**connector_config(settings)),
    }
    return AsyncEngineArgs(**defaults | settings.engine_options)
