"""What a prompt reads as, and what the worker is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.api.schemas import Prompt, TokenizeReply
from workers.routes.replies import json_reply
from workers.serving.worker import Worker

router = APIRouter(prefix="/v1")


@router.post("/tokenize")
async def tokenize(body: Prompt, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    tokens = await worker.prompts.read(body)
    return json_reply(
        TokenizeReply(
            token_ids=tokens.token_ids, num_tokens=len(tokens.token_ids), stable_tokens=tokens.stable_tokens
        )
    )


@router.get("/info")
async def info(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    return json_reply(worker.info)
