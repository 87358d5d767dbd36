"""`kvrelay worker`: run one worker of kvrelay.yaml until SIGTERM or SIGINT.

    kvrelay worker --config kvrelay.yaml --worker small-0

The cluster secret is read from the file that KVRELAY_SECRET_FILE names.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from workers.api.addresses import http_address
from workers.api.config import SettingsError
from workers.api.process import ParentExited, ParentWatchError, add_parent_option, die_with_parent, hide_progress_bars
from workers.settings import WorkerSettings, first_problem, read_secret, read_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after an orderly stop, 2 for settings that cannot be used."""
    options = _parser().parse_args(argv)
    if options.die_with_parent is not None:
        _follow(options.die_with_parent)
    hide_progress_bars()
    try:
        settings, secret = _settings(options), read_secret()
        gc.disable()  # no import is garbage, and looking for some takes a fifth of the start
        from workers.process import serve  # loads torch

        gc.freeze()
        gc.enable()
        return serve(settings, secret, ready_file=options.ready_file)
    except SettingsError as error:
        print(f"kvrelay worker: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay worker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("kvrelay.yaml"), help="default %(default)s")
    parser.add_argument("--worker", required=True, metavar="ID", help="which of the file's workers to run")
    parser.add_argument("--host", help="address to bind, instead of the file's")
    parser.add_argument("--port", type=int, help="port to bind, instead of the file's; 0 picks a free one")
    parser.add_argument(
        "--peer", action="append", default=[], type=_peer, metavar="ID=URL", help="another worker; may be repeated"
    )
    parser.add_argument("--ready-file", type=Path, help='written when ready: {"url": ..., "pid": ...}')
    add_parent_option(parser)
    return parser


def _peer(text: str) -> tuple[str, str]:
    worker_id, _, url = text.partition("=")
    if not worker_id:
        raise argparse.ArgumentTypeError(f"{text!r} is not like small-0=http://127.0.0.1:8101")
    try:
        http_address(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}, as in small-0=http://127.0.0.1:8101") from error
    return worker_id, url


def _settings(options: argparse.Namespace) -> WorkerSettings:
    settings = read_settings(options.config, options.worker, peers=dict(options.peer))
    given = {name: getattr(options, name) for name in ("host", "port") if getattr(options, name) is not None}
    try:
        return WorkerSettings.model_validate(settings.model_dump(exclude_unset=True) | given)
    except ValidationError as error:
        raise SettingsError(f"--{first_problem(error)}") from error


def _follow(parent: int) -> None:
    try:
        die_with_parent(parent)
    except ParentExited:
        sys.exit("kvrelay worker: the starting process has ended")
    except ParentWatchError as error:
        sys.exit(f"kvrelay worker: {error}")


if __name__ == "__main__":
    sys.exit(main())
