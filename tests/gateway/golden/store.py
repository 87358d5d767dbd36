"""The recorded table on disk: one JSON file per route, and `TABLE.md` with one line per case."""

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
    """Load the turns of every recorded case, by name."""
    return {name: turns for path in sorted(DATA.glob("*.json")) for name, turns in json.loads(path.read_text()).items()}


def save(turns: Turns) -> None:
    """Replace the recorded table."""
    DATA.mkdir(exist_ok=True)
    for path in DATA.glob("*.json"):
        path.unlink()
    for route, names in groupby(sorted(turns, key=_route), _route):
        (DATA / f"{route}.json").write_text(as_json({name: turns[name] for name in names}))
    TABLE.write_text(as_table(turns))


def as_json(turns: Turns) -> str:
    """JSON with one line per field and worker call."""
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
    """Markdown with one section per route; forms with equal cells share a line."""
    lines = [HEAD]
    for route, names in groupby(sorted(turns, key=_route), _route):
        lines += [f"## {route}\n", _row(COLUMNS), _row("-" * len(COLUMNS))]
        lines += [*_rows({name: turns[name] for name in names}), ""]
    return "\n".join(lines)


def _rows(turns: Turns) -> Iterator[str]:
    forms: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(turns):
        cache, fault, form, tiers = [*name.split(" / ")[1:], "", "", "2"][:4]
        for turn in turns[name]:
            report, error = turn.get("report") or {}, turn.get("error") or {}
            ending = "client hung up" if "hung_up" in turn else turn.get("crashed") or error.get("code")
            status = " ".join(str(one) for one in (turn.get("status"), ending) if one)
            calls = "; ".join(map(_call, turn.get("calls", ())))
            path = report.get("path") or (turn.get("headers") or {}).get("path", "")
            key = (cache, turn.get("turn", fault), "" if tiers == "2" else f", {tiers} tiers")
            cells = (calls, status, report.get("tier", ""), path, f"{turn.get('took_s', 0):g}")
            forms.setdefault((*key, *cells), []).append(form)
    for (cache, fault, tiers, *rest), grouped in forms.items():
        yield _row((cache, fault, " + ".join(sorted(grouped, reverse=True)) + tiers, *rest))


def _call(call: Json) -> str:
    used = f" {call['cache']}" if call.get("cache") else ""
    got = call["got"].split(",")[-1].removesuffix(" kept").strip() if call["got"].startswith("whole") else call["got"]
    return f"{call['to'].removesuffix('-0')} {call['call']}{used} → {got.split(' of ')[0]}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _route(name: str) -> str:
    return name.split(" / ")[0]


def differences(expected: list[Json], got: list[Json]) -> Iterator[str]:
    """Yield one line per field in which the turns of a case differ from the recorded ones."""
    for index in range(max(len(expected), len(got))):
        recorded, current = (turns[index] if index < len(turns) else {} for turns in (expected, got))
        label = recorded.get("turn") or current.get("turn")
        yield from _changes(recorded, current, f"turn {index + 1}{f' ({label})' if label else ''}: ")


def _changes(expected: Any, got: Any, where: str) -> Iterator[str]:
    if expected == got:
        return
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*expected, *got]):
            yield from _changes(expected.get(key), got.get(key), f"{where}{'' if where.endswith(' ') else '.'}{key}")
    elif where.endswith(": calls") and isinstance(expected, list) and isinstance(got, list):
        recorded, current = list(map(_call, expected)), list(map(_call, got))
        if recorded != current:
            yield f"{where}: expected {'; '.join(recorded)}"
            yield f"{' ' * len(where)}  got      {'; '.join(current)}"
        for number, (call, one, other) in enumerate(zip(recorded, expected, got, strict=False), 1):
            yield from _changes(one, other, f"{where} {number} ({call})") if recorded == current else ()
    elif expected != got:
        yield f"{where}: expected {_line(expected)}, got {_line(got)}"
