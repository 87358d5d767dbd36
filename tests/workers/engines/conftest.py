from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.engines import tiny
from workers.engines import load_engine
from workers.engines.base import Engine
from workers.settings import ENGINES

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def reference(folder: Path) -> LlamaForCausalLM:
    return tiny.reference(folder)


@pytest.fixture(params=sorted(set(ENGINES) - {"vllm"}))  # tested in tests/vllm
async def engine(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    engine = load_engine(tiny.settings_for(folder, engine=request.param, max_running=2, max_queue=2))
    yield engine
    await engine.aclose()
