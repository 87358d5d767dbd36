"""The request bodies that a turn sends to workers. The tenant's salt is set here, whatever the client sent."""

from __future__ import annotations

from typing import Any

from gateway.request.steps import chunk_interval_s
from gateway.request.turn import Answer, Transfer, Turn
from gateway.upstream.completion import Completion
from gateway.upstream.deadline import Deadline
from gateway.upstream.worker import AnswerBody
from workers.api.schemas import ESCALATION_PRIORITY, Message, PrefillRequest, Prompt, TransferRequest


def prefill(turn: Turn, deadline: Deadline) -> PrefillRequest:
    """Prefill the whole prompt."""
    return PrefillRequest(
        **_prompt(turn),
        tenant_salt=turn.tenant.salt,
        ttl_s=turn.settings.handoff.ttl_s,
        deadline_ms=left_ms(deadline),
    )


def transfer(turn: Turn, step: Transfer) -> TransferRequest:
    """Map another worker's cache: by cost, so that the worker may map less or decline, unless the escalation is
    forced."""
    settings = turn.settings.handoff
    return TransferRequest(
        cache_id=step.source.cache_id,
        source_worker=step.source.worker.id,
        num_tokens=step.num_tokens,
        native_head=settings.native_head,
        tenant_salt=turn.tenant.salt,
        ttl_s=settings.ttl_s,
        deadline_ms=left_ms(step.deadline),
        by_cost=not turn.route.decision.forced,
    )


def answer(turn: Turn, step: Answer) -> AnswerBody:
    """Answer, from the step's cache if it has one, with the log-probabilities that the policy judges by.

    Always as a stream with usage. A tier that answers alone answers natively, unless the client named a cache.
    """
    asked, cache = turn.request, step.cache
    num_top, cache_id = asked.num_top_logprobs, cache.cache_id if cache else None
    if step.is_judged:
        num_top = max(num_top or 0, turn.route.policy.num_top_logprobs)
    is_native = turn.route.is_single and asked.kv_transfer_params is None
    fields: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "stop": asked.stop,
        "max_tokens": asked.max_answer_tokens,
        "stream": True,
        "stream_options": {
            "include_usage": True,
            "interval_ms": 0.0 if step.is_judged else 1000 * chunk_interval_s(turn),
        },
        "kv_transfer_params": {
            "cache_id": cache_id,
            "require_exact": is_native or asked.kvrelay.exact,
            "reuse": turn.stores,
            "store": turn.stores,
            "ttl_s": turn.settings.handoff.ttl_s,
            "agreement_probe": asked.kvrelay.agreement_probe if cache_id and not step.is_judged else 0,
            "shadow": cache is not None and cache.is_shadowed,
        },
        "tenant_salt": turn.tenant.salt,
        "deadline_ms": left_ms(turn.deadline),
        "priority": 0 if turn.escalation is None else ESCALATION_PRIORITY,
    }
    if asked.text is not None:
        return AnswerBody(False, fields | {"prompt": asked.text, "logprobs": num_top})
    fields |= {
        "messages": [message.plain for message in turn.messages],
        "tools": asked.offered_tools,
        "stable_messages": turn.stable_messages,
        "logprobs": num_top is not None,
        "top_logprobs": num_top or 0,
        "response_format": asked.form.model_dump() if asked.form else None,
    }
    return AnswerBody(True, fields)


def follow_up(turn: Turn, completion: Completion, question: str, deadline: Deadline) -> AnswerBody:
    """Ask the policy's question about a complete answer: one token, from the answer's cache. Nothing is stored."""
    cache_id = completion.kv.cache_id if completion.kv and turn.request.is_chat else None
    messages = [*turn.messages, completion.as_turn, Message(role="user", content=question)]
    fields = {
        "messages": [message.plain for message in messages],
        "tools": turn.request.offered_tools,
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": turn.route.policy.num_top_logprobs,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"cache_id": cache_id, "reuse": turn.stores, "store": False},
        "tenant_salt": turn.tenant.salt,
        "deadline_ms": left_ms(deadline),
    }
    return AnswerBody(True, fields)


def tokenize(turn: Turn) -> Prompt:
    return Prompt(**_prompt(turn), stable_messages=turn.stable_messages if turn.request.is_chat else None)


def left_ms(deadline: Deadline) -> float:
    """At least 1: a deadline that has passed is noticed before the call is made."""
    return max(deadline.remaining_s * 1000, 1.0)


def _prompt(turn: Turn) -> dict[str, Any]:
    if turn.request.text is not None:
        return {"prefix": turn.request.text}
    return {"messages": turn.messages, "tools": turn.request.offered_tools}
