"""The official OpenAI client for JavaScript, against a real server. Runs `js/acceptance.test.js` with node."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.stack import MESSAGES, eventually, live_stack, right_answer
from tools.fake_worker import FakeWorker
from workers.api.errors import Overloaded

pytestmark = pytest.mark.slow

SUITE = Path(__file__).parent / "js"
KEYS = {"default": "key-of-default", "limited": "key-of-limited"}
HASHES = {name: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}
TENANTS = HASHES | {"limited": HASHES["limited"] | {"models": ["small"], "requests_per_minute": 1}}
TIERS = [{"name": name, "model": f"fake-{name}"} for name in ("small", "broken", "slow", "large")]
RUN_S = 60


async def test_the_javascript_acceptance_suite_passes(require_tool: Callable[[str], str]) -> None:
    broken = FakeWorker("broken-0", "fake-broken", cut_after=3)
    slow = FakeWorker("slow-0", "fake-slow", token_s=0.3)
    node = require_tool("node")
    async with live_stack(broken, slow, tiers=TIERS, tenants=TENANTS) as stack:
        stack.large.fail("complete", Overloaded("full", retry_after_s=3))
        answers = {worker.name[:5]: right_answer(worker, MESSAGES) for worker in (stack.small, stack.large)}
        parameters = {"url": stack.url, "keys": KEYS, "messages": MESSAGES, "answers": answers}
        process = await asyncio.create_subprocess_exec(
            node,
            "--test",
            "--test-reporter=tap",
            SUITE / "acceptance.test.js",
            env=os.environ | {"KVRELAY_ACCEPTANCE": json.dumps(parameters)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), RUN_S)
        assert process.returncode == 0, output.decode()
        await eventually(lambda: slow.num_disconnects == 2)
