"""`kvrelay up`: start a small worker, a large worker and the gateway, and keep them running until Ctrl-C."""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools import family
from tools.stack import Stack, StackError, port_is_free, stop_on_signals
from workers.api.config import SettingsError

DEFAULT_PORT = 8000
MAX_EXITS, EXIT_WINDOW_S = 5, 600.0  # more worker exits than that are not restarted
EXAMPLE = (
    '{"model": "auto", "max_tokens": 40, "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvrelay up", description=__doc__)
    parser.add_argument("--config", type=Path, help="a kvrelay.yaml; by default an embedded family is served")
    parser.add_argument("--family", help=f"embedded family (default {family.DEFAULT_FAMILY})")
    family.add_engine_option(parser)
    parser.add_argument("--port", type=int, help=f"the gateway's port (default {DEFAULT_PORT})")
    options = parser.parse_args(argv)
    if options.config and (options.family, options.port) != (None, None):
        parser.error("--family and --port cannot be combined with --config, whose file sets both")
    stop_on_signals()
    try:
        return _serve_config(options.config) if options.config else _serve_family(options)
    except (StackError, SettingsError, OSError) as error:
        print(f"kvrelay up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0


def _serve_config(config: Path) -> int:
    stack = _stack(config, family.home() / "run")
    # Check the file now: the gateway would report its errors only after its workers have started.
    with _run_folder(family.load_usable(config).server.port) as stack.folder:
        return _serve(stack)


def _serve_family(options: argparse.Namespace) -> int:
    """Raises `OSError` if the home folder is not writable, before the models are made."""
    name, port = options.family or family.DEFAULT_FAMILY, DEFAULT_PORT if options.port is None else options.port
    if not 0 < port < 65_536:
        raise StackError(f"--port {port}: must be from 1 to 65535")
    if not port_is_free(port):
        raise StackError(f"port {port} of 127.0.0.1 is taken; stop what listens there, or choose another with --port")
    with _run_folder(port) as folder:
        configuration = family.configuration(name, family.prepare(name), port=port, engine=options.engine)
        return _serve(_stack(family.write(configuration, folder / "kvrelay.yaml"), folder))


def _stack(config: Path, folder: Path) -> Stack:
    return Stack(config, family.cluster_secret(family.home() / "secret"), folder)


@contextmanager
def _run_folder(port: int) -> Iterator[Path]:
    """Lock the folder of the stack on this gateway port: a second stack would overwrite its configuration and logs.
    Raises `StackError` if another stack holds it, even one that does not listen yet."""
    folder = family.home() / "run" / str(port)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another kvrelay up has port {port}; stop it, or choose another with --port") from None
        yield folder


def _serve(stack: Stack) -> int:
    print("starting the workers and the gateway", flush=True)
    with stack:
        try:
            stack.wait_ready(lambda line: print(f"  {line}", flush=True))
            print(_welcome(stack.url, stack.config), flush=True)
            return supervise(stack)
        except KeyboardInterrupt:
            print("stopping", flush=True)
            raise


def supervise(stack: Stack, now: Callable[[], float] = time.monotonic) -> int:
    """Restart each worker that exits. Return 1 when the gateway exits, or workers exit too often."""
    exits: deque[float] = deque(maxlen=MAX_EXITS)
    while True:
        child = stack.wait_for_exit()
        exits.append(now())
        print(f"{child.name} ended with status {child.process.returncode}; its log is {child.log}", file=sys.stderr)
        if child is stack.gateway:
            return 1
        if len(exits) == MAX_EXITS and exits[-1] - exits[0] < EXIT_WINDOW_S:
            within = f"{MAX_EXITS} times within {EXIT_WINDOW_S:.0f} s"
            print(f"kvrelay up: workers ended {within}; giving up", file=sys.stderr)
            return 1
        print(f"restarting {child.name}", file=sys.stderr)
        stack.start_worker(child.name)


def _welcome(url: str, config: Path) -> str:
    return f"""
kvrelay answers at {url}/v1 (metrics: {url}/metrics). Try:

  curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{EXAMPLE}'

The gateway follows changes of {config}. Ctrl-C stops everything."""
