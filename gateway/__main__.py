"""`python -m gateway --config kvrelay.yaml`: one gateway process, in the foreground, logging JSON lines to stderr.

It follows the file: a change that can be used is, without a request being lost; any other is told, and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from gateway import server
from gateway.app import create_app
from gateway.errors import SettingsError
from gateway.settings import ServerSettings, Settings, load, read_secret
from gateway.state.reload import ConfigSource
from workers.api import tracing
from workers.api.logs import configure_logs
from workers.api.process import ParentWatchError, add_parent_option, die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after an orderly end, 2 for a configuration that cannot be used."""
    asked = _arguments().parse_args(argv)
    source = ConfigSource(asked.config, partial(_settings, asked), _secrets)
    with _heard(source):
        return _run(asked, source)


def _run(asked: argparse.Namespace, source: ConfigSource) -> int:
    try:
        if asked.die_with_parent is not None:
            die_with_parent(asked.die_with_parent)
        _check_ready_file(asked.ready_file)
        settings = source.read()
        app = create_app(settings, read_secret(settings.secret_file), source=source)
        tracing.start(settings.tracing, "kvrelay-gateway")
        listener = server.bind(settings)
    except (SettingsError, ParentWatchError, tracing.CannotTrace) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    configure_logs(sys.stderr.buffer)
    with listener:
        server.Server(app, asked.ready_file).run(sockets=[listener])
    return 0


def _check_ready_file(path: Path | None) -> None:
    """Raises `SettingsError` for one that could not be written once all has been started."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise SettingsError(f"--ready-file: cannot write {path}; it needs a folder that exists and may be written to")


@contextmanager
def _heard(source: ConfigSource) -> Iterator[None]:
    """A SIGHUP that comes before the server listens for it is taken for what it asks, and ends nothing."""
    before = signal.signal(signal.SIGHUP, lambda *_: source.requested.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Runs the kvrelay gateway.")
    parser.add_argument("--config", type=Path, default=Path("kvrelay.yaml"), help="the configuration file")
    parser.add_argument("--host", help="in place of server.host")
    parser.add_argument("--port", type=int, help="in place of server.port; 0 takes a free one")
    parser.add_argument("--ready-file", type=Path, help='written once it listens: {"url", "pid"}')
    add_parent_option(parser)
    return parser


def _secrets(settings: Settings) -> dict[str, str]:
    """By key, those that are read at the start only."""
    board = {"discovery": settings.board_url} if settings.board_url is not None else {}
    return board | {"secret_file": read_secret(settings.secret_file)}


def _settings(asked: argparse.Namespace) -> Settings:
    settings = load(asked.config)
    given = {key: value for key in ("host", "port") if (value := getattr(asked, key)) is not None}
    try:
        server_settings = ServerSettings.model_validate(settings.server.model_dump() | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"--{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error
    return settings.model_copy(update={"server": server_settings})


if __name__ == "__main__":
    sys.exit(main())
