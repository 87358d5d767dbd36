"""Rounds: who is in them, in which order, and what happens to those who leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from workers.engines.scheduling import Batcher


class Table:
    """Steps that last until they are let go; tells each row its double."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []
        self.priorities: list[int] = []
        self.going = asyncio.Event()
        self.going.set()
        self.error: Exception | None = None
        self.poison: int | None = None
        self.wrong: dict[int, Exception] = {}

    async def run(self, rows: Sequence[int], priority: int) -> list[int | Exception]:
        self.rounds.append(list(rows))
        self.priorities.append(priority)
        await asyncio.shield(asyncio.ensure_future(self.going.wait()))
        if self.error is not None:
            raise self.error
        if self.poison in rows:
            raise RuntimeError(f"{self.poison} spoils the step")
        return [self.wrong.get(row, 2 * row) for row in rows]


@pytest.fixture
def table() -> Table:
    return Table()


async def test_answers_that_go_on_together_share_every_round(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=4)

    async def answer(first: int) -> int:
        token = first
        for _ in range(3):
            token = await rounds.join(token)
        return token

    assert await asyncio.gather(*(answer(n) for n in (1, 10, 100))) == [8, 80, 800]
    assert table.rounds == [[1, 10, 100], [2, 20, 200], [4, 40, 400]]


async def test_whoever_comes_during_a_round_joins_the_next(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=4)

    async def answer() -> None:
        await rounds.join(1)
        await rounds.join(2)

    table.going.clear()
    first = asyncio.create_task(answer())
    await asyncio.sleep(0.01)
    late = asyncio.create_task(rounds.join(7))
    await asyncio.sleep(0.01)
    table.going.set()
    await asyncio.gather(first, late)
    assert table.rounds in ([[1], [7, 2]], [[1], [2, 7]])


async def test_more_than_fit_take_turns_and_the_urgent_go_first(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=2)
    table.going.clear()
    joined = [asyncio.create_task(rounds.join(n, priority=priority)) for n, priority in enumerate((0, 0, 0, 5, -10))]
    await asyncio.sleep(0.01)
    table.going.set()
    assert await asyncio.gather(*joined) == [0, 2, 4, 6, 8]
    assert table.rounds == [[3, 0], [1, 2], [4]]
    assert table.priorities == [5, 0, -10]


async def test_who_leaves_before_the_round_is_not_in_it(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=1)
    table.going.clear()
    running, leaving = (asyncio.create_task(rounds.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait([leaving])
    table.going.set()
    assert await running == 2 and leaving.cancelled() and table.rounds == [[1]]


async def test_who_leaves_during_the_round_waits_it_out_and_spoils_nothing(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=2)
    table.going.clear()
    staying, leaving = (asyncio.create_task(rounds.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    for _ in range(2):
        leaving.cancel()
        await asyncio.sleep(0.01)
    assert not leaving.done()  # its memory is being written to
    table.going.set()
    await asyncio.wait([leaving])
    assert leaving.cancelled() and await staying == 2


async def test_a_step_that_fails_fails_its_rows_and_no_others(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=2)
    table.error = RuntimeError("planted")
    told = await asyncio.gather(rounds.join(1), rounds.join(2), return_exceptions=True)
    assert [str(error) for error in told] == ["planted", "planted"]
    table.error = None
    assert await rounds.join(3) == 6


async def test_what_goes_wrong_with_one_row_is_told_to_that_one(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=3)
    table.wrong[2] = RuntimeError("planted")
    told = await asyncio.gather(*(rounds.join(n) for n in (1, 2, 3)), return_exceptions=True)
    assert told == [2, table.wrong[2], 6] and table.rounds == [[1, 2, 3]]


async def test_a_row_that_spoils_the_step_spoils_no_other_row(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=3)
    table.poison = 2
    told = await asyncio.gather(*(rounds.join(n) for n in (1, 2, 3)), return_exceptions=True)
    assert (told[0], str(told[1]), told[2]) == (2, "2 spoils the step", 6)
    assert table.rounds == [[1, 2, 3], [1], [2], [3]]


async def test_who_leaves_a_step_that_fails_is_not_in_it_again(table: Table) -> None:
    rounds = Batcher(table.run, max_rows=2)
    table.poison = 1
    table.going.clear()
    staying, leaving = (asyncio.create_task(rounds.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0.01)
    table.going.set()
    await asyncio.wait([staying, leaving])
    assert leaving.cancelled() and table.rounds == [[1, 2], [1]]
