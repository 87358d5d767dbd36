"""The requests that a turn makes of workers. The tenant's salt is put in here, whatever the client sent."""

from __future__ import annotations

from gateway.deadline import Deadline
from gateway.settings import HandoffSettings
from gateway.turn import Turn
from workers.api.schemas import ChatRequest, KVTransferParams, PrefillRequest, Prompt, StreamOptions, TransferRequest


def prefill(turn: Turn, settings: HandoffSettings, by: Deadline) -> PrefillRequest:
    """To read the whole prompt."""
    return PrefillRequest(
        messages=turn.messages,
        tools=turn.request.offered_tools,
        tenant_salt=turn.tenant.salt,
        ttl_s=settings.ttl_s,
        deadline_ms=left_ms(by),
    )


def transfer(
    turn: Turn, settings: HandoffSettings, *, cache_id: str, source_worker: str, num_tokens: int, by: Deadline
) -> TransferRequest:
    """To map the first `num_tokens` of another worker's cache."""
    return TransferRequest(
        cache_id=cache_id,
        source_worker=source_worker,
        num_tokens=num_tokens,
        native_head=settings.native_head,
        tenant_salt=turn.tenant.salt,
        ttl_s=settings.ttl_s,
        deadline_ms=left_ms(by),
    )


def chat(turn: Turn, settings: HandoffSettings, *, cache_id: str | None, judged: bool, native: bool) -> ChatRequest:
    """To answer, from a cache if one is given, and only an exact one if `native`; with log-probabilities where the
    answer is to be judged.

    Always as a stream with usage: what the client gets is put together here.
    """
    asked = turn.request
    return ChatRequest(
        messages=turn.messages,
        tools=asked.offered_tools,
        stable_messages=turn.stable_messages,
        max_tokens=asked.max_answer_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        stop=asked.stop,
        logprobs=asked.logprobs or judged,
        top_logprobs=asked.top_logprobs,
        stream=True,
        stream_options=StreamOptions(include_usage=True),
        kv_transfer_params=KVTransferParams(
            cache_id=cache_id,
            require_exact=native or asked.kvrelay.exact,
            reuse=turn.stores,
            store=turn.stores,
            ttl_s=settings.ttl_s,
            agreement_probe=asked.kvrelay.agreement_probe if cache_id and not judged else 0,
        ),
        tenant_salt=turn.tenant.salt,
        deadline_ms=left_ms(turn.deadline),
    )


def tokenize(turn: Turn) -> Prompt:
    return Prompt(messages=turn.messages, tools=turn.request.offered_tools, stable_messages=turn.stable_messages)


def left_ms(deadline: Deadline) -> float:
    """What a worker is told; a deadline that has passed is caught before the call is made."""
    return max(deadline.remaining_s * 1000, 1.0)
