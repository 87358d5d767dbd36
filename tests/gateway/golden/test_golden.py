"""The gateway does what the recorded table says. `regenerate.py` records it again."""

from __future__ import annotations

import pytest

from tests.gateway.golden.play import ROWS
from tests.gateway.golden.regenerate import recorded
from tests.gateway.golden.store import TABLE, Turns, as_table, differences, load

RECORDED = load()
HINT = "If this is a wanted change: python -m tests.gateway.golden.regenerate, and read the diff."


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest) -> Turns:
    """What the selected cases do now."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [str(item.callspec.params["name"]) for item in items if item.originalname == test_as_recorded.__name__]
    return recorded(names)


@pytest.mark.parametrize("name", ROWS)
def test_as_recorded(name: str, turns: Turns) -> None:
    changes = list(differences(RECORDED.get(name, []), turns[name]))
    if changes:
        pytest.fail("\n  ".join([name, *changes]) + f"\n{HINT}", pytrace=False)


def test_every_recorded_case_exists() -> None:
    assert RECORDED.keys() <= ROWS.keys()


def test_the_readable_table_is_in_step() -> None:
    assert TABLE.read_text() == as_table(RECORDED)
