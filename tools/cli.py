"""The `kvrelay` command: runs the commands that installed packages register.

A command is an entry point of the group `kvrelay.commands`: `main(argv) -> exit status`. Its module is imported only
when it runs, so that commands without torch never import it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from workers.api.process import hide_progress_bars

GROUP = "kvrelay.commands"
USAGE, INTERRUPTED = 2, 130  # exit statuses, as in a shell


def main(argv: Sequence[str] | None = None) -> int:
    hide_progress_bars()
    return run(sys.argv[1:] if argv is None else argv, entry_points(group=GROUP))


def run(argv: Sequence[str], commands: Iterable[EntryPoint]) -> int:
    """Run command `argv[0]` with the remaining arguments and return its exit status, or 2 for an unknown command."""
    by_name = {command.name: command for command in commands}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(by_name.values()), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else USAGE
    if argv[0] == "--version":
        print(f"kvrelay {version('kvrelay')}")
        return 0
    command = by_name.get(argv[0])
    if command is None:
        print(f"kvrelay: unknown command {argv[0]!r}; known: {', '.join(sorted(by_name))}", file=sys.stderr)
        return USAGE
    try:
        function = command.load()
    except ModuleNotFoundError as error:
        advice = f"{error.name} is not installed; try: pip install 'kvrelay[worker]'"
        print(f"kvrelay {command.name}: {advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the imports of a command may take seconds
        print(f"kvrelay {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return int(function(list(argv[1:])) or 0)


def _help(commands: Iterable[EntryPoint]) -> str:
    listed = sorted(commands, key=lambda command: command.name)
    width = max((len(command.name) for command in listed), default=0)
    lines = [f"  {command.name:{width}}  {_summary(command)}".rstrip() for command in listed]
    usage = ["usage: kvrelay COMMAND [ARGUMENT ...]", "       kvrelay --version", "", "commands:"]
    return "\n".join([*usage, *lines, "", "kvrelay COMMAND --help describes one command."])


def _summary(command: EntryPoint) -> str:
    """Return the first line of the module's docstring. It is parsed from the file: importing could take seconds."""
    package, *below = command.module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent.joinpath(*below).with_suffix(".py") if below else Path(spec.origin)
    docstring = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    summary = (docstring or "").partition("\n")[0].rpartition("`: ")[2].rstrip(".")
    return summary[:1].lower() + summary[1:]


if __name__ == "__main__":
    sys.exit(main())
