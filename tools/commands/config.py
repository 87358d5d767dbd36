"""What commands beside a gateway take from its kvrelay.yaml."""

from __future__ import annotations

from pathlib import Path

from gateway.settings import Settings, load, read_secret
from tools.commands import family


def load_usable(path: Path) -> Settings:
    """Raises `SettingsError` for all that keeps a gateway from starting with the file but its workers' secret."""
    settings = load(path)
    settings.check_bind()
    if settings.admin.key_file is not None:
        read_secret(settings.admin.key_file, "admin.key_file")
    return settings


def secret_file(settings: Settings) -> Path:
    """Of the cluster secret: where the configuration's is not there, the one that `kvrelay up` made."""
    made = family.home() / "secret"
    return settings.secret_file if settings.secret_file.exists() or not made.exists() else made
