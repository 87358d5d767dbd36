"""What the connector refuses at start, with the reason."""

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
    """vLLM's description of its KV, of specs that are called so."""
    specs = [type(kind, (), {"sliding_window": None} | fields)() for kind in kinds]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


FULL = groups("FullAttentionSpec")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (groups("FullAttentionSpec", "MambaSpec"), "2 KV groups"),
        (groups("SlidingWindowSpec", sliding_window=128), "sliding window"),
        (groups("FullAttentionSpec", sliding_window=128), "sliding window"),
        (groups("MLAAttentionSpec"), "full attention are needed"),
        (groups("MambaSpec"), "full attention are needed"),
    ],
)
def test_kv_of_another_kind_is_refused(found: SimpleNamespace, reason: str) -> None:
    assert reason in (unsupported_reason(found) or "")
    with pytest.raises(SettingsError, match=reason):
        MODEL.check(found, "recompute")


def test_full_attention_is_served() -> None:
    MODEL.check(FULL, "recompute")


def test_failures_must_be_computed_again() -> None:
    with pytest.raises(SettingsError, match="'fail'; it must be 'recompute'"):
        MODEL.check(FULL, "fail")


def test_steps_that_are_scheduled_ahead_are_refused() -> None:
    with pytest.raises(SettingsError, match="--no-async-scheduling"):
        replace(MODEL, schedules_ahead=True).check(FULL, "recompute")


def test_quantised_kv_is_refused() -> None:
    with pytest.raises(SettingsError, match="fp8_e5m2"):
        replace(MODEL, paged_dtype="fp8_e5m2").check(FULL, "recompute")


@pytest.mark.parametrize(
    "extra", [{"bundel": []}, {"block_tokens": 0}, {"name": "a/b"}, {"exchange_bytes": "much"}], ids=str
)
def test_settings_that_are_wrong_are_named(extra: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(extra))):
        ConnectorSettings.of(extra)


def test_without_vllm_the_worker_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for module in ("vllm", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match="engine vllm is not installed here.*docs/vllm.md"):
        load_engine(WorkerSettings(id="large-0", model=str(tmp_path), engine="vllm"))


def test_a_process_whose_parent_has_ended_does_not_begin() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        with pytest.raises(SettingsError, match="the parent has already exited"):
            ConnectorSettings(parent=gone.pid).follow_parent(is_worker=False)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # this process goes on


def test_layers_are_put_in_the_models_order() -> None:
    caches = {f"model.layers.{number}.self_attn.attn": torch.full((1,), number) for number in (1, 0)}
    assert [int(layer) for layer in MODEL.in_order(caches)] == [0, 1]
    with pytest.raises(SettingsError, match=r"\[0\]; m has 2 layers"):
        MODEL.in_order({"model.layers.0.attn": torch.zeros(1)})
    with pytest.raises(SettingsError, match="no number"):
        layer_number("model.embed")
