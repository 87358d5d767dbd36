"""`python -m gateway --config kvrelay.yaml`: one gateway process, in the foreground, logging JSON lines to stderr.

It follows the file: a change that can be used is, without a request being lost; any other is told, and changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import structlog
from pydantic import ValidationError

from gateway import server
from gateway.app import create_app
from gateway.errors import SettingsError
from gateway.reload import Source
from gateway.settings import ServerSettings, Settings, load, read_secret
from workers.api import tracing
from workers.api.parent import CannotFollow, add_parent_option, die_with_parent
from workers.api.trail import add_request_id

OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after an orderly end, 2 for a configuration that cannot be used."""
    asked = _arguments().parse_args(argv)
    try:
        if asked.die_with_parent is not None:
            die_with_parent(asked.die_with_parent)
        source = Source(asked.config, partial(_settings, asked))
        settings = source.read()
        app = create_app(settings, read_secret(settings.secret_file), source=source)
        tracing.start(settings.tracing, "kvrelay-gateway")
        listener = server.bind(settings)
    except (SettingsError, CannotFollow, tracing.CannotTrace) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    lines = _log_to_stderr()
    try:
        with listener:
            server.Server(app, asked.ready_file).run(sockets=[listener])
    finally:
        lines.flush()
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Runs the kvrelay gateway.")
    parser.add_argument("--config", type=Path, default=Path("kvrelay.yaml"), help="the configuration file")
    parser.add_argument("--host", help="in place of server.host")
    parser.add_argument("--port", type=int, help="in place of server.port; 0 takes a free one")
    parser.add_argument("--ready-file", type=Path, help='written once it listens: {"url", "pid"}')
    add_parent_option(parser)
    return parser


def _settings(asked: argparse.Namespace) -> Settings:
    settings = load(asked.config)
    given = {key: value for key in ("host", "port") if (value := getattr(asked, key)) is not None}
    try:
        server_settings = ServerSettings.model_validate(settings.server.model_dump() | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"--{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error
    return settings.model_copy(update={"server": server_settings})


def _log_to_stderr() -> Lines:
    lines = Lines(sys.stderr.buffer)
    structlog.configure(
        wrapper_class=LineLogger,  # type: ignore[arg-type]  # nothing is ever bound
        logger_factory=lambda *names: lines,
        cache_logger_on_first_use=True,
    )
    return lines


class LineLogger:
    """A structlog logger with nothing bound to it, and no processors: a line is made in one step, as a request has
    several."""

    def __init__(self, lines: Lines, processors: object, context: object):
        self._lines = lines

    def info(self, event: str, **told: Any) -> None:
        self._add("info", event, told)

    def warning(self, event: str, **told: Any) -> None:
        self._add("warning", event, told)

    def error(self, event: str, **told: Any) -> None:
        self._add("error", event, told)

    def _add(self, level: str, event: str, told: dict[str, Any]) -> None:
        line = add_request_id(None, level, {"event": event, **told, "level": level, "timestamp": datetime.now(UTC)})
        self._lines.add(orjson.dumps(line, default=repr, option=OPTIONS))


class Lines:
    """Where log lines go, in one write with all others of the same turn of the event loop; without a loop, at once."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._waiting: list[bytes] = []

    def add(self, line: bytes) -> None:
        self._waiting.append(line)
        if len(self._waiting) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self.flush)
        except RuntimeError:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._file.write(b"".join(self._waiting))
            self._file.flush()
            self._waiting.clear()


if __name__ == "__main__":
    sys.exit(main())
