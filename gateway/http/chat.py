"""`/v1/chat/completions`, `/v1/completions` and `/v1/cascade/explain`."""

from __future__ import annotations

import time
from contextlib import closing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.connection import EventStream, HangUp, Pump
from gateway.errors import ClientDisconnected
from gateway.http.incoming import take_in
from gateway.http.render import completion, frames
from gateway.http.replies import json_reply
from gateway.request.explain import explain
from gateway.request.route import choose
from gateway.request.run import Run
from gateway.request.turn import Turn
from gateway.schemas import AskedFor, ChatCompletionRequest, TextCompletionRequest
from gateway.snapshot import Snapshot
from gateway.upstream.deadline import Deadline

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _answered(request, await _turn(request, ChatCompletionRequest))


@router.post("/v1/completions")
async def text_completions(request: Request) -> Response:
    return await _answered(request, await _turn(request, TextCompletionRequest))


DIRECT = {"/v1/chat/completions": chat_completions, "/v1/completions": text_completions}


async def _answered(request: Request, turn: Turn) -> Response:
    snapshot: Snapshot = request.state.snapshot
    turn.route = await choose(snapshot.parts, turn)
    run = Run(snapshot.parts, turn)
    hang_up = HangUp(request.receive)
    try:
        if turn.request.kvrelay.explain:
            started = time.monotonic()
            turn.explanation = await hang_up.race(explain(snapshot.parts, turn))
            turn.waited_s += time.monotonic() - started
        return await (_streamed if turn.request.stream else _whole)(request, turn, run, hang_up)
    except ClientDisconnected:
        _count_hang_up(request, turn)
        hang_up.close()
        raise
    except BaseException:
        hang_up.close()
        raise


async def _whole(request: Request, turn: Turn, run: Run, hang_up: HangUp) -> Response:
    answer = await hang_up.race(run.whole())
    hang_up.close()
    return json_reply(completion(turn, answer), headers=_headers(request, turn))


async def _streamed(request: Request, turn: Turn, run: Run, hang_up: HangUp) -> Response:
    """The status is held until there is content: what fails before is a real HTTP error."""
    pump = Pump(frames(turn, run.chunks(), on_error=lambda error: _ended_as(request, error.status)))
    try:
        first = await hang_up.race(pump.next())
    except BaseException:
        await pump.aclose()
        raise
    assert first is not None
    return EventStream(
        first,
        pump,
        hang_up,
        headers=_headers(request, turn),
        keep_alive_s=request.state.snapshot.settings.deadlines.keep_alive_s,
        on_hang_up=lambda: _count_hang_up(request, turn),
    )


@router.post("/v1/cascade/explain")
async def cascade_explain(request: Request) -> Response:
    turn = await _turn(request, ChatCompletionRequest)
    snapshot: Snapshot = request.state.snapshot
    turn.route = await choose(snapshot.parts, turn)
    with closing(HangUp(request.receive)) as hang_up:
        try:
            return json_reply(await hang_up.race(explain(snapshot.parts, turn)))
        except ClientDisconnected:
            _count_hang_up(request, turn)
            raise


async def _turn(request: Request, kind: type[AskedFor]) -> Turn:
    """Authenticate, read and parse the body, and find the cache that the client named."""
    snapshot: Snapshot = request.state.snapshot
    parts, state = snapshot.parts, request.state
    taken = await take_in(request, kind)
    tenant, asked = taken.tenant, taken.asked
    state.model_label = parts.fleet.label(asked.model)
    deadline = Deadline.after(snapshot.settings.deadlines.request_s)
    named = None
    if asked.kv_transfer_params is not None:
        named = await parts.caches.find(tenant, asked.kv_transfer_params.cache_id, parts.fleet)
    return Turn(snapshot.settings, tenant, asked, deadline, state.arrived_at, taken.waited_s, named)


def _headers(request: Request, turn: Turn) -> dict[str, str]:
    state, path = request.state, turn.path
    state.tier, state.path, state.model = turn.tier, path, turn.model
    return {
        "x-kvrelay-path": path,
        "x-kvrelay-model": turn.model,
        "x-kvrelay-overhead-ms": f"{turn.overhead_ms:.2f}",
    }


def _ended_as(request: Request, status: int) -> None:
    """Whatever the status was that the answer began with."""
    request.state.status = status


def _count_hang_up(request: Request, turn: Turn) -> None:
    _ended_as(request, ClientDisconnected.status)
    request.app.state.gateway.metrics.client_disconnects.labels(turn.phase).inc()
