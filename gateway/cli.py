"""The `kvrelay` command: hands on to the commands that the installed packages register.

A command is an entry point of the group `kvrelay.commands`: `main(argv) -> exit status`. Its module is imported only
when it runs, so that commands without torch never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

GROUP = "kvrelay.commands"
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    return run(sys.argv[1:] if argv is None else argv, entry_points(group=GROUP))


def run(argv: Sequence[str], commands: Iterable[EntryPoint]) -> int:
    """Runs `argv[0]` with the rest. Returns its exit status, or 2 for a command that there is not."""
    by_name = {command.name: command for command in commands}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(by_name), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else USAGE
    command = by_name.get(argv[0])
    if command is None:
        print(f"kvrelay: unknown command {argv[0]!r}; known: {', '.join(sorted(by_name))}", file=sys.stderr)
        return USAGE
    try:
        function = command.load()
    except ModuleNotFoundError as error:
        told = f"{error.name} is not installed; try: pip install 'kvrelay[worker]'"
        print(f"kvrelay {command.name}: {told}", file=sys.stderr)
        return 1
    return int(function(list(argv[1:])) or 0)


def _help(commands: Iterable[str]) -> str:
    lines = ["usage: kvrelay COMMAND [ARGUMENT ...]", "", "commands:", *(f"  {name}" for name in sorted(commands))]
    return "\n".join([*lines, "", "kvrelay COMMAND --help tells more of one."])


if __name__ == "__main__":
    sys.exit(main())
