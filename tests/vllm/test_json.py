"""JSON mode: answers of a worker over vLLM follow the requested schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.vllm.test_worker import on_vllm
from tests.workers.server.support import TALK, ServedWorker, content
from workers.api.errors import InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {"is_quick": {"enum": [True, None]}},
    "required": ["is_quick"],
    "additionalProperties": False,
}

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(installed: None, folder: Path) -> AsyncIterator[ServedWorker]:
    async with on_vllm(folder, id="json") as served:
        yield served


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_info_lists_json_formats(served: ServedWorker) -> None:
    assert (await served.client.info()).response_formats == ["text", "json_object", "json_schema"]


@pytest.mark.parametrize("form", [{"type": "json_object"}, schema_format(SCHEMA)], ids=lambda form: form["type"])
@pytest.mark.parametrize("num_turns", [1, 4])
async def test_answer_follows_the_format(served: ServedWorker, form: dict[str, Any], num_turns: int) -> None:
    """Over a prefilled and a cached prompt, with the logprobs that a policy scores."""
    for _ in range(2):
        reply = await served.chat(
            TALK * num_turns, max_tokens=300, temperature=1, seed=5, logprobs=True, **format_field(form)
        )
        answer = json.loads(content(reply))
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert answer in ({"is_quick": True}, {"is_quick": None}) or form["type"] == "json_object"
        assert isinstance(answer, dict) and reply["choices"][0]["logprobs"]["content"]


async def test_invalid_schema_is_rejected_and_later_requests_work(served: ServedWorker) -> None:
    with pytest.raises(InvalidRequest, match="nonsense"):
        await served.chat(max_tokens=20, **format_field(schema_format({"type": "nonsense"})))
    reply = await served.chat(max_tokens=300, seed=5, **format_field({"type": "json_object"}))
    assert json.loads(content(reply)) is not None


def format_field(form: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": form}
