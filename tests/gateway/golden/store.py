"""The recorded table on disk: a JSON file for each route, and `TABLE.md` with a line for each case."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DATA = FOLDER / "data"
TABLE = FOLDER / "TABLE.md"

Json = dict[str, Any]
Turns = dict[str, list[Json]]

HEAD = """# What the gateway does

Written by `python -m tests.gateway.golden.regenerate`; the package's docstring explains the columns.
"""
COLUMNS = ("cache", "fault", "form", "worker calls", "status", "tier", "path", "s")


def load() -> Turns:
    """Every recorded case by name."""
    return {name: turns for path in sorted(DATA.glob("*.json")) for name, turns in json.loads(path.read_text()).items()}


def save(turns: Turns) -> None:
    """Replace what is recorded."""
    DATA.mkdir(exist_ok=True)
    for path in DATA.glob("*.json"):
        path.unlink()
    for route, names in groupby(sorted(turns, key=_route), _route):
        (DATA / f"{route}.json").write_text(as_json({name: turns[name] for name in names}))
    TABLE.write_text(as_table(turns))


def as_json(turns: Turns) -> str:
    """JSON with a line for each group of facts and each worker call."""
    cases = [f"{_line(name)}: [\n" + ",\n".join(map(_turn, turns[name])) + "\n]" for name in sorted(turns)]
    return "{\n" + ",\n".join(cases) + "\n}\n"


def _turn(turn: Json) -> str:
    return " {\n" + ",\n".join(f"  {_line(key)}: {_group(value)}" for key, value in turn.items()) + "\n }"


def _group(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"   {_line(one)}" for one in value) + "\n  ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_table(turns: Turns) -> str:
    """Markdown: a section for each route; forms that differ in nothing shown share a line."""
    lines = [HEAD]
    for route, names in groupby(sorted(turns, key=_route), _route):
        lines += [f"## {route}\n", _row(COLUMNS), _row("-" * len(COLUMNS))]
        lines += [*_rows({name: turns[name] for name in names}), ""]
    return "\n".join(lines)


def _rows(turns: Turns) -> Iterator[str]:
    forms: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(turns):
        _, cache, fault, form, tiers = name.split(" / ")
        for number, turn in enumerate(turns[name], 1):
            step = f" ({number})" if len(turns[name]) > 1 else ""
            report, error = turn.get("report") or {}, turn.get("error") or {}
            status = " ".join(str(one) for one in (turn.get("status", "crashed"), error.get("code")) if one)
            calls = "; ".join(map(_call, turn.get("calls", ())))
            path = report.get("path") or (turn.get("headers") or {}).get("path", "")
            key = (f"{cache}{step}", fault, "" if tiers == "2" else f", {tiers} tiers")
            shown = (calls, status, report.get("tier", ""), path, f"{turn.get('took_s', 0):g}")
            forms.setdefault((*key, *shown), []).append(form)
    for (cache, fault, tiers, *cells), seen in forms.items():
        yield _row((cache, fault, " + ".join(sorted(seen, reverse=True)) + tiers, *cells))


def _call(call: Json) -> str:
    used = f" {call['cache']}" if call.get("cache") else ""
    got = call["got"].split(",")[-1].removesuffix(" kept").strip() if call["got"].startswith("whole") else call["got"]
    return f"{call['to'].removesuffix('-0')} {call['call']}{used} → {got.split(' of ')[0]}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _route(name: str) -> str:
    return name.split(" / ")[0]


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Where two records differ, one line for each field."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            yield from differences(expected.get(key), got.get(key), f"{where}.{key}" if where else key)
    elif isinstance(expected, list) and isinstance(got, list):
        for index in range(max(len(expected), len(got))):
            was, now = (one[index] if index < len(one) else None for one in (expected, got))
            yield from differences(was, now, f"{where}[{index}]")
    elif expected != got:
        yield f"{where}: expected {_line(expected)}, got {_line(got)}"
