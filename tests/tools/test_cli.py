"""The `kvrelay` command dispatches, and imports only the command that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest

from tools.cli import GROUP, run


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Commands from files: one works, one imports a missing package, one is interrupted during its import."""
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


def test_arguments_are_passed_to_the_command(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
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


def test_help_summarises_every_command_without_importing_it() -> None:
    code = "import sys; from tools.cli import main; main(['help']); sys.exit('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = dict(re.findall(r"^  (\w+) +(.+)$", out, re.MULTILINE))
    assert set(lines) == set(entry_points(group=GROUP).names)
    assert all(len(line) > 15 for line in lines.values())


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], []) == 0
    assert capsys.readouterr().out == f"kvrelay {version('kvrelay')}\n"


def test_no_command_prints_usage(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], commands) == 2
    assert "greet" in capsys.readouterr().err


def test_unknown_command_lists_known_ones(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gret"], commands) == 2
    assert "unknown command 'gret'; known: greet, heavy, slow" in capsys.readouterr().err


def test_missing_extra_is_named(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heavy"], commands) == 1
    assert "package_that_is_not_installed is not installed; try: pip install" in capsys.readouterr().err


def test_interrupt_during_import_is_one_line(commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["slow"], commands) == 130
    assert capsys.readouterr().err == "kvrelay slow: interrupted\n"
