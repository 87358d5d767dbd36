"""`kvrelay soak` on real processes, and its oracle on right and wrong answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.running import START_S, Cluster, request
from tests.e2e.talks import talk
from tests.e2e.test_up import ROOT
from tools.soak.checks import Oracle
from tools.soak.requests import SoakExchange, SoakRequest
from workers.families import Family


async def test_oracle_rejects_wrong_tokens(cluster: Cluster, family: Family) -> None:
    """A mapped answer of the worker passes; with another token, log-probability, length, text or number of mapped
    tokens it does not."""
    reply, sent = cluster.client.escalate(talk("Ariel")), SoakRequest(request(talk("Ariel")))
    right = SoakExchange(
        "default", sent, 0.0, ended="whole", text=reply.text, tokens=reply.tokens, kvrelay=reply.told
    )
    first, *rest = right.tokens
    wrong = [
        replace(right, tokens=[first | {"token": " never"}, *rest]),
        replace(right, tokens=[first | {"logprob": first["logprob"] - 0.1}, *rest]),
        replace(right, tokens=rest),
        replace(right, text=right.text + "!"),
        replace(right, kvrelay=right.kvrelay | {"mapped_tokens": 0}),
    ]
    folders = {"small": str(family.source), "large": str(family.target), "bundle": str(family.bundle)}
    async with Oracle(folders, threads=1, timeout_s=START_S) as oracle:
        assert await oracle.error_in(right) is None
        assert [bool(await oracle.error_in(one)) for one in wrong] == [True] * len(wrong)


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
    content: dict[str, Any] = json.loads(report.read_text())
    assert content["checked"] > 0 and content["requests"] >= content["checked"]
    assert (content["wrong_answers"], content["errors"], content["late_answers"], content["verdict"]) == (0, 0, 0, [])
    assert {sample["part"] for sample in content["samples"]} == {"gateway", "small-0", "small-1", "large-0"}
    assert not list(scratch.iterdir())
