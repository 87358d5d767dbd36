"""Calls to a worker, as the gateway makes them."""

from __future__ import annotations

from tests.e2e.conversations import Messages
from tests.e2e.running import NUM_TOKENS, Cluster
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL
from workers.api.schemas import (
    ChatRequest,
    KVTransferParams,
    Message,
    PrefillReply,
    PrefillRequest,
    TransferReply,
    TransferRequest,
)

SALT = "5a" * 16
TIMEOUT_S = 120.0


async def prefill(cluster: Cluster, messages: Messages, *, tier: str = "small", salt: str = SALT) -> PrefillReply:
    request = PrefillRequest(messages=_messages(messages), tenant_salt=salt)
    async with cluster.worker(tier) as worker:
        return await worker.prefill(request, timeout_s=TIMEOUT_S)


async def transfer(
    cluster: Cluster, prefilled: PrefillReply, *, salt: str = SALT, tier: str = "large", deadline_s: float = TIMEOUT_S
) -> TransferReply:
    request = TransferRequest(
        cache_id=prefilled.cache_id,
        source_worker=cluster.id("small"),
        num_tokens=prefilled.num_tokens - TAIL,
        tenant_salt=salt,
        deadline_ms=deadline_s * 1000,
    )
    async with cluster.worker(tier) as worker:
        return await worker.transfer(request, timeout_s=deadline_s + TIMEOUT_S)


def chat_request(messages: Messages, cache_id: str | None = None, *, salt: str = SALT) -> ChatRequest:
    return ChatRequest(
        messages=_messages(messages),
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=True,
        tenant_salt=salt,
        kv_transfer_params=KVTransferParams(cache_id=cache_id),
    )


def _messages(messages: Messages) -> list[Message]:
    return [Message(**message) for message in messages]
