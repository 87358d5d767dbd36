"""`python -m gateway --config kvrelay.yaml`: one gateway process, in the foreground, logging JSON lines to stderr.

It follows the file: a valid change takes effect without losing a request; an invalid one is logged and ignored.
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
from gateway.reload import ConfigSource
from gateway.settings import ServerSettings, Settings, load
from workers.api import tracing
from workers.api.config import SettingsError, read_secret
from workers.api.logs import configure_logs
from workers.api.process import ParentWatchError, add_parent_option, die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a graceful shutdown, 2 for an invalid configuration."""
    options = _arguments().parse_args(argv)
    source = ConfigSource(options.config, partial(_settings, options), _startup_secrets)
    with _sighup_reloads(source):
        return _run(options, source)


def _run(options: argparse.Namespace, source: ConfigSource) -> int:
    try:
        if options.die_with_parent is not None:
            die_with_parent(options.die_with_parent)
        _check_ready_file(options.ready_file)
        settings = source.read()
        app = create_app(settings, read_secret(settings.secret_file), source=source)
        tracing.start(settings.tracing, "kvrelay-gateway")
        listener = server.bind(settings)
    except (SettingsError, ParentWatchError, tracing.TracingUnavailable) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    configure_logs(sys.stderr.buffer)
    with listener:
        server.Server(app, options.ready_file).run(sockets=[listener])
    return 0


def _check_ready_file(path: Path | None) -> None:
    """Raises `SettingsError` now for a file that could not be written once everything has started."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise SettingsError(f"--ready-file: cannot write {path}; its folder must exist and be writable")


@contextmanager
def _sighup_reloads(source: ConfigSource) -> Iterator[None]:
    """Keep a SIGHUP that arrives before the server handles it from ending the process: request a reload instead."""
    before = signal.signal(signal.SIGHUP, lambda *_: source.requested.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Runs the kvrelay gateway.")
    parser.add_argument("--config", type=Path, default=Path("kvrelay.yaml"), help="the configuration file")
    parser.add_argument("--host", help="overrides server.host")
    parser.add_argument("--port", type=int, help="overrides server.port; 0 picks a free port")
    parser.add_argument("--ready-file", type=Path, help='write {"url", "pid"} to this file once the gateway listens')
    add_parent_option(parser)
    return parser


def _startup_secrets(settings: Settings) -> dict[str, str]:
    """Secrets that are read only at startup, by setting."""
    board = {"discovery": settings.board_url} if settings.board_url is not None else {}
    return board | {"secret_file": read_secret(settings.secret_file)}


def _settings(options: argparse.Namespace) -> Settings:
    """The settings in the file, overridden by the options."""
    settings = load(options.config)
    overrides = {key: value for key in ("host", "port") if (value := getattr(options, key)) is not None}
    try:
        server_settings = ServerSettings.model_validate(settings.server.model_dump() | overrides)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"--{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error
    return settings.model_copy(update={"server": server_settings})


if __name__ == "__main__":
    sys.exit(main())
