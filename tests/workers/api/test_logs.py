"""Log lines are JSON, carry the request id, and never hold a prompt; a full disk loses lines only."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from workers.api.logs import LibraryLogHandler, configure_logs, request_id

PROMPT = "my secret prompt"


class Pipe(io.BytesIO):
    """A file whose writes fail while it is `full`."""

    full = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(data)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe, handlers = Pipe(), list(logging.root.handlers)
    configure_logs(pipe)
    structlog.configure(cache_logger_on_first_use=False)  # module-level loggers would keep this pipe
    try:
        yield pipe
    finally:
        structlog.reset_defaults()
        logging.root.handlers[:] = handlers


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_log_line_is_json(pipe: Pipe, level: str) -> None:
    getattr(structlog.get_logger(), level)("it_happened", worker="small-0", odd={1}, by_id={1: 2})
    (line,) = pipe.lines
    assert (line["event"], line["level"], line["worker"], line["odd"]) == ("it_happened", level, "small-0", "{1}")
    assert line["by_id"] == {"1": 2} and line["timestamp"].endswith("Z")


def test_log_line_holds_request_id(pipe: Pipe) -> None:
    token = request_id.set("mine-1")
    try:
        structlog.get_logger().info("it_happened")
        structlog.get_logger().info("it_happened", request_id="another")
    finally:
        request_id.reset(token)
    assert [line["request_id"] for line in pipe.lines] == ["mine-1", "another"]


def test_full_disk_loses_lines_only(pipe: Pipe) -> None:
    log = structlog.get_logger()
    pipe.full = True
    log.info("lost")
    pipe.full = False
    log.info("written")
    assert [line["event"] for line in pipe.lines] == ["written"]


def test_line_from_another_thread_is_written(pipe: Pipe) -> None:
    thread = threading.Thread(target=structlog.get_logger().info, args=["from a thread"])
    thread.start()
    thread.join()
    assert [line["event"] for line in pipe.lines] == ["from a thread"]


def test_library_warning_is_a_json_line(pipe: Pipe) -> None:
    logging.getLogger("httpx").warning("retrying %s", PROMPT)
    (line,) = pipe.lines
    assert (line["event"], line["logger"], line["message"]) == ("library_log", "httpx", "retrying %s")


def test_exception_is_logged_without_its_message(pipe: Pipe) -> None:
    try:
        raise ValueError(PROMPT)
    except ValueError:
        structlog.get_logger().exception("it_failed")
    (line,) = pipe.lines
    assert (line["event"], line["level"], line["error"]) == ("it_failed", "error", "ValueError")
    assert line["traceback"] and PROMPT not in json.dumps(line).replace("raise ValueError(PROMPT)", "")


def bug() -> ValueError:
    try:
        raise ValueError(PROMPT)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("name", "message", "values", "expected"),
    [
        ("uvicorn.error", "ASGI callable should return None, but returned '%s'.", (PROMPT,), None),
        ("uvicorn.error", "Exception in ASGI application\n", (), "Exception in ASGI application"),
        ("asyncio", f"Task exception was never retrieved\nfuture: <Task exception={PROMPT}>", (), None),
        ("uvicorn.error", bug(), (), "ValueError"),
        ("workers.engines.scheduling", "a round of %d answers failed", (3,), "a round of 3 answers failed"),
    ],
)
@pytest.mark.parametrize("has_failed", [False, True])
def test_library_message_never_holds_a_prompt(
    name: str, message: Any, values: tuple[Any, ...], expected: str | None, has_failed: bool
) -> None:
    log, forwarding = logging.getLogger(name), LibraryLogHandler()
    log.addHandler(forwarding)
    try:
        with capture_logs() as lines:
            log.error(message, *values, exc_info=bug() if has_failed else None)
    finally:
        log.removeHandler(forwarding)
    (line,) = lines
    assert (line["event"], line["log_level"], line["logger"]) == ("library_log", "error", name)
    assert line["message"] == (expected or message.splitlines()[0])
    assert line.get("error") == ("ValueError" if has_failed else None)
    assert PROMPT not in str(line)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_library_level_is_kept(level: str) -> None:
    with capture_logs() as lines:
        LibraryLogHandler().emit(logging.LogRecord("a", logging.getLevelName(level.upper()), "", 0, "b", (), None))
    assert [line["log_level"] for line in lines] == [level]


def test_record_that_cannot_be_formatted_is_dropped() -> None:
    forwarding = LibraryLogHandler()
    forwarding.emit(logging.LogRecord("workers.x", logging.WARNING, "", 0, "%d tokens", ("many",), None))
