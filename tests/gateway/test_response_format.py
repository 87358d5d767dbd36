"""JSON mode: forwarded to models that support it, refused for others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.stack import Stack, in_process, report
from workers.api.errors import WorkerUnavailable

JSON_OBJECT = {"type": "json_object"}
JSON_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": {"enum": ["yes", "no", None], "default": None}},
}
ALL_FORMATS = ("text", "json_object", "json_schema")


async def set_formats(stack: Stack, *, small: tuple[str, ...] = ("text",), large: tuple[str, ...] = ("text",)) -> None:
    stack.small.response_formats, stack.large.response_formats = small, large
    await stack.check_health()


def requested_formats(stack: Stack) -> list[Any]:
    """Return the formats in the requests that workers received."""
    requests = [worker.requests(call) for worker in (stack.small, stack.large) for call in ("chat", "cached_chat")]
    return [body.get("response_format") for bodies in requests for body in bodies]


@pytest.mark.parametrize("wanted", [JSON_OBJECT, JSON_SCHEMA], ids=lambda wanted: wanted["type"])
@pytest.mark.parametrize("escalates", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_format_is_forwarded_unchanged(
    stack: Stack, wanted: dict[str, Any], escalates: bool, stream: bool
) -> None:
    """Every answering model receives it, nulls in the schema included."""
    await set_formats(stack, small=ALL_FORMATS, large=ALL_FORMATS)
    stack.small.logprob = -9.0 if escalates else -0.1
    assert (await stack.chat(response_format=wanted, stream=stream)).status_code == 200
    formats = requested_formats(stack)
    assert len(formats) == 1 + escalates
    assert all(one["type"] == wanted["type"] for one in formats)
    if wanted is JSON_SCHEMA:
        assert all(one["json_schema"]["schema"] == JSON_SCHEMA["json_schema"]["schema"] for one in formats)


async def test_auto_chooses_a_model_that_supports_the_format(stack: Stack) -> None:
    await set_formats(stack, large=ALL_FORMATS)
    assert report(await stack.chat(response_format=JSON_OBJECT))["tier"] == "large"
    assert requested_formats(stack) == [JSON_OBJECT | {"json_schema": None}]
    assert report(await stack.chat(response_format={"type": "text"}))["tier"] == "small"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "small"}, "response_format 'json_object' is not supported by 'fake-small'; supported: text"),
        ({"model": "auto", "kvrelay": {"max_tier": "small"}}, "is not supported by 'fake-small'"),
    ],
)
async def test_a_refusal_lists_the_formats_of_the_model(stack: Stack, fields: dict[str, Any], message: str) -> None:
    await set_formats(stack, large=ALL_FORMATS)
    refused = await stack.chat(response_format=JSON_OBJECT, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.type")
    assert message in refused.json()["error"]["message"]
    assert not requested_formats(stack)


async def test_a_refusal_lists_all_models_if_none_supports_the_format(stack: Stack) -> None:
    refused = await stack.chat(response_format=JSON_OBJECT)
    assert refused.status_code == 400
    assert "'fake-small' or 'fake-large'; supported: text" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        (JSON_OBJECT | {"json_schema": JSON_SCHEMA["json_schema"]}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
    ],
)
async def test_a_malformed_format_is_refused(wanted: dict[str, Any], param: str) -> None:
    async with in_process() as stack:
        await set_formats(stack, small=ALL_FORMATS, large=ALL_FORMATS)
        refused = await stack.chat(response_format=wanted)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_unknown_support_is_not_a_refusal() -> None:
    """Clients do not retry after status 400."""
    async with in_process() as stack:
        for worker in stack.app.state.gateway.parts.fleet.workers:
            worker.info = None
        stack.small.fail("chat", WorkerUnavailable("gone"))
        assert (await stack.chat(model="small", response_format=JSON_OBJECT)).status_code == 502
