from __future__ import annotations

from pathlib import Path

import pytest

from mappers.commands.common import resumable, run
from mappers.errors import DataUnreadable

FULL = OSError(28, "No space left on device", "/x")


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (None, 0, ""),
        (DataUnreadable("cannot read x"), 1, "kvrelay fit: cannot read x\n"),
        (FULL, 1, "kvrelay fit: [Errno 28] No space left on device: '/x'\n"),
        (KeyboardInterrupt(), 130, "kvrelay fit: interrupted\n"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], raised: BaseException | None, status: int, told: str
) -> None:
    assert run("fit", lambda: _raise(raised)) == status
    assert capsys.readouterr().err == told


def test_a_bug_is_no_such_line() -> None:
    with pytest.raises(ZeroDivisionError):
        run("fit", lambda: _raise(ZeroDivisionError()))


def test_an_interrupt_tells_what_the_next_run_goes_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with resumable(kept):
            raise KeyboardInterrupt

    kept = tmp_path / "kept"
    assert run("eval", work) == 130
    assert capsys.readouterr().err == "kvrelay eval: interrupted; nothing was saved\n"
    kept.touch()
    assert run("eval", work) == 130
    assert capsys.readouterr().err == f"kvrelay eval: interrupted; the same command resumes from {kept}\n"


def _raise(error: BaseException | None) -> None:
    if error:
        raise error
