"""The gateway does what the recorded table says. `regenerate.py` records it again."""

from __future__ import annotations

import pytest

from tests.gateway.golden.cases import CASES
from tests.gateway.golden.regenerate import recorded
from tests.gateway.golden.store import TABLE, Turns, as_table, differences, load

RECORDED = load()


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest) -> Turns:
    """What the selected cases do now."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [str(item.callspec.params["name"]) for item in items if item.originalname == test_as_recorded.__name__]
    return recorded(() if len(names) == len(CASES) else names)


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name: str, turns: Turns) -> None:
    changes = list(differences(RECORDED.get(name), turns[name]))
    assert not changes, "\n".join([name, *changes, "if this is wanted: python -m tests.gateway.golden.regenerate"])


def test_every_recorded_case_exists() -> None:
    assert RECORDED.keys() <= CASES.keys()


def test_the_readable_table_is_in_step() -> None:
    assert TABLE.read_text() == as_table(RECORDED)
