"""What the worker is, how it tokenizes a prompt, and its bundles."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.api.http.replies import json_reply
from workers.api.schemas import Prompt, TokenizeReply
from workers.serving.worker import Worker

router = APIRouter(prefix="/v1")


@router.get("/info")
async def info(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    return json_reply(worker.info)


@router.post("/tokenize")
async def tokenize(body: Prompt, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    tokens = await worker.prompts.read(body)
    return json_reply(
        TokenizeReply(
            token_ids=tokens.token_ids, num_tokens=len(tokens.token_ids), stable_tokens=tokens.stable_tokens
        )
    )


@router.post("/bundles/{bundle_id}/resume")
async def resume(bundle_id: str, request: Request) -> Response:
    """Use a bundle again that was switched off in service."""
    worker: Worker = request.app.state.worker
    return json_reply(worker.shadow.resume(bundle_id))
