"""`/v1/chat/completions`, `/v1/completions` and `/v1/cascade/explain`."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import for_client
from gateway.http.edge import CALLS_WITH_KEY, BodyRoute
from gateway.http.render import completion, frames
from gateway.request.explain import explain
from gateway.request.route import choose
from gateway.request.run import Run
from gateway.request.turn import Turn
from gateway.schemas import AnswerRequest, ChatCompletionRequest, TextCompletionRequest
from gateway.snapshot import Snapshot
from gateway.upstream.deadline import Deadline
from workers.api.errors import KvrelayError
from workers.api.http.disconnect import DisconnectWatch, until_disconnect
from workers.api.http.errors import ClientDisconnected
from workers.api.http.replies import json_reply, log_error
from workers.api.http.stream import EventStream

router = APIRouter(route_class=BodyRoute, tags=["completions"], **CALLS_WITH_KEY)


class TokenUsage(BaseModel):
    """`prompt_tokens_details.cached_tokens` counts exact prefix hits only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionReply(BaseModel):
    """OpenAI's completion, and how kvrelay came to it: tier, path, times, token counts."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: TokenUsage
    kvrelay: dict[str, Any]


STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, or its chunks as server-sent events if the request says `stream: true`",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@router.post("/v1/chat/completions", response_model=CompletionReply, responses=STREAM)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events."""
    return await _answer(body, request)


@router.post("/v1/completions", response_model=CompletionReply, responses=STREAM)
async def text_completions(body: TextCompletionRequest, request: Request) -> Response:
    """Continue a text, whole or as server-sent events."""
    return await _answer(body, request)


@router.post("/v1/cascade/explain", response_model=dict[str, Any])
async def cascade_explain(body: ChatCompletionRequest, request: Request) -> Response:
    """Return the decision that a chat completion would meet: route, cached prefix, predicted times. Runs no model."""
    turn = await _turn(body, request)
    snapshot: Snapshot = request.state.snapshot
    turn.route = await choose(snapshot.parts, turn)
    work = explain(snapshot.parts, turn)
    return json_reply(await until_disconnect(work, request.receive, lambda: _count_disconnect(request, turn)))


async def _answer(body: AnswerRequest, request: Request) -> Response:
    snapshot: Snapshot = request.state.snapshot
    turn = await _turn(body, request)
    turn.route = await choose(snapshot.parts, turn)
    run = Run(snapshot.parts, turn)
    watch = DisconnectWatch(request.receive, lambda: _count_disconnect(request, turn))
    try:
        if body.kvrelay.explain:
            began_at = time.monotonic()
            with watch.guard():
                turn.explanation = await explain(snapshot.parts, turn)
            turn.waited_s += time.monotonic() - began_at
        if body.stream:
            return await EventStream.open(
                frames(turn, run.chunks()),
                watch,
                on_error=lambda error: _broken_off(request, error),
                headers=lambda: _headers(request, turn),
                keep_alive_s=snapshot.settings.deadlines.keep_alive_s,
            )
        with watch.guard():
            answer = await run.whole()
        watch.close()
        return json_reply(completion(turn, answer), headers=_headers(request, turn))
    except BaseException:
        watch.close()
        raise


async def _turn(body: AnswerRequest, request: Request) -> Turn:
    state, snapshot = request.state, request.state.snapshot
    parts, tenant = snapshot.parts, state.tenant
    state.model_label = parts.fleet.label(body.model)
    deadline = Deadline.after(snapshot.settings.deadlines.request_s)
    named = None
    if body.kv_transfer_params is not None:
        named = await parts.caches.find(tenant, body.kv_transfer_params.cache_id, parts.fleet)
    return Turn(snapshot.settings, tenant, body, deadline, state.arrived_at, state.body_wait_s, named)


def _headers(request: Request, turn: Turn) -> dict[str, str]:
    """Of a reply; also leaves tier, path and model in the state."""
    state, path = request.state, turn.path
    state.tier, state.path, state.model = turn.tier_name, path, turn.model
    return {
        "x-kvrelay-path": path,
        "x-kvrelay-model": turn.model,
        "x-kvrelay-overhead-ms": f"{turn.overhead_ms:.2f}",
    }


def _broken_off(request: Request, error: Exception) -> KvrelayError:
    """What a stream's last frame says of an error after content. The log and the metrics get its status."""
    visible = for_client(log_error("stream_broke_off", error))
    request.state.status = visible.status
    return visible


def _count_disconnect(request: Request, turn: Turn) -> None:
    request.state.status = ClientDisconnected.status
    request.app.state.gateway.metrics.client_disconnects.labels(turn.phase).inc()
