"""What is told of a model, and which models and settings are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mappers.fingerprint import fingerprint
from tests.workers.engines import tiny
from tests.workers.engines.test_sequence import CLAIM, written
from workers.api.config import SettingsError
from workers.engines import load_engine
from workers.engines.base import Engine
from workers.engines.transformers.engine import TransformersEngine
from workers.settings import ENGINES


def test_a_model_is_described(engine: Engine, folder: Path) -> None:
    assert engine.name in ENGINES
    model = engine.model
    assert (model.name, model.fingerprint) == (folder.name, fingerprint(folder))
    assert (model.max_model_len, model.eos_ids) == (tiny.CONTEXT, {2})
    layout = model.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (3, 2, 12, "float32")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "no/such/model/here"}, "no/such/model/here"),
        ({"max_model_len": 5000}, "5000"),
        ({"device": "cuda:99"}, "CUDA devices here"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    folder: Path, changes: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SettingsError, match=says):
        load_engine(tiny.settings_for(folder, **changes))


def test_a_model_whose_layers_forget_is_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "full_attention"]
    folder = tiny.model_folder(tmp_path / "linear", layer_types=kinds)
    with pytest.raises(SettingsError, match="layers of type linear_attention; allowed: full_attention, sliding"):
        load_engine(tiny.settings_for(folder))


async def test_only_the_compute_thread_shares_its_work_out(folder: Path) -> None:
    engine = load_engine(tiny.settings_for(folder, num_threads=3))
    assert isinstance(engine, TransformersEngine)
    try:
        assert await engine.compute.run(torch.get_num_threads) == 3
        assert await asyncio.to_thread(torch.get_num_threads) == torch.get_num_threads() == 1
    finally:
        await engine.aclose()


@pytest.mark.gpu
async def test_a_gpu_writes_what_the_cpu_writes(folder: Path) -> None:
    engine = load_engine(tiny.settings_for(folder, device="cuda"))
    prompt = tiny.random_tokens(600)
    try:
        async with engine.sequence(CLAIM, 640) as sequence:
            await sequence.read(prompt)
            assert await written(sequence, 8) == tiny.greedy(tiny.reference(folder), prompt, 8)
    finally:
        await engine.aclose()
