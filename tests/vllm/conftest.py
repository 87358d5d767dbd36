"""Tests that run vLLM use a tiny random model. They are skipped without vLLM; `make test-vllm` installs it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.workers.engines import tiny
from tests.workers.server import support as server

BLOCK_TOKENS = 32
# vLLM's CPU kernels take no smaller heads.
SHAPE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="session")
def installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; run: make test-vllm")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("models") / "large", **SHAPE)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("models") / "small", seed=1, num_layers=2, **SHAPE)


@pytest.fixture(scope="session")
def bundle(small_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return server.bundle(small_folder, folder, tmp_path_factory.mktemp("bundles") / "small-to-large")


@pytest.fixture(scope="session")
def llm(installed: None, folder: Path, bundle: Path) -> Any:
    """vLLM with the connector, all in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    transfer = {
        "kv_connector": "KvrelayConnector",
        "kv_connector_module_path": "workers.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"bundles": [str(bundle)], "exchange_bytes": 2**24, "name": "test-vllm"},
    }
    return LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_batched_tokens=128,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
