"""What libraries log becomes lines of ours, without what may repeat a prompt."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from structlog.testing import capture_logs

from workers.api.logs import LibraryLogHandler

PROMPT = "my secret prompt"


def bug() -> ValueError:
    try:
        raise ValueError(PROMPT)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("name", "message", "values", "said"),
    [
        ("uvicorn.error", "ASGI callable should return None, but returned '%s'.", (PROMPT,), None),
        ("uvicorn.error", "Exception in ASGI application\n", (), "Exception in ASGI application"),
        ("asyncio", f"Task exception was never retrieved\nfuture: <Task exception={PROMPT}>", (), None),
        ("uvicorn.error", bug(), (), "ValueError"),
        ("workers.engines.rounds", "a round of %d answers failed", (3,), "a round of 3 answers failed"),
    ],
)
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_line_tells_what_happened_and_no_words_of_a_prompt(
    name: str, message: Any, values: tuple[Any, ...], said: str | None, has_failed: bool
) -> None:
    log, forwarding = logging.getLogger(name), LibraryLogHandler()
    log.addHandler(forwarding)
    try:
        with capture_logs() as lines:
            log.error(message, *values, exc_info=bug() if has_failed else None)
    finally:
        log.removeHandler(forwarding)
    (line,) = lines
    assert (line["event"], line["log_level"], line["logger"]) == ("logged", "error", name)
    assert line["said"] == (said or message.splitlines()[0])
    assert line.get("error") == ("ValueError" if has_failed else None)
    assert PROMPT not in str(line)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_the_level_is_kept(level: str) -> None:
    with capture_logs() as lines:
        LibraryLogHandler().emit(logging.LogRecord("a", logging.getLevelName(level.upper()), "", 0, "b", (), None))
    assert [line["log_level"] for line in lines] == [level]


def test_a_line_that_cannot_be_told_harms_nobody() -> None:
    forwarding = LibraryLogHandler()
    forwarding.emit(logging.LogRecord("workers.x", logging.WARNING, "", 0, "%d tokens", ("many",), None))
