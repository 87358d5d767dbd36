"""`workers.reference` as a child process, since it needs torch: says whether an answer holds the right tokens."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from types import TracebackType

import orjson

from tools.soak.client import Exchange
from tools.stack import StackError

LINE_LIMIT = 2**24  # bytes


class Oracle:
    """One question at a time; who asks meanwhile waits. Once an asker was cancelled, it is of no more use. An async
    context manager. Raises `StackError` where it ends early, and `TimeoutError` where it does not answer."""

    def __init__(self, folders: Mapping[str, str], *, threads: int, timeout_s: float = 600.0):
        options = {"small": folders["small"], "large": folders["large"], "bundle": folders["bundle"]}
        self._arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._arguments += ["--threads", str(threads)]
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Oracle:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "workers.reference", *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": self._arguments[-1]},
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        try:
            await self._line()  # it has its models
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def wrong(self, exchange: Exchange) -> str | None:
        """What is wrong with the answer's tokens; None if nothing is."""
        question = {
            "tier": exchange.told["tier"],
            "messages": exchange.ask.messages,
            "mapped_tokens": exchange.mapped_tokens,
            "max_tokens": exchange.ask.body["max_tokens"],
            "body": exchange.completion,
        }
        async with self._turn:
            assert self._process.stdin
            self._process.stdin.write(orjson.dumps(question) + b"\n")
            reply = await self._line()
        wrong: str | None = orjson.loads(reply)["wrong"]
        return wrong

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _line(self) -> bytes:
        assert self._process.stdout
        async with asyncio.timeout(self._timeout_s):
            reply = await self._process.stdout.readline()
        if not reply:
            raise StackError("the oracle ended early; run `python -m workers.reference` by hand to see why")
        return reply
