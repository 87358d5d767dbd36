"""How a command ends, whatever ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from workers.api.errors import KvrelayError

FAILED = 2
STOPPED, UNHEARD = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # as a shell has them


def run(command: str, work: Callable[[], int], *mendable: type[Exception]) -> int:
    """The status that `work` gives; 2, and a line, where something failed that the user can mend (besides `mendable`
    what is in the way of reading and writing); 130 where it was stopped, 141 where nobody reads what it prints."""
    told_in_a_line: tuple[type[Exception], ...] = (KvrelayError, OSError, *mendable)
    try:
        status = work()
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        _give_up_output()
        return UNHEARD
    except told_in_a_line as error:
        _give_up_output()
        print(f"{command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


def _give_up_output() -> None:
    """What could not be printed goes nowhere: the interpreter would try again when it ends, and complain."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
