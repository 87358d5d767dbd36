"""Loading an engine: the model info, and settings that are rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mappers.fingerprint import fingerprint
from tests.workers.engines import tiny
from tests.workers.engines.test_sequence import CLAIM, generate_ids
from workers.api.config import SettingsError
from workers.engines import load_engine
from workers.engines.base import Engine
from workers.engines.transformers.engine import TransformersEngine
from workers.settings import ENGINES


def test_model_info_describes_model(engine: Engine, folder: Path) -> None:
    assert engine.name in ENGINES
    model = engine.model
    assert (model.name, model.fingerprint) == (folder.name, fingerprint(folder))
    assert (model.max_model_len, model.eos_ids) == (tiny.CONTEXT, {2})
    layout = model.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (3, 2, 12, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "no/such/model/here"}, "no/such/model/here"),
        ({"max_model_len": 5000}, "5000"),
        ({"device": "cuda:99"}, "cuda:99.*CUDA devices: "),
    ],
)
def test_unusable_settings_are_rejected(
    folder: Path, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SettingsError, match=message):
        load_engine(tiny.settings_for(folder, **changes))


def test_linear_attention_is_rejected(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "full_attention"]
    folder = tiny.model_folder(tmp_path / "linear", layer_types=kinds)
    with pytest.raises(SettingsError, match="layers of type linear_attention; allowed: full_attention, sliding"):
        load_engine(tiny.settings_for(folder))


async def test_only_compute_thread_uses_num_threads(folder: Path) -> None:
    engine = load_engine(tiny.settings_for(folder, num_threads=3))
    assert isinstance(engine, TransformersEngine)
    try:
        assert await engine.compute.run(torch.get_num_threads) == 3
        assert await asyncio.to_thread(torch.get_num_threads) == torch.get_num_threads() == 1
    finally:
        await engine.aclose()


@pytest.mark.gpu
async def test_gpu_matches_cpu(folder: Path) -> None:
    engine = load_engine(tiny.settings_for(folder, device="cuda"))
    prompt = tiny.random_tokens(600)
    try:
        async with engine.sequence(CLAIM, 640) as sequence:
            await sequence.prefill(prompt)
            assert await generate_ids(sequence, 8) == tiny.greedy(tiny.reference(folder), prompt, 8)
    finally:
        await engine.aclose()
