"""How deep a request lies: the frames of our own code between the ASGI server and the HTTP client of the worker."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tests.gateway.stack import in_process
from tools.fake_worker import FakeWorker

ROOT = Path(__file__).parents[2]
OURS = ("gateway", "workers")
MAX_FRAMES = 12


class Recorder(httpx.AsyncBaseTransport):
    """Passes calls on to a fake worker, and keeps the stack of the first chat."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self._inner = httpx.ASGITransport(FakeWorker("large-0", "fake-large"))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/chat/completions") and not self.frames:
            self.frames = list(own_frames(inspect.currentframe()))
        return await self._inner.handle_async_request(request)


def own_frames(frame: FrameType | None) -> Any:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
            yield f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}"
        frame = frame.f_back


async def test_a_request_goes_through_few_frames() -> None:
    large = Recorder()
    async with in_process({"large-0": large}) as stack:
        assert (await stack.chat(model="large")).status_code == 200
    assert 0 < len(large.frames) <= MAX_FRAMES, "\n".join(large.frames)
