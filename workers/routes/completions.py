"""`/v1/chat/completions` and `/v1/completions`, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.api.schemas import ChatRequest, CompletionRequest, WorkerStreamOptions
from workers.engines.base import Token
from workers.routes.hangup import until_hang_up
from workers.routes.jobs import chat_job, completion_job
from workers.routes.openai import Body, ChatShape, CompletionShape, Shape
from workers.routes.replies import json_reply
from workers.routes.spacing import spaced
from workers.routes.sse import DONE, EventStream, frame
from workers.serving.answer import QUEUE, AnswerJob
from workers.serving.worker import Worker

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    job = await until_hang_up(chat_job(worker, body), request.receive, worker.metrics.disconnects.labels(QUEUE).inc)
    shape = ChatShape(worker.engine.model.name, worker.engine.tokenizer, logprobs=body.logprobs)
    return await _reply(worker, job, shape, body, request)


@router.post("/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    gone = worker.metrics.disconnects.labels(QUEUE).inc
    job = await until_hang_up(completion_job(worker, body), request.receive, gone)
    shape = CompletionShape(worker.engine.model.name, worker.engine.tokenizer, logprobs=body.logprobs is not None)
    return await _reply(worker, job, shape, body, request)


async def _reply(
    worker: Worker, job: AnswerJob, shape: Shape, body: ChatRequest | CompletionRequest, request: Request
) -> Response:
    def gone() -> None:
        worker.metrics.disconnects.labels(job.course.phase).inc()

    if body.stream:
        return EventStream(_stream(worker, job, shape, body.stream_options or WorkerStreamOptions()), gone)
    return json_reply(await until_hang_up(_whole(worker, job, shape), request.receive, gone))


async def _whole(worker: Worker, job: AnswerJob, shape: Shape) -> Body:
    text: list[str] = []
    tokens: list[Token] = []
    async with worker.answerer.open(job) as answer, aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            text.append(piece.text)
            tokens.extend(piece.tokens)
        usage = await answer.settle()
        return shape.whole("".join(text), tokens, answer, usage)


async def _stream(
    worker: Worker, job: AnswerJob, shape: Shape, options: WorkerStreamOptions
) -> AsyncGenerator[bytes, None]:
    """Frames of a stream, the first ones when the first piece is there. The first tells where the prompt came from, the
    last what was kept as well."""
    async with worker.answerer.open(job) as answer, aclosing(answer.pieces()) as pieces:
        opening, first = shape.opening(), True
        async for piece in spaced(pieces, options.interval_ms / 1000):
            chunks = [*opening, shape.piece(piece)]
            if first:
                chunks[0]["kv_transfer_params"] = answer.usage.model_dump()
            yield b"".join(map(frame, chunks))
            opening, first = [], False
        usage = await answer.settle()
        closing = [*opening, shape.finish(answer.finish_reason)]
        if options.include_usage:
            closing.append(shape.usage(answer))
        closing[-1]["kv_transfer_params"] = usage.model_dump()
        ending = b"".join(map(frame, closing))
    yield ending + DONE
