"""`/v1/chat/completions` and `/v1/completions`, whole or as a stream.

request ─► job (prompt, limits, sampling) ─► answer ─► pieces, in the shapes of the OpenAI API
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.api.errors import InvalidRequest
from workers.api.http.disconnect import DisconnectWatch
from workers.api.http.replies import json_reply, log_error
from workers.api.http.stream import DONE, EventStream, event
from workers.api.schemas import ChatRequest, CompletionRequest, KVTransferParams, ResponseFormat, WorkerStreamOptions
from workers.engines.base import Sampling, Token
from workers.routes.edge import ServedWorker
from workers.routes.openai import Body, ChatShape, CompletionShape, Shape
from workers.serving.generation import QUEUE, GenerationChunk, GenerationJob
from workers.serving.worker import WorkerRuntime

MAX_STOPS = 16
SEEDS = range(-(2**63), 2**64)  # what a torch generator takes

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request, worker: ServedWorker) -> Response:
    shape = ChatShape(worker.engine.model.name, worker.engine.tokenizer, logprobs=body.logprobs)
    return await _answer(worker, body, request, shape)


@router.post("/completions")
async def complete(body: CompletionRequest, request: Request, worker: ServedWorker) -> Response:
    shape = CompletionShape(worker.engine.model.name, worker.engine.tokenizer, logprobs=body.logprobs is not None)
    return await _answer(worker, body, request, shape)


async def _answer(
    worker: WorkerRuntime, body: ChatRequest | CompletionRequest, request: Request, shape: Shape
) -> Response:
    job: GenerationJob | None = None

    def count_disconnect() -> None:
        worker.metrics.disconnects.labels(QUEUE if job is None else job.progress.phase).inc()

    watch = DisconnectWatch(request.receive, count_disconnect)
    try:
        with watch.guard():
            job = await answer_job(worker, body)
        if body.stream:
            frames = _frames(worker, job, shape, body.stream_options or WorkerStreamOptions())
            return await EventStream.open(frames, watch, on_error=partial(log_error, "stream_broke_off"))
        with watch.guard():
            whole = await _whole(worker, job, shape)
        watch.close()
        return json_reply(whole)
    except BaseException:
        watch.close()
        raise


async def _whole(worker: WorkerRuntime, job: GenerationJob, shape: Shape) -> Body:
    text: list[str] = []
    tokens: list[Token] = []
    async with worker.generations.open(job) as generation, aclosing(generation.chunks()) as pieces:
        async for piece in pieces:
            text.append(piece.text)
            tokens.extend(piece.tokens)
        usage = await generation.finish()
        return shape.whole("".join(text), tokens, generation, usage)


async def _frames(
    worker: WorkerRuntime, job: GenerationJob, shape: Shape, options: WorkerStreamOptions
) -> AsyncGenerator[bytes, None]:
    """The first frames come with the first piece, and say where the prompt came from; the last ones also say what was
    stored."""
    async with worker.generations.open(job) as generation, aclosing(generation.chunks()) as pieces:
        opening, first = shape.opening(), True
        async for piece in spaced(pieces, options.interval_ms / 1000):
            chunks = [*opening, shape.piece(piece)]
            if first:
                chunks[0]["kv_transfer_params"] = generation.usage.model_dump()
            yield b"".join(map(event, chunks))
            opening, first = [], False
        usage = await generation.finish()
        closing = [*opening, shape.finish(generation.finish_reason)]
        if options.include_usage:
            closing.append(shape.usage(generation))
        closing[-1]["kv_transfer_params"] = usage.model_dump()
        ending = b"".join(map(event, closing))
    yield ending + DONE


async def spaced(
    pieces: AsyncIterator[GenerationChunk], interval_s: float, *, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[GenerationChunk]:
    """The first piece at once, then what has come at intervals of at least `interval_s`, and the rest at the end."""
    held: list[GenerationChunk] = []
    sent_at = -math.inf
    async for piece in pieces:
        held.append(piece)
        if (now := clock()) - sent_at >= interval_s:
            yield _joined(held)
            held, sent_at = [], now
    if held:
        yield _joined(held)


def _joined(pieces: Sequence[GenerationChunk]) -> GenerationChunk:
    text = "".join(piece.text for piece in pieces)
    return GenerationChunk(text, tuple(token for piece in pieces for token in piece.tokens))


async def answer_job(worker: WorkerRuntime, request: ChatRequest | CompletionRequest) -> GenerationJob:
    """Tokenize the prompt, check limits and sampling. Raises `InvalidRequest`, `ContextLengthExceeded`,
    `ModelNotFound`, before any work has begun."""
    arrived = time.monotonic()
    worker.check_model(request.model)
    rules = None
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        rules = _rules(worker, request.response_format)
        prompt = await worker.prompts.encode_chat(request)
        num_top, max_tokens = request.top_logprobs, request.max_completion_tokens or request.max_tokens
    else:
        prompt = await worker.prompts.encode_completion(request)
        num_top, max_tokens = request.logprobs or 0, request.max_tokens
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    num_prompt = len(prompt.token_ids)
    worker.prompts.check_length(num_prompt, max_tokens or 1)
    if request.seed is not None and request.seed not in SEEDS:
        raise InvalidRequest(f"seed {request.seed} is not between {SEEDS[0]} and {SEEDS[-1]}", param="seed")
    return GenerationJob(
        prompt=prompt,
        sampling=Sampling(request.temperature, request.top_p, request.seed, num_top, rules),
        max_tokens=max_tokens or worker.engine.model.max_model_len - num_prompt,
        stops=_stops(request.stop),
        params=request.kv_transfer_params or KVTransferParams(),
        salt=request.tenant_salt,
        arrived=arrived,
        deadline=None if request.deadline_ms is None else arrived + request.deadline_ms / 1e3,
        priority=request.priority,
    )


def _rules(worker: WorkerRuntime, form: ResponseFormat | None) -> dict[str, Any] | None:
    """The rules that the engine enforces for this response format."""
    if form is None:
        return None
    supported = worker.engine.response_formats
    if form.type not in supported:
        raise InvalidRequest(
            f"response_format.type: {form.type!r} is not supported by {worker.engine.model.name!r}; "
            f"supported: {', '.join(supported)}",
            param="response_format.type",
        )
    return form.rules


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or "" in stops:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, none of them empty", param="stop")
    return stops
