"""What the worker is, how it tokenizes a prompt, and its bundles."""

from __future__ import annotations

from fastapi import APIRouter

from workers.api.schemas import BundleInfo, Prompt, TokenizeReply, WorkerInfo
from workers.routes.edge import ServedWorker

router = APIRouter(prefix="/v1")


@router.get("/info")
async def info(worker: ServedWorker) -> WorkerInfo:
    return worker.info


@router.post("/tokenize")
async def tokenize(body: Prompt, worker: ServedWorker) -> TokenizeReply:
    tokens = await worker.prompts.encode(body)
    return TokenizeReply(
        token_ids=tokens.token_ids, num_tokens=len(tokens.token_ids), stable_tokens=tokens.stable_tokens
    )


@router.post("/bundles/{bundle_id}/resume")
async def resume(bundle_id: str, worker: ServedWorker) -> BundleInfo:
    """Use a bundle again that was switched off in service."""
    return worker.shadow.resume(bundle_id)
