"""`kvrelay up`: start a small worker, a large worker and the gateway, and keep them until Ctrl-C."""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.errors import SettingsError
from tools import family
from tools.family import load_usable
from tools.stack import Stack, StackError, port_is_free, stop_on_signals

DEFAULT_PORT = 8000
MAX_ENDS, WITHIN_S = 5, 600.0  # of workers; more often, something is wrong with them
EXAMPLE = (
    '{"model": "auto", "max_tokens": 40, "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvrelay up", description=__doc__)
    parser.add_argument("--config", type=Path, help="a kvrelay.yaml; without one, the embedded family is served")
    parser.add_argument("--family", help=f"embedded family (default {family.DEFAULT_FAMILY})")
    family.add_engine_option(parser)
    parser.add_argument("--port", type=int, help=f"the gateway's port (default {DEFAULT_PORT})")
    options = parser.parse_args(argv)
    if options.config and (options.family, options.port) != (None, None):
        parser.error("--family and --port go with the embedded family; --config names a file that says both itself")
    stop_on_signals()
    try:
        return _configured(options.config) if options.config else _embedded(options)
    except (StackError, SettingsError, OSError) as error:
        print(f"kvrelay up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0


def _configured(config: Path) -> int:
    stack = _stack(config, family.home() / "run")
    # What the gateway would only tell once its workers have been started is told first.
    with _alone(load_usable(config).server.port) as stack.folder:
        return _serve(stack)


def _embedded(options: argparse.Namespace) -> int:
    """Raises `OSError` where nothing can be kept, before the models are made."""
    name, port = options.family or family.DEFAULT_FAMILY, DEFAULT_PORT if options.port is None else options.port
    _check_port(port)
    with _alone(port) as folder:
        configuration = family.configuration(name, family.prepare(name), port=port, engine=options.engine)
        return _serve(_stack(family.write(configuration, folder / "kvrelay.yaml"), folder))


def _stack(config: Path, folder: Path) -> Stack:
    return Stack(config, family.cluster_secret(family.home() / "secret"), folder)


@contextmanager
def _alone(port: int) -> Iterator[Path]:
    """The folder of the stack with its gateway on this port: of one at a time, as a second one would write over the
    first one's configuration and logs. Raises `StackError` where there is one, though it may not listen yet."""
    folder = family.home() / "run" / str(port)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another kvrelay up has port {port}; stop it, or choose another with --port") from None
        yield folder


def _check_port(port: int) -> None:
    if not 0 < port < 65_536:
        raise StackError(f"--port {port}: a port is a number from 1 to 65535")
    if not port_is_free(port):
        raise StackError(f"port {port} of 127.0.0.1 is taken; stop what listens there, or choose another with --port")


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
    """Start a worker again when it ends by itself; give up when the gateway does, or when it happens too often."""
    ends: deque[float] = deque(maxlen=MAX_ENDS)
    while True:
        ended = stack.wait_for_exit()
        ends.append(now())
        print(f"{ended.name} ended with status {ended.process.returncode}; its log is {ended.log}", file=sys.stderr)
        if ended is stack.gateway:
            return 1
        if len(ends) == MAX_ENDS and ends[-1] - ends[0] < WITHIN_S:
            print(f"kvrelay up: workers ended {MAX_ENDS} times within {WITHIN_S:.0f} s; giving up", file=sys.stderr)
            return 1
        print(f"{ended.name} is started again", file=sys.stderr)
        stack.start_worker(ended.name)


def _welcome(url: str, config: Path) -> str:
    return f"""
kvrelay answers at {url}/v1 (metrics: {url}/metrics). Try:

  curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{EXAMPLE}'

The gateway follows {config} as you edit it. Ctrl-C stops everything."""
