"""JSON mode: what a worker over vLLM writes follows the schema that was asked for."""

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


def following(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_it_says_that_it_can(served: ServedWorker) -> None:
    assert (await served.client.info()).response_formats == ["text", "json_object", "json_schema"]


@pytest.mark.parametrize("form", [{"type": "json_object"}, following(SCHEMA)], ids=lambda form: form["type"])
@pytest.mark.parametrize("num_turns", [1, 4])
async def test_the_answer_follows(served: ServedWorker, form: dict[str, Any], num_turns: int) -> None:
    """Over a prompt that is read and over one that is found; with the log-probabilities that a policy judges by."""
    for _ in range(2):
        reply = await served.chat(TALK * num_turns, max_tokens=300, temperature=1, seed=5, logprobs=True, **asked(form))
        answer = json.loads(content(reply))
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert answer in ({"is_quick": True}, {"is_quick": None}) or form["type"] == "json_object"
        assert isinstance(answer, dict) and reply["choices"][0]["logprobs"]["content"]


async def test_a_schema_that_is_none_is_refused_and_harms_nobody(served: ServedWorker) -> None:
    with pytest.raises(InvalidRequest, match="nonsense"):
        await served.chat(max_tokens=20, **asked(following({"type": "nonsense"})))
    assert json.loads(content(await served.chat(max_tokens=300, seed=5, **asked({"type": "json_object"})))) is not None


def asked(form: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": form}
