"""Workers served in this process, and the requests of their clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from starlette.types import ASGIApp

import mappers
from mappers.manifest import ArmScore, Evaluation, LengthScores
from tests.workers.engines import tiny
from workers.api.client import WorkerClient
from workers.api.schemas import SECRET_HEADER, ChatRequest, KVTransferParams, Message, TransferRequest
from workers.app import create_app
from workers.serving.worker import WorkerRuntime, build_worker

SECRET = "a cluster secret of this test"
SALT = "ab" * 16
OTHER_SALT = "cd" * 16

SYSTEM = Message(role="system", content="A cache holds keys and values. " * 12)
QUESTION = Message(role="user", content="The quick brown fox and the dog?")
TALK = [SYSTEM, QUESTION]


@dataclass(frozen=True)
class ServedWorker:
    """A worker, its app, a client of the worker API, and a plain HTTP client."""

    worker: WorkerRuntime
    app: ASGIApp
    client: WorkerClient
    http: httpx.AsyncClient

    def prompt(self, messages: Sequence[Message] = TALK) -> list[int]:
        """The tokens of a conversation under this worker's chat template."""
        return self.worker.engine.tokenizer.encode_chat(messages).token_ids

    def text(self, token_ids: Iterable[int]) -> str:
        return self.worker.engine.tokenizer.decode(list(token_ids))

    async def chat(self, messages: Sequence[Message] = TALK, **changes: Any) -> dict[str, Any]:
        return await self.client.chat(chat_request(messages, **changes), timeout_s=60)


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    peers: Mapping[str, ASGIApp] | None = None,
    discoverable: Mapping[str, ASGIApp] = {},
    bundles: Sequence[Path] = (),
    **changes: Any,
) -> AsyncIterator[ServedWorker]:
    """Serve a worker over `folder`. Other workers' apps are reached without a network: `peers` are configured,
    `discoverable` are found by their heartbeats."""
    peers = peers or {}
    settings = tiny.settings_for(
        folder,
        peers={name: f"http://{name}.test" for name in peers},
        bundles=[str(bundle) for bundle in bundles],
        **changes,
    )

    def connect(url: str) -> WorkerClient:
        name = httpx.URL(url).host.split(".")[0]
        return connect_to(peers[name] if name in peers else discoverable[name], url)

    worker = build_worker(settings, SECRET, connect=connect)
    async with worker:
        app = create_app(worker, SECRET)
        transport = httpx.ASGITransport(app)
        async with (
            connect_to(app) as client,
            httpx.AsyncClient(
                transport=transport, base_url="http://worker.test", headers={SECRET_HEADER: SECRET}
            ) as http,
        ):
            yield ServedWorker(worker, app, client, http)


async def counts(served: ServedWorker, name: str) -> dict[str, float]:
    """The nonzero values of a counter of one label, by that label."""
    metrics = (await served.http.get("/metrics")).text
    found = re.findall(rf'^kvrelay_{name}\{{\w+="(\w+)"\}} (\S+)$', metrics, re.MULTILINE)
    return {value: float(count) for value, count in found if float(count)}


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until another task or thread has made `condition` true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition sets no event
            await asyncio.sleep(0.005)


def connect_to(app: ASGIApp, url: str = "http://worker.test") -> WorkerClient:
    return WorkerClient(url, SECRET, transport=httpx.ASGITransport(app))


def chat_request(messages: Sequence[Message] = TALK, **changes: Any) -> ChatRequest:
    """A greedy request of the default tenant; fields of `KVTransferParams` are put there."""
    params = {name: changes.pop(name) for name in list(changes) if name in KVTransferParams.model_fields}
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "tenant_salt": SALT} | changes
    if params:
        fields["kv_transfer_params"] = KVTransferParams(**params)
    return ChatRequest(messages=list(messages), **fields)


def transfer_request(cache_id: str, **changes: Any) -> TransferRequest:
    fields: dict[str, Any] = {"source_worker": "small", "tenant_salt": SALT, "deadline_ms": 30_000} | changes
    return TransferRequest(cache_id=cache_id, **fields)


def content(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


def bundle(
    source: Path, target: Path, folder: Path, *, ppl_ratio: float = 1.0, top1: float = 1.0, documents: int = 50
) -> Path:
    """Save a bundle between two tiny models that passes keys and values through, with the given evaluation."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 380, (4, 64), generator=generator).tolist()
    mappers.save(mappers.fit(source, target, texts, mappers.FitSettings(method="identity")), folder)
    score = ArmScore(arm="hybrid", ppl_ratio=ppl_ratio, ppl_low=1, ppl_high=2, top1=top1, kl_mean=0, kl_p95=0)
    at = tuple(LengthScores(length=length, num_documents=documents, arms=(score,)) for length in (384, 1024, 2048))
    evaluation = Evaluation(data="none", head=4, tail=64, scored=128, tokens=1, arms=(score,), lengths=at)
    mappers.bundle.update(folder, evaluation=evaluation)
    return folder
