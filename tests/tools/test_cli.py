"""The `kvrelay` command hands on, and loads only what it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from tools.cli import GROUP, run


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Commands out of files: one that works, one whose import needs what is not installed, one stopped meanwhile."""
    about = '"""`kvrelay greet`: say hello.\n\nMore of it.\n"""\n'
    (tmp_path / "kvrelay_greet.py").write_text(f"{about}def main(argv):\n    print('hello', *argv)\n    return 3\n")
    (tmp_path / "kvrelay_heavy.py").write_text("import package_that_is_not_installed\n")
    (tmp_path / "kvrelay_slow.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    return [
        EntryPoint("greet", "kvrelay_greet:main", GROUP),
        EntryPoint("heavy", "kvrelay_heavy:main", GROUP),
        EntryPoint("slow", "kvrelay_slow:main", GROUP),
    ]


def test_the_rest_of_the_line_goes_to_the_command(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["greet", "--loud", "you"], commands) == 3
    assert capsys.readouterr().out == "hello --loud you\n"
    assert "kvrelay_heavy" not in sys.modules, "other commands are not even imported"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(
    argv: list[str], commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv, commands) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[4:6] == ["  greet  say hello", "  heavy"]


def test_help_says_a_line_of_each_command_and_loads_none() -> None:
    code = "import sys; from tools.cli import main; main(['help']); sys.exit('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = dict(re.findall(r"^  (\w+) +(.+)$", told, re.MULTILINE))
    assert set(lines) == set(entry_points(group=GROUP).names)
    assert all(len(line) > 15 for line in lines.values())


def test_nothing_asked_is_a_question(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], commands) == 2
    assert "greet" in capsys.readouterr().err


def test_an_unknown_command_names_the_known(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gret"], commands) == 2
    assert "unknown command 'gret'; known: greet, heavy, slow" in capsys.readouterr().err


def test_a_command_that_needs_an_extra_says_which(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["heavy"], commands) == 1
    assert "package_that_is_not_installed is not installed; try: pip install" in capsys.readouterr().err


def test_a_command_that_is_stopped_while_it_loads_ends_in_a_line(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slow"], commands) == 130
    assert capsys.readouterr().err == "kvrelay slow: interrupted\n"
