"""The cluster secret: every call to a worker carries it, and tenants' salts are derived from it."""

from __future__ import annotations

from pathlib import Path

MIN_CHARS = 16


class SecretUnusable(ValueError):
    """The file cannot be read, others could read it too, or what it holds is no secret."""


def read_secret(path: Path) -> str:
    """The one line of the file. Raises `SecretUnusable`, naming the file and never what it holds."""
    try:
        mode, secret = path.stat().st_mode & 0o777, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretUnusable(f"cannot read {path}: {type(error).__name__}") from error
    if mode & 0o077:
        raise SecretUnusable(f"{path} has mode {mode:04o}; it must be 0600, readable by its owner only")
    if len(secret) < MIN_CHARS or not secret.isascii() or not secret.isprintable():
        raise SecretUnusable(
            f"{path} must hold one line of {MIN_CHARS} or more printable ASCII characters; it holds {len(secret)} "
            "characters"
        )
    return secret
