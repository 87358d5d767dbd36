"""JSON mode: passed on to models whose engine has it, refused of others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.stack import Stack, in_process, report
from workers.api.errors import WorkerUnavailable

JSON = {"type": "json_object"}
FOLLOWING: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": {"enum": ["yes", "no", None], "default": None}},
}
BOTH = ("text", "json_object", "json_schema")


async def having(stack: Stack, *, small: tuple[str, ...] = ("text",), large: tuple[str, ...] = ("text",)) -> None:
    stack.small.response_formats, stack.large.response_formats = small, large
    await stack.check_health()


def given(stack: Stack) -> list[Any]:
    """The forms that workers were asked for."""
    made = [worker.requests(call) for worker in (stack.small, stack.large) for call in ("chat", "cached_chat")]
    return [body.get("response_format") for bodies in made for body in bodies]


@pytest.mark.parametrize("form", [JSON, FOLLOWING], ids=lambda form: form["type"])
@pytest.mark.parametrize("escalates", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_passed_on_whole(stack: Stack, form: dict[str, Any], escalates: bool, stream: bool) -> None:
    """To every model that answers, nulls in the schema included."""
    await having(stack, small=BOTH, large=BOTH)
    stack.small.logprob = -9.0 if escalates else -0.1
    assert (await stack.chat(response_format=form, stream=stream)).status_code == 200
    forms = given(stack)
    assert len(forms) == 1 + escalates
    assert all(one["type"] == form["type"] for one in forms)
    if form is FOLLOWING:
        assert all(one["json_schema"]["schema"] == FOLLOWING["json_schema"]["schema"] for one in forms)


async def test_auto_chooses_among_those_that_have_it(stack: Stack) -> None:
    await having(stack, large=BOTH)
    assert report(await stack.chat(response_format=JSON))["tier"] == "large"
    assert given(stack) == [JSON | {"json_schema": None}]
    assert report(await stack.chat(response_format={"type": "text"}))["tier"] == "small"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "small"}, "response_format 'json_object' is not supported by 'fake-small'; supported: text"),
        ({"model": "auto", "kvrelay": {"max_tier": "small"}}, "is not supported by 'fake-small'"),
    ],
)
async def test_another_is_named_with_what_it_has(stack: Stack, fields: dict[str, Any], message: str) -> None:
    await having(stack, large=BOTH)
    refused = await stack.chat(response_format=JSON, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.type")
    assert message in refused.json()["error"]["message"]
    assert not given(stack)


async def test_where_none_has_it_all_are_named(stack: Stack) -> None:
    refused = await stack.chat(response_format=JSON)
    assert refused.status_code == 400
    assert "'fake-small' or 'fake-large'; supported: text" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        (JSON | {"json_schema": FOLLOWING["json_schema"]}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
    ],
)
async def test_a_form_that_is_none_is_refused(form: dict[str, Any], param: str) -> None:
    async with in_process() as stack:
        await having(stack, small=BOTH, large=BOTH)
        refused = await stack.chat(response_format=form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_what_no_worker_was_there_to_tell_is_no_refusal() -> None:
    """A client that is told 400 does not come again."""
    async with in_process() as stack:
        for worker in stack.app.state.gateway.parts.fleet.workers:
            worker.info = None
        stack.small.fail("chat", WorkerUnavailable("gone"))
        assert (await stack.chat(model="small", response_format=JSON)).status_code == 502
