"""From a request of the OpenAI API to an `AnswerJob`: prompt, limits, sampling. Refuses by name what cannot be done."""

from __future__ import annotations

import time
from typing import Any

from workers.api.errors import InvalidRequest
from workers.api.schemas import ChatRequest, CompletionRequest, KVTransferParams, ResponseFormat
from workers.engines.base import Sampling
from workers.engines.tokenizer import PromptTokens
from workers.serving.answer import AnswerJob
from workers.serving.worker import Worker

MAX_STOPS = 16
SEEDS = range(-(2**63), 2**64)  # what a torch generator takes


async def chat_job(worker: Worker, request: ChatRequest) -> AnswerJob:
    """Raises `InvalidRequest`, `ContextLengthExceeded`, `ModelNotFound`; no work has begun then."""
    arrived = time.monotonic()
    worker.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    rules = _rules(worker, request.response_format)
    prompt = await worker.prompts.read_chat(request)
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _job(worker, request, prompt, arrived, max_tokens, num_top=request.top_logprobs, rules=rules)


async def completion_job(worker: Worker, request: CompletionRequest) -> AnswerJob:
    """Errors as `chat_job`."""
    arrived = time.monotonic()
    worker.check_model(request.model)
    prompt = await worker.prompts.read_completion(request)
    return _job(worker, request, prompt, arrived, request.max_tokens, num_top=request.logprobs or 0)


def _job(
    worker: Worker,
    request: ChatRequest | CompletionRequest,
    prompt: PromptTokens,
    arrived: float,
    max_tokens: int | None,
    *,
    num_top: int,
    rules: dict[str, Any] | None = None,
) -> AnswerJob:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    num_prompt = len(prompt.token_ids)
    worker.prompts.check_length(num_prompt, max_tokens or 1)
    return AnswerJob(
        prompt=prompt,
        sampling=Sampling(request.temperature, request.top_p, _seed(request.seed), num_top, rules),
        max_tokens=max_tokens or worker.engine.model.max_model_len - num_prompt,
        stops=_stops(request.stop),
        params=request.kv_transfer_params or KVTransferParams(),
        salt=request.tenant_salt,
        arrived=arrived,
        deadline=None if request.deadline_ms is None else arrived + request.deadline_ms / 1e3,
        priority=request.priority,
    )


def _rules(worker: Worker, form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    known = worker.engine.response_formats
    if form.type not in known:
        raise InvalidRequest(
            f"response_format.type: {worker.engine.model.name!r} has no {form.type!r}; allowed: {', '.join(known)}",
            param="response_format.type",
        )
    return form.rules


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or "" in stops:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, none of them empty", param="stop")
    return stops


def _seed(seed: int | None) -> int | None:
    if seed is not None and seed not in SEEDS:
        raise InvalidRequest(f"seed {seed} is not between {SEEDS[0]} and {SEEDS[-1]}", param="seed")
    return seed
