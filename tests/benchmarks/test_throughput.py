from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.throughput import ARMS, Row, Talk, TransformersGenerate, main, measure, summary
from tests.workers.engines import tiny
from tests.workers.server.support import serving
from workers.api.schemas import Message


async def test_both_arms_return_the_same_answers(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")

    def talk(name: str) -> Talk:
        return [Message(role="user", content=f"The dog {name}?")]

    async with serving(folder) as served:
        rows = await measure(served.client, TransformersGenerate(folder), talk, chats=[1, 3], max_tokens=6, repeats=2)
    assert [(row.arm, row.chats, row.repeat) for row in rows] == [
        (arm, chats, repeat) for repeat in range(2) for chats in (1, 3) for arm in ARMS
    ]
    assert all(row.same_answers == row.chats and 0 < row.tokens <= 6 * row.chats for row in rows)
    assert all(row.tokens_per_s == pytest.approx(row.tokens / row.seconds) for row in rows)


def test_summary_has_medians_per_number_of_chats() -> None:
    rates = {("worker", 1): (10, 30, 20), ("generate", 1): (16, 8, 40), ("worker", 4): (60,), ("generate", 4): (20,)}
    rows = [
        Row(arm, chats, repeat, 64, 1.0, rate, chats - repeat % 2)
        for (arm, chats), given in rates.items()
        for repeat, rate in enumerate(given)
    ]
    one, four = summary(rows)
    assert (one["chats"], one["worker_tokens_per_s"], one["generate_tokens_per_s"], one["ratio"]) == (1, 20, 16, 1.25)
    assert (one["answers"], one["same_answers"]) == (3, 2)
    assert (four["chats"], four["ratio"], four["same_answers"]) == (4, 3.0, 4)


def test_unknown_family_exits_with_status_2() -> None:
    assert main(["--family", "none"]) == 2


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--chats", "1,x", "'1,x': must be comma-separated integers of at least 1"),
        ("--chats", "0", "'0': must be comma-separated integers of at least 1"),
        ("--length", "3", "'3': must be an integer of at least 64"),
        ("--tokens", "-1", "'-1': must be an integer of at least 1"),
    ],
)
def test_invalid_number_is_rejected_by_option(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"{option}={value}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err
