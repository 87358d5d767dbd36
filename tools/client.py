"""Clients of a running gateway and its workers, and documents of a given length to send."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from gateway.settings import Settings
from workers.api.client import WorkerClient
from workers.api.errors import KvrelayError
from workers.api.schemas import SECRET_HEADER, WorkerInfo

SUBJECTS = "harbour ledger bridge orchard lantern chapel granary ferry quarry archive stable tower cellar mill".split()
VERBS = "was repaired,was sold,was painted,was counted,was closed,was opened,was moved,was measured".split(",")
PLACES = "by the north quay,near the old market,behind the school,on the hill,below the weir,in the yard".split(",")
PEOPLE = "the warden,a clerk,two masons,the council,an apprentice,the ferryman,a surveyor,the widow Brandt".split(",")


class RequestFailed(RuntimeError):
    """The gateway answered with an error, whose message this is."""


@dataclass(frozen=True)
class TimedAnswer:
    """A streamed answer. `ttft_ms` runs from sending the request to the first text. `kvrelay` is the reply's field."""

    text: str
    ttft_ms: float
    kvrelay: dict[str, Any]
    usage: dict[str, Any]


def chat(
    http: httpx.Client,
    messages: Sequence[dict[str, str]],
    *,
    model: str = "auto",
    max_tokens: int = 48,
    options: dict[str, Any] | None = None,
) -> TimedAnswer:
    """Stream one greedy chat completion. Raises `RequestFailed`."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kvrelay": options or {},
    }
    kvrelay: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    started, first, text = time.perf_counter(), None, ""
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            reply.read()
            raise RequestFailed(f"status {reply.status_code}: {reply.text[:400]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(chunk["error"]["message"])
            content = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
            if content and first is None:
                first = time.perf_counter()
            text += content
            kvrelay = chunk.get("kvrelay") or kvrelay
            usage = chunk.get("usage") or usage
    return TimedAnswer(text, 1000 * ((first or time.perf_counter()) - started), kvrelay, usage)


async def worker_infos(settings: Settings, secret: str) -> dict[str, WorkerInfo | KvrelayError]:
    """Return each worker's info, or the error of the call."""

    async def info(url: str) -> WorkerInfo | KvrelayError:
        async with WorkerClient(url, secret) as client:
            try:
                return await client.info()
            except KvrelayError as error:
                return error

    answers = await asyncio.gather(*(info(worker.url) for worker in settings.workers.values()))
    return dict(zip(settings.workers, answers, strict=True))


class Documents:
    """Generates documents of a given length, measured by a worker's tokenizer. Each name gives another text, so that
    no cache holds it yet."""

    def __init__(self, worker_url: str, secret: str):
        self._http = httpx.Client(base_url=worker_url, headers={SECRET_HEADER: secret}, timeout=60, trust_env=False)

    def of_length(self, num_tokens: int, name: str) -> str:
        """Return a document of `num_tokens` tokens, up to 40 fewer. Equal names give equal documents."""
        rng = random.Random(name)
        entries = [  # more than enough: each has at least ten tokens
            f"Entry {number}: in {rng.randint(1790, 1930)} the {rng.choice(SUBJECTS)} {rng.choice(VERBS)} "
            f"{rng.choice(PLACES)} by {rng.choice(PEOPLE)}, at a cost of {rng.randint(2, 980)} crowns."
            for number in range(1, num_tokens // 10 + 2)
        ]
        low, high = 1, len(entries)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._tokenize({"prefix": _join(name, entries[:middle])})["num_tokens"] <= num_tokens
            low, high = (middle, high) if fits else (low, middle)
        return _join(name, entries[:low])

    def token_ids(self, document: str, question: str) -> list[int]:
        """Return the token ids of a prompt: the document as system message, then the question."""
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        ids: list[int] = self._tokenize({"messages": messages})["token_ids"]
        return ids

    def _tokenize(self, prompt: dict[str, Any]) -> dict[str, Any]:
        reply = self._http.post("/v1/tokenize", json=prompt)
        reply.raise_for_status()
        body: dict[str, Any] = reply.json()
        return body


def _join(name: str, entries: list[str]) -> str:
    return f"Register {name}. " + " ".join(entries)
