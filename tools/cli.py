"""The `kvrelay` command: hands on to the commands that the installed packages register.

A command is an entry point of the group `kvrelay.commands`: `main(argv) -> exit status`. Its module is imported only
when it runs, so that commands without torch never import it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from workers.api.process import hide_progress_bars

GROUP = "kvrelay.commands"
USAGE, INTERRUPTED = 2, 130  # as a shell has them


def main(argv: Sequence[str] | None = None) -> int:
    hide_progress_bars()
    return run(sys.argv[1:] if argv is None else argv, entry_points(group=GROUP))


def run(argv: Sequence[str], commands: Iterable[EntryPoint]) -> int:
    """Runs `argv[0]` with the rest. Returns its exit status, or 2 for a command that there is not."""
    by_name = {command.name: command for command in commands}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(by_name.values()), file=sys.stdout if argv else sys.stderr)
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
    except KeyboardInterrupt:  # what a command needs may take seconds to import
        print(f"kvrelay {command.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return int(function(list(argv[1:])) or 0)


def _help(commands: Iterable[EntryPoint]) -> str:
    listed = sorted(commands, key=lambda command: command.name)
    width = max((len(command.name) for command in listed), default=0)
    lines = [f"  {command.name:{width}}  {_about(command)}".rstrip() for command in listed]
    usage = ["usage: kvrelay COMMAND [ARGUMENT ...]", "", "commands:"]
    return "\n".join([*usage, *lines, "", "kvrelay COMMAND --help tells more of one."])


def _about(command: EntryPoint) -> str:
    """The first line of its module's docstring, read from the file: an import would cost seconds, for some."""
    package, *below = command.module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent.joinpath(*below).with_suffix(".py") if below else Path(spec.origin)
    about = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else None
    told = (about or "").partition("\n")[0].rpartition("`: ")[2].rstrip(".")
    return told[:1].lower() + told[1:]


if __name__ == "__main__":
    sys.exit(main())
