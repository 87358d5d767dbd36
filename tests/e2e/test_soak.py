"""The soak as a command, on real processes; and that its oracle tells a wrong answer from a right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.running import START_S, Cluster, Reply, request
from tests.e2e.talks import talk
from tests.e2e.test_up import ROOT
from tools.soak.client import Exchange
from tools.soak.oracle import Oracle
from tools.soak.talks import Ask
from workers.families import Family


async def test_the_oracle_tells_wrong_tokens_from_right_ones(cluster: Cluster, family: Family) -> None:
    """A mapped answer as the worker gave it; then with another token, another likelihood, one token fewer, other
    text, and taken for an answer of which nothing was mapped."""
    right = exchange_of(cluster.client.escalate(talk("Ariel")), Ask(request(talk("Ariel"))))
    first, *rest = right.tokens
    wrong = [
        replace(right, tokens=[first | {"token": " never"}, *rest]),
        replace(right, tokens=[first | {"logprob": first["logprob"] - 0.1}, *rest]),
        replace(right, tokens=rest),
        replace(right, text=right.text + "!"),
        replace(right, told=right.told | {"mapped_tokens": 0}),
    ]
    folders = {"small": str(family.source), "large": str(family.target), "bundle": str(family.bundle)}
    async with Oracle(folders, threads=1, timeout_s=START_S) as oracle:
        assert await oracle.wrong(right) is None
        assert [bool(await oracle.wrong(one)) for one in wrong] == [True] * len(wrong)


def exchange_of(reply: Reply, ask: Ask) -> Exchange:
    return Exchange("default", ask, 0.0, ended="whole", text=reply.text, tokens=reply.tokens, told=reply.told)


def test_a_short_soak(tmp_path: Path) -> None:
    report, scratch = tmp_path / "report.json", tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["soak", "--minutes", "0.1", "--family", "tiny", "--seed", "1", "--json", str(report)]
    ended = subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=2 * START_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was wrong" in ended.stdout
    told: dict[str, Any] = json.loads(report.read_text())
    assert told["checked"] > 0 and told["requests"] >= told["checked"]
    assert (told["wrong_answers"], told["errors"], told["late_answers"], told["verdict"]) == (0, 0, 0, [])
    assert {sample["part"] for sample in told["samples"]} == {"gateway", "small-0", "small-1", "large-0"}
    assert not list(scratch.iterdir())
