"""The connector rejects unsupported settings at startup and gives the reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.api.config import SettingsError
from workers.api.process import PR_SET_PDEATHSIG
from workers.api.schemas import KVLayout
from workers.engines import load_engine
from workers.engines.vllm.config import ConnectorSettings, EngineModel, layer_number, unsupported_reason
from workers.settings import WorkerSettings

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_tokens=32, dtype="float32")
MODEL = EngineModel(Path("m"), "m", "ab" * 32, LAYOUT, 512, 32, "auto", "cpu")


def groups(*kinds: str, **fields: Any) -> SimpleNamespace:
    """vLLM's description of its KV groups, with one spec for each class name."""
    specs = [type(kind, (), {"sliding_window": None} | fields)() for kind in kinds]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


FULL = groups("FullAttentionSpec")


@pytest.mark.parametrize(
    ("kv_config", "reason"),
    [
        (groups("FullAttentionSpec", "MambaSpec"), "2 KV groups"),
        (groups("SlidingWindowSpec", sliding_window=128), "sliding window"),
        (groups("FullAttentionSpec", sliding_window=128), "sliding window"),
        (groups("MLAAttentionSpec"), "full attention are needed"),
        (groups("MambaSpec"), "full attention are needed"),
    ],
)
def test_unsupported_kv_is_rejected(kv_config: SimpleNamespace, reason: str) -> None:
    assert reason in (unsupported_reason(kv_config) or "")
    with pytest.raises(SettingsError, match=reason):
        MODEL.check(kv_config, "recompute")


def test_full_attention_is_supported() -> None:
    MODEL.check(FULL, "recompute")


def test_load_failure_policy_must_be_recompute() -> None:
    with pytest.raises(SettingsError, match="'fail'; it must be 'recompute'"):
        MODEL.check(FULL, "fail")


def test_async_scheduling_is_rejected() -> None:
    with pytest.raises(SettingsError, match="--no-async-scheduling"):
        replace(MODEL, schedules_ahead=True).check(FULL, "recompute")


def test_quantised_kv_is_rejected() -> None:
    with pytest.raises(SettingsError, match="fp8_e5m2"):
        replace(MODEL, paged_dtype="fp8_e5m2").check(FULL, "recompute")


@pytest.mark.parametrize(
    "extra", [{"bundel": []}, {"block_tokens": 0}, {"name": "a/b"}, {"exchange_bytes": "much"}], ids=str
)
def test_invalid_settings_are_named(extra: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(extra))):
        ConnectorSettings.of(extra)


def test_worker_without_vllm_reports_the_missing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for module in ("vllm", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match="engine vllm is not installed here.*docs/vllm.md"):
        load_engine(WorkerSettings(id="large-0", model=str(tmp_path), engine="vllm"))


def test_process_with_exited_parent_does_not_start() -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    try:
        with pytest.raises(SettingsError, match="the parent has already exited"):
            ConnectorSettings(parent=parent.pid).follow_parent(is_worker=False)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # keep this process alive


def test_layers_are_put_in_model_order() -> None:
    caches = {f"model.layers.{number}.self_attn.attn": torch.full((1,), number) for number in (1, 0)}
    assert [int(layer) for layer in MODEL.in_order(caches)] == [0, 1]
    with pytest.raises(SettingsError, match=r"\[0\]; m has 2 layers"):
        MODEL.in_order({"model.layers.0.attn": torch.zeros(1)})
    with pytest.raises(SettingsError, match="no number"):
        layer_number("model.embed")
