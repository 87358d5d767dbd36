"""How the gateway's log lines are made and written."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest

from gateway.log_lines import LineLogger, Lines

LEVELS = ("info", "warning", "error")


class Pipe(io.BytesIO):
    """A file whose writes are counted, and fail while it is `full`."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.num_writes = False, 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.full:
            raise OSError(28, "No space left on device")
        self.num_writes += 1
        return super().write(data)

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.getvalue().splitlines()]


@pytest.mark.parametrize("level", LEVELS)
def test_a_line_is_json_and_out_at_once_where_no_loop_runs(level: str) -> None:
    pipe = Pipe()
    getattr(LineLogger(Lines(pipe), None, None), level)("it_happened", worker="small-0", odd={1})
    line = json.loads(pipe.getvalue())
    assert (line["event"], line["level"], line["worker"], line["odd"]) == ("it_happened", level, "small-0", "{1}")
    assert line["timestamp"].endswith("Z")


async def test_lines_of_one_turn_of_the_loop_are_one_write() -> None:
    pipe = Pipe()
    log = LineLogger(Lines(pipe), None, None)
    for event in ("a", "b", "c"):
        log.info(event)
    assert not pipe.num_writes
    await asyncio.sleep(0)
    assert (pipe.events, pipe.num_writes) == (["a", "b", "c"], 1)


async def test_at_the_end_what_still_waits_is_written() -> None:
    pipe = Pipe()
    lines = Lines(pipe)
    LineLogger(lines, None, None).info("last")
    lines.flush()
    await asyncio.sleep(0)
    assert (pipe.events, pipe.num_writes) == (["last"], 1)


async def test_what_cannot_be_written_is_lost_and_nothing_else() -> None:
    pipe = Pipe()
    log = LineLogger(Lines(pipe), None, None)
    pipe.full = True
    log.info("lost")
    await asyncio.sleep(0)
    pipe.full = False
    log.info("written")
    await asyncio.sleep(0)
    assert pipe.events == ["written"]


async def test_a_line_from_another_thread_is_out_at_once_whatever_waits() -> None:
    pipe = Pipe()
    log = LineLogger(Lines(pipe), None, None)
    log.info("waits")
    thread = threading.Thread(target=log.info, args=["from a thread"])
    thread.start()
    thread.join()
    assert pipe.events == ["from a thread"]
    await asyncio.sleep(0)
    assert pipe.events == ["from a thread", "waits"]
