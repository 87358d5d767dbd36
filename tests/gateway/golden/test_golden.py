"""The gateway behaves as the golden table records. `regenerate.py` records it again."""

from __future__ import annotations

import pytest

from tests.gateway.golden.play import ROWS
from tests.gateway.golden.regenerate import record
from tests.gateway.golden.store import TABLE, Turns, as_table, differences, load

RECORDED = load()
HINT = "If this change is intended: run python -m tests.gateway.golden.regenerate and review the diff."


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest) -> Turns:
    """The current turns of the selected cases."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [
        str(item.callspec.params["name"]) for item in items if item.originalname == test_case_matches_recording.__name__
    ]
    return record(names)


@pytest.mark.parametrize("name", ROWS)
def test_case_matches_recording(name: str, turns: Turns) -> None:
    changes = list(differences(RECORDED.get(name, []), turns[name]))
    if changes:
        pytest.fail("\n  ".join([name, *changes]) + f"\n{HINT}", pytrace=False)


def test_every_recorded_case_exists() -> None:
    assert RECORDED.keys() <= ROWS.keys()


def test_table_matches_recording() -> None:
    assert TABLE.read_text() == as_table(RECORDED)
