"""The requests that a turn makes of workers. The tenant's salt is put in here, whatever the client sent."""

from __future__ import annotations

from typing import Any

from gateway.gathered import Gathered
from gateway.policies import Policy
from gateway.settings import HandoffSettings
from gateway.turn import Turn
from gateway.upstream.deadline import Deadline
from gateway.upstream.worker import Question
from workers.api.schemas import (
    ESCALATION_PRIORITY,
    Message,
    PrefillRequest,
    Prompt,
    TransferRequest,
)


def prefill(turn: Turn, settings: HandoffSettings, by: Deadline) -> PrefillRequest:
    """To read the whole prompt."""
    return PrefillRequest(
        **_prompt(turn), tenant_salt=turn.tenant.salt, ttl_s=settings.ttl_s, deadline_ms=left_ms(by)
    )


def transfer(
    turn: Turn, settings: HandoffSettings, *, cache_id: str, source_worker: str, num_tokens: int, by: Deadline
) -> TransferRequest:
    """To map the first `num_tokens` of another worker's cache: by cost, so that it may map less or decline, unless the
    client insists on the escalation."""
    return TransferRequest(
        cache_id=cache_id,
        source_worker=source_worker,
        num_tokens=num_tokens,
        native_head=settings.native_head,
        tenant_salt=turn.tenant.salt,
        ttl_s=settings.ttl_s,
        deadline_ms=left_ms(by),
        by_cost=not turn.report.forced,
    )


def answer(
    turn: Turn,
    settings: HandoffSettings,
    *,
    cache_id: str | None,
    judged_by: Policy | None,
    native: bool,
    interval_ms: float,
) -> Question:
    """To answer, from a cache if one is given, and only an exact one if `native`; with the log-probabilities that a
    policy wants to judge by.

    Always as a stream with usage: what the client gets is put together here. Told not more often than `interval_ms`.
    """
    asked, num_top = turn.request, turn.request.num_top_logprobs
    if judged_by is not None:
        num_top = max(num_top or 0, judged_by.num_top_logprobs)
    fields: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "stop": asked.stop,
        "max_tokens": asked.max_answer_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "interval_ms": interval_ms},
        "kv_transfer_params": {
            "cache_id": cache_id,
            "require_exact": native or asked.kvrelay.exact,
            "reuse": turn.stores,
            "store": turn.stores,
            "ttl_s": settings.ttl_s,
            "agreement_probe": asked.kvrelay.agreement_probe if cache_id and judged_by is None else 0,
            "shadow": turn.is_shadowed and cache_id is not None,
        },
        "tenant_salt": turn.tenant.salt,
        "deadline_ms": left_ms(turn.deadline),
        "priority": 0 if turn.escalated_at is None else ESCALATION_PRIORITY,
    }
    if asked.text is not None:
        return Question(False, fields | {"prompt": asked.text, "logprobs": num_top})
    return Question(
        True,
        fields
        | {
            "messages": [message.plain for message in turn.messages],
            "tools": asked.offered_tools,
            "stable_messages": turn.stable_messages,
            "logprobs": num_top is not None,
            "top_logprobs": num_top or 0,
            "response_format": asked.form.model_dump() if asked.form else None,
        },
    )


def follow_up(turn: Turn, answer: Gathered, question: str, num_top: int, by: Deadline) -> Question:
    """To say a word more about an answer that is whole, from its cache where there is one. Nothing of it is kept."""
    cache_id = answer.kv.cache_id if answer.kv and turn.request.is_chat else None
    messages = [*turn.messages, answer.as_turn, Message(role="user", content=question)]
    return Question(
        True,
        {
            "messages": [message.plain for message in messages],
            "tools": turn.request.offered_tools,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": num_top,
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"cache_id": cache_id, "reuse": turn.stores, "store": False},
            "tenant_salt": turn.tenant.salt,
            "deadline_ms": left_ms(by),
        },
    )


def tokenize(turn: Turn) -> Prompt:
    return Prompt(**_prompt(turn), stable_messages=turn.stable_messages if turn.request.is_chat else None)


def left_ms(deadline: Deadline) -> float:
    """What a worker is told; a deadline that has passed is caught before the call is made."""
    return max(deadline.remaining_s * 1000, 1.0)


def _prompt(turn: Turn) -> dict[str, Any]:
    if turn.request.text is not None:
        return {"prefix": turn.request.text}
    return {"messages": turn.messages, "tools": turn.request.offered_tools}
