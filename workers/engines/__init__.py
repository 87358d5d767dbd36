"""Engines by name. Loading one imports its module, and only then torch and transformers, or vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from workers.settings import ENGINES, WorkerSettings

if TYPE_CHECKING:
    from workers.engines.base import Engine


def load_engine(settings: WorkerSettings) -> Engine:
    """Load the configured engine and its model. Takes seconds. Raises `SettingsError`."""
    module, function = ENGINES[settings.engine].split(":")
    engine: Engine = getattr(import_module(module), function)(settings)
    return engine
