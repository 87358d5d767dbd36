from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.engines import tiny
from tests.workers.server import support
from tests.workers.server.support import ServedWorker, serving

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("models") / "large")


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the family: fewer layers, other weights, the same tokenizer and KV heads."""
    return tiny.model_folder(tmp_path_factory.mktemp("models") / "small", seed=1, num_layers=2)


@pytest.fixture(scope="session")
def bundle(small_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.bundle(small_folder, folder, tmp_path_factory.mktemp("bundles") / "small-to-large")


@pytest.fixture(scope="session")
def reference(folder: Path) -> LlamaForCausalLM:
    return tiny.reference(folder)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[ServedWorker]:
    async with serving(folder) as served:
        yield served


@pytest.fixture
async def pair(folder: Path, small_folder: Path, bundle: Path) -> AsyncIterator[tuple[ServedWorker, ServedWorker]]:
    """A small worker and a large one that maps its caches."""
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[bundle]) as large,
    ):
        yield small, large
