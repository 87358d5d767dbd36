"""The oracle of `kvrelay soak` on right and wrong answers of real workers."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.conversations import conversation
from tests.e2e.running import START_S, Cluster, request
from tools.soak.checks import Oracle
from tools.soak.requests import SoakExchange, SoakRequest
from workers.families import Family


async def test_oracle_rejects_wrong_tokens(cluster: Cluster, family: Family) -> None:
    """A mapped answer of the worker passes; with another token, log-probability, length, text or number of mapped
    tokens it does not."""
    reply, sent = cluster.client.escalate(conversation("Ariel")), SoakRequest(request(conversation("Ariel")))
    right = SoakExchange(
        "default", sent, 0.0, ended="whole", text=reply.text, tokens=reply.tokens, kvrelay=reply.report
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
