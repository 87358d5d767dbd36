from __future__ import annotations

from pathlib import Path

import pytest

from mappers.commands.common import resumable, run
from mappers.errors import DataUnreadable

FULL = OSError(28, "No space left on device", "/x")


@pytest.mark.parametrize(
    ("raised", "status", "output"),
    [
        (None, 0, ""),
        (DataUnreadable("cannot read x"), 1, "kvrelay fit: cannot read x\n"),
        (FULL, 1, "kvrelay fit: [Errno 28] No space left on device: '/x'\n"),
        (KeyboardInterrupt(), 130, "kvrelay fit: interrupted\n"),
    ],
)
def test_user_errors_print_one_line_and_set_the_status(
    capsys: pytest.CaptureFixture[str], raised: BaseException | None, status: int, output: str
) -> None:
    assert run("fit", lambda: _raise(raised)) == status
    assert capsys.readouterr().err == output


def test_other_errors_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        run("fit", lambda: _raise(ZeroDivisionError()))


def test_an_interrupt_names_the_file_to_resume_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with resumable(file):
            raise KeyboardInterrupt

    file = tmp_path / "file"
    assert run("eval", work) == 130
    assert capsys.readouterr().err == "kvrelay eval: interrupted; nothing was saved\n"
    file.touch()
    assert run("eval", work) == 130
    assert capsys.readouterr().err == f"kvrelay eval: interrupted; the same command resumes from {file}\n"


def _raise(error: BaseException | None) -> None:
    if error:
        raise error
