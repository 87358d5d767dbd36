"""`/v1/chat/completions`, `/v1/completions` and `/v1/cascade/explain`."""

from __future__ import annotations

from contextlib import closing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.cascade import Cascade
from gateway.connection import EventStream, HangUp, Pump
from gateway.course import choose
from gateway.errors import ClientDisconnected
from gateway.explain import explain
from gateway.http.incoming import take_in
from gateway.http.replies import json_reply
from gateway.replies import completion, frames
from gateway.schemas import AskedFor, ChatCompletionRequest, TextCompletionRequest
from gateway.snapshot import Snapshot
from gateway.turn import Named, Turn
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
    cascade = Cascade(await choose(snapshot.parts, turn))
    hang_up = HangUp(request.receive)
    try:
        if turn.request.kvrelay.explain:
            turn.report.explained = await hang_up.race(explain(cascade.course))
        return await (_streamed if turn.request.stream else _whole)(request, turn, cascade, hang_up)
    except ClientDisconnected:
        _count_hang_up(request, turn)
        hang_up.close()
        raise
    except BaseException:
        hang_up.close()
        raise


async def _whole(request: Request, turn: Turn, cascade: Cascade, hang_up: HangUp) -> Response:
    answer = await hang_up.race(cascade.whole())
    hang_up.close()
    return json_reply(completion(turn, answer), headers=_headers(request, turn))


async def _streamed(request: Request, turn: Turn, cascade: Cascade, hang_up: HangUp) -> Response:
    """The status is held until there is content: what fails before is a real HTTP error."""
    pump = Pump(frames(turn, cascade.pieces(), on_error=lambda error: _ended_as(request, error.status)))
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
    course = await choose(snapshot.parts, turn)
    with closing(HangUp(request.receive)) as hang_up:
        try:
            return json_reply(await hang_up.race(explain(course)))
        except ClientDisconnected:
            _count_hang_up(request, turn)
            raise


async def _turn(request: Request, kind: type[AskedFor]) -> Turn:
    """Who asks for what."""
    snapshot: Snapshot = request.state.snapshot
    parts, state = snapshot.parts, request.state
    taken = await take_in(request, kind)
    tenant, asked = taken.tenant, taken.asked
    state.model_label = parts.fleet.label(asked.model)
    deadline = Deadline.after(snapshot.settings.deadlines.request_s)
    named = None
    if asked.kv_transfer_params is not None:
        named = Named(await parts.caches.find(tenant, asked.kv_transfer_params.cache_id, parts.fleet))
    return Turn(tenant, asked, deadline, state.arrived_at, waited_s=taken.waited_s, named=named)


def _headers(request: Request, turn: Turn) -> dict[str, str]:
    state = request.state
    state.tier, state.path, state.model = turn.report.tier, turn.report.path, turn.model
    return {
        "x-kvrelay-path": turn.report.path,
        "x-kvrelay-model": turn.model,
        "x-kvrelay-overhead-ms": f"{turn.overhead_ms:.2f}",
    }


def _ended_as(request: Request, status: int) -> None:
    """Whatever the status was that the answer began with."""
    request.state.status = status


def _count_hang_up(request: Request, turn: Turn) -> None:
    _ended_as(request, ClientDisconnected.status)
    request.app.state.gateway.metrics.client_disconnects.labels(turn.phase).inc()
