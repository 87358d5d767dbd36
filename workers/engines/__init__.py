"""Engines by name. An engine's module is imported when it is loaded: only then do torch and
transformers, or vLLM, come in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from workers.settings import ENGINES, WorkerSettings

if TYPE_CHECKING:
    from workers.engines.base import Engine

def load_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name, its model loaded. Takes seconds; raises `SettingsError`."""
    module, function = ENGINES[settings.engine].split(":")
    engine: Engine = getattr(import_module(module), function)(settings)
    return engine
