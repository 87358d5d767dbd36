"""Discovery: workers join, leave and restart by their heartbeats, and only signed beats count."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.app import create_app
from gateway.settings import from_values
from tests.gateway.redis_process import RedisProcess, redis_process
from tests.gateway.stack import MESSAGES, Stack, eventually, in_process, report, right_answer, text, values
from tools.fake_worker import FAKE_SECRET, FakeWorker
from workers.api.config import SettingsError, with_password
from workers.api.heartbeat import KEY, MAX_AGE_S, Board, Heartbeat, LiveWorkers
from workers.api.tasks import repeating

BEAT_S, LOST_AFTER_S = 0.05, 2.0


def beat(**changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {"worker": "large-0", "tier": "large", "url": "http://large-0", "epoch": "e1"}
    return Heartbeat(**fields | {"at": time.time()} | changes)


@pytest.mark.parametrize(
    ("signed", "counts"),
    [
        (lambda: beat().signed(FAKE_SECRET), True),
        (lambda: beat().signed("another secret"), False),
        (lambda: beat(at=time.time() - MAX_AGE_S - 60).signed(FAKE_SECRET), False),
        (lambda: beat().signed(FAKE_SECRET).replace("http://large-0", "http://evil-0"), False),
        (lambda: "{}", False),
        (lambda: "no JSON", False),
        (lambda: "[" * 100_000, False),
        (lambda: json.dumps({"beat": beat().model_dump(), "signature": "\ud800"}), False),
    ],
)
def test_only_fresh_signed_beats_count(signed: Callable[[], str], counts: bool) -> None:
    read = Heartbeat.parse(signed(), FAKE_SECRET)
    assert (read is not None and not read.is_stale) is counts


async def test_board_deletes_stale_beats(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        ours, theirs, raw = Board(redis.url, FAKE_SECRET), Board(redis.url, "another secret"), Redis.from_url(redis.url)
        long_ago = time.time() - MAX_AGE_S - 60
        for board, name in ((ours, "gone"), (theirs, "another-clusters")):
            await board.put(beat(worker=name, at=long_ago))
        await ours.put(beat())
        assert [one.worker for one in await ours.read()] == ["large-0"]
        assert sorted(await raw.hkeys(KEY)) == [b"another-clusters", b"large-0"]
        for client in (ours, theirs, raw):
            await client.aclose()


def test_worker_is_live_while_it_beats() -> None:
    living, first, later = LiveWorkers(4.0), beat(at=1.0), beat(at=2.0)
    for now in (100.0, 101.0, 102.0, 103.0):
        assert living.update([first], now) == {"large-0": first}, "the last beat of the worker"
    for now in (103.5, 104.5, 105.5, 106.5):
        assert living.update([later], now) == {"large-0": later}
    assert living.update([first], 107.4) == {"large-0": later}, "a replayed earlier beat is ignored"
    assert living.update([first], 107.5) == {}


def test_lost_worker_stays_lost_while_its_beat_is_on_the_board() -> None:
    living, last = LiveWorkers(4.0), beat(at=1.0)
    seen = ["large-0" in living.update([last], float(now)) for now in range(100, 120)]
    assert seen == [True] * 4 + [False] * 16
    again = beat(at=2.0)
    assert living.update([again], 120.0) == {"large-0": again}


def test_pause_without_updates_loses_no_worker() -> None:
    living, first = LiveWorkers(4.0), beat(at=1.0)
    living.update([first], 100.0)
    for now in (700.0, 701.0, 702.0):
        assert living.update([], now) == {"large-0": first}
    assert living.update([], 703.0) == {}


@asynccontextmanager
async def discovering_stack(redis: RedisProcess, **changes: str) -> AsyncIterator[tuple[Stack, Board]]:
    """A stack with only its small worker configured, and the board for heartbeats."""
    workers = {"small-0": {"tier": "small", "url": "http://small-0"}}
    discovery = {"url": redis.url, "beat_s": BEAT_S, "lost_after_s": LOST_AFTER_S} | changes
    board = Board(redis.url, FAKE_SECRET)
    async with in_process(workers=workers, discovery=discovery) as stack:
        yield stack, board
    await board.aclose()


@asynccontextmanager
async def beating(board: Board, worker: FakeWorker) -> AsyncIterator[None]:
    """Send the heartbeats of a worker while Redis accepts them."""

    async def beat_once() -> None:
        with suppress(RedisError):
            await board.put(beat(epoch=worker.pool.epoch))

    async with repeating(beat_once, BEAT_S):
        yield


def is_there(stack: Stack) -> bool:
    return "large-0" in stack.app.state.gateway.parts.fleet.tiers["large"].workers


async def test_worker_joins_restarts_and_leaves(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        async with discovering_stack(redis) as (stack, board):
            assert report(await stack.escalate())["path"] == "fallback:large_no_usable_worker", "small replaces it"
            forger = Board(redis.url, "another secret")
            await forger.put(beat(worker="large-9"))
            await forger.aclose()
            await board.put(beat(worker="huge-0", tier="huge"))
            async with beating(board, stack.large):
                await eventually(lambda: is_there(stack), within_s=20)
                reply = await stack.escalate()
                assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "mapped")
                assert sorted(stack.app.state.gateway.settings.workers) == ["large-0", "small-0"]
                stack.large.restart()
                restarts = partial(stack.metric, "worker_restarts_total", target="large-0")
                await eventually(lambda: restarts() == 1, within_s=20)
            await eventually(lambda: not is_there(stack), within_s=20)
            metrics = stack.app.state.gateway.metrics
            await eventually(lambda: b'target="large-0"' not in metrics.render(), within_s=20)


async def test_password_comes_from_a_file(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    password, path = "of sixteen and more characters", tmp_path / "password"
    path.write_text(f"{password}\n")
    path.chmod(0o600)
    with redis_process(require_tool("redis-server"), tmp_path, "--requirepass", password) as redis:
        board = Board(with_password(redis.url, password), FAKE_SECRET)
        async with discovering_stack(redis, password_file=str(path)) as (stack, _), beating(board, stack.large):
            await eventually(lambda: is_there(stack), within_s=20)
        await board.aclose()
    unusable = values(discovery={"url": "redis://h", "password_file": str(tmp_path / "nowhere")})
    with pytest.raises(SettingsError, match=r"^discovery\.password_file: cannot read .*nowhere"):
        create_app(from_values(unusable), FAKE_SECRET)


async def test_lost_redis_loses_no_worker(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        async with discovering_stack(redis) as (stack, board), beating(board, stack.large):
            await eventually(lambda: is_there(stack), within_s=20)
            redis.kill()
            failed = partial(stack.metric, "registry_ops_total", op="heartbeats", result="error")
            await eventually(lambda: failed() >= 3, within_s=20)
            await asyncio.sleep(LOST_AFTER_S + 0.5)
            assert report(await stack.escalate())["tier"] == "large"


def test_tier_requires_a_worker_without_discovery() -> None:
    workers = {"small-0": {"tier": "small", "url": "http://small-0"}}
    with pytest.raises(SettingsError, match="tier 'large' has no worker"):
        from_values(values(workers=workers))
    with pytest.raises(SettingsError, match=r"discovery.url: must be a URL .*redis://"):
        from_values(values(workers=workers, discovery={"url": "memory://"}))
