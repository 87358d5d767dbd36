"""The stack that most gateway tests use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.stack import Stack, in_process


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process() as stack:
        yield stack
