"""Invalid input gets an error in the OpenAI shape, with the value and what is allowed; others are not affected."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from gateway.schemas import ChatCompletionRequest
from tests.gateway.stack import LONG, MESSAGES, USER, Stack, in_process
from workers.api.errors import InvalidRequest, Overloaded

ENDLESS = "x" * 10_000


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    assert reply.headers["x-request-id"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system', 'developer', 'user'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"temperature": 3}, "temperature", "less than or equal to 2; got 3"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1; got 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**70}, "seed", "seed"),
        ({"n": 2}, "n", "Input should be 1; got 2"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "supported: text"),
        ({"tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"presence_penalty": 0.5}, "presence_penalty", "Input should be 0"),
        ({"colour": "red"}, "colour", "unknown field 'colour'; known: model, temperature"),
        ({"kv_transfer_params": {"cache_id": "../etc"}}, "kv_transfer_params.cache_id", "match pattern"),
        ({"kvrelay": {"polcy": "x"}}, "kvrelay.polcy", "not permitted"),
        ({"kvrelay": {"policy": "best"}}, "kvrelay.policy", "unknown policy 'best'; known: fixed, confidence"),
        ({"kvrelay": {"max_tier": "huge"}}, "kvrelay.max_tier", "unknown tier 'huge'; known: small, large"),
        ({"kvrelay": {"agreement_probe": 65}}, "kvrelay.agreement_probe", "less than or equal to 64"),
        ({"model": "large", "kvrelay": {"max_tier": "small"}}, "kvrelay.max_tier", "'large' is above"),
        ({"model": "large", "kvrelay": {"policy": "fixed"}}, "kvrelay.policy", "'auto' instead of 'large'"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "not permitted"),
    ],
)
async def test_invalid_value_is_named(stack: Stack, fields: dict[str, Any], param: str, message: str) -> None:
    reply = await stack.http.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES} | fields)
    error = error_of(reply)
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert message in error["message"]
    assert stack.small.calls == [call for call in stack.small.calls if call.name in ("info", "readyz")]


async def test_unknown_model_is_a_404_that_lists_the_known_ones(stack: Stack) -> None:
    reply = await stack.chat(model="gpt-17")
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (404, "model_not_found")
    assert "'gpt-17'; known: auto, small, fake-small, large, fake-large" in error["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "an object is needed"),
        (b'{"model": "auto", "messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
        (b'{"model": "auto", "tools": ' + b"[" * 80 + b"]" * 80 + b"}", "nested more than 64"),
        (b'{"model": "auto", "messages": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
    ids=["empty", "cut", "array", "surrogate", "deep", "nan", "binary"],
)
async def test_malformed_body_is_a_400(stack: Stack, raw: bytes, message: str) -> None:
    reply = await stack.http.post("/v1/chat/completions", content=raw)
    assert reply.status_code == 400
    assert message in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("stream", "yes"),
        ("temperature", "0.5"),
        ("logprobs", 1),
        ("n", True),
        ("presence_penalty", False),
        ("frequency_penalty", False),
    ],
)
async def test_value_of_another_type_is_not_coerced(stack: Stack, field: str, value: Any) -> None:
    reply = await stack.chat(**{field: value})
    assert (reply.status_code, error_of(reply)["param"]) == (400, field)


@pytest.mark.parametrize("given", [{"include_usage": "yes"}, {"include_usage": 1}])
async def test_nested_value_of_another_type_is_not_coerced(stack: Stack, given: dict[str, Any]) -> None:
    reply = await stack.chat(stream=True, stream_options=given)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "stream_options.include_usage")


@pytest.mark.parametrize("given", [{"best_of": True}, {"echo": 0}])
async def test_value_of_another_type_is_not_coerced_in_text_completions(stack: Stack, given: dict[str, Any]) -> None:
    reply = await stack.http.post("/v1/completions", json={"model": "auto", "prompt": "Hello"} | given)
    assert (reply.status_code, error_of(reply)["param"]) == (400, *given)


NULLS = ["temperature", "top_p", "n", "stream", "stop", "seed", "user", "kvrelay", "logit_bias"]


@pytest.mark.parametrize(
    ("path", "nulls"),
    [
        ("chat/completions", dict.fromkeys([*NULLS, "logprobs", "top_logprobs", "tools", "functions"])),
        ("chat/completions", {"kvrelay": dict.fromkeys(["policy", "max_tier", "exact", "explain", "agreement_probe"])}),
        ("completions", dict.fromkeys([*NULLS, "echo", "best_of", "logprobs", "suffix"])),
        ("prefix/prefill", dict.fromkeys(["tools", "stable_messages", "ttl_s", "messages"])),
    ],
)
async def test_null_means_the_default(stack: Stack, path: str, nulls: dict[str, Any]) -> None:
    text = {"prefix": "Hello"} if path == "prefix/prefill" else {"model": "auto", "prompt": "Hello"}
    body = {"model": "auto", "messages": MESSAGES} if path == "chat/completions" else text
    reply = await stack.http.post(f"/v1/{path}", json=body | nulls)
    assert reply.status_code == 200, reply.text


async def test_null_in_a_required_field_means_missing(stack: Stack) -> None:
    error = error_of(await stack.chat(model=None))
    assert (error["param"], error["message"]) == ("model", "model: this field is required")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": ENDLESS},
        {"model": ENDLESS},
        {ENDLESS: 1},
        {"kvrelay": {"policy": ENDLESS}},
        {"kvrelay": {"max_tier": ENDLESS}},
        {"kvrelay": {ENDLESS: 1}},
        {"stream_options": {ENDLESS: 1}},
    ],
)
async def test_long_value_or_name_is_clipped_in_the_error(stack: Stack, fields: dict[str, Any]) -> None:
    reply = await stack.http.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES} | fields)
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 1000


async def test_bodies_and_headers_are_bounded() -> None:
    async with in_process(limits={"max_body_bytes": 2000, "max_header_bytes": 2000, "max_messages": 3}) as stack:
        too_large = await stack.chat()
        assert (too_large.status_code, error_of(too_large)["code"]) == (413, "request_too_large")
        assert "at most 2000" in error_of(too_large)["message"]

        async def drip() -> Any:
            for _ in range(50):
                yield b" " * 100

        chunked = await stack.http.post("/v1/chat/completions", content=drip())
        assert (chunked.status_code, error_of(chunked)["code"]) == (413, "request_too_large")
        headers = await stack.http.get("/v1/models", headers={"x-padding": "x" * 3000})
        assert (headers.status_code, error_of(headers)["code"]) == (431, "headers_too_large")
        many = await stack.chat([{"role": "user", "content": "x"}] * 4)
        assert (many.status_code, error_of(many)["param"]) == (413, "messages")


@pytest.mark.parametrize(
    "field", [{"metadata": [[]] * 40_000}, {"stop": ["x"] * 40_000}, {"messages": [{}] * 40_000}], ids=min
)
async def test_body_with_too_many_values_is_a_413(stack: Stack, field: dict[str, Any]) -> None:
    reply = await stack.chat(**field)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
    assert "more than 32768 values" in error_of(reply)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 1000},
        {"messages": [USER | {"content": [{}] * 1000}]},
        {"messages": [USER | {"tool_calls": [{}] * 1000}]},
        {"stop": [1] * 1000},
        {"tools": [1] * 1000},
    ],
    ids=["messages", "parts", "calls", "stop", "tools"],
)
def test_validation_stops_at_the_first_invalid_item(fields: dict[str, Any]) -> None:
    """Describing them all would block the event loop for a second."""
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({"model": "auto", "messages": [USER]} | fields)
    assert refused.value.error_count() <= 3


COUNTLESS = {f"field_{number}": 1 for number in range(1000)}


@pytest.mark.parametrize(
    "fields", [COUNTLESS, {"kvrelay": COUNTLESS}, {"response_format": {"json_schema": COUNTLESS}}], ids=min
)
async def test_object_with_too_many_fields_is_a_413(stack: Stack, fields: dict[str, Any]) -> None:
    reply = await stack.http.post("/v1/chat/completions", json={"model": "auto", "messages": [USER]} | fields)
    assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
    assert "more than 256 fields" in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/models/gpt-17", 404),
    ],
)
async def test_unknown_routes_and_methods(stack: Stack, method: str, path: str, status: int) -> None:
    reply = await stack.http.request(method, path)
    assert reply.status_code == status
    assert error_of(reply)["type"] == "invalid_request_error"


async def test_bad_requests_do_not_open_the_circuit(stack: Stack) -> None:
    stack.large.fail("chat", InvalidRequest("bad", param="messages"))
    for _ in range(20):
        assert (await stack.chat(model="large")).status_code == 400
    stack.large.heal()
    assert (await stack.chat(model="large")).status_code == 200
    assert stack.metric("circuit_state", target="large-0") == 0


async def test_failing_worker_opens_the_circuit(stack: Stack) -> None:
    stack.small.garble("prefill")
    for _ in range(8):
        await stack.chat()
    assert stack.metric("circuit_state", target="small-0") == 2
    assert len(stack.small.requests("prefill")) == 4, "no calls while the circuit is open"
    assert stack.metric("circuit_transitions_total", target="small-0", to="open") == 1


async def test_failing_transfers_open_a_circuit_of_their_own(stack: Stack) -> None:
    stack.large.garble("transfer")
    prompts = [[{"role": "user", "content": f"{number} {LONG}"}] for number in range(6)]
    paths = [(await stack.escalate(prompt)).headers["x-kvrelay-path"] for prompt in prompts]
    assert paths[3:] == ["fallback:worker_unavailable", "fallback:circuit_open", "fallback:circuit_open"]
    assert stack.metric("circuit_state", target="large-0/transfer") == 2
    assert stack.metric("circuit_state", target="large-0") == 0


async def test_full_queue_of_a_worker_is_a_503_with_retry_after(stack: Stack) -> None:
    stack.large.fail("chat", Overloaded("the queue is full", retry_after_s=4))
    reply = await stack.chat(model="large")
    assert (reply.status_code, error_of(reply)["type"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "4"


async def test_tenant_over_its_share_gets_a_429() -> None:
    async with in_process(limits={"max_concurrency_per_tenant": 1}) as stack:
        stack.large.delay("chat", 0.3)
        replies = await asyncio.gather(*(stack.chat(model="large") for _ in range(3)))
        assert sorted(reply.status_code for reply in replies) == [200, 429, 429]
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1


async def test_queue_of_a_tier_is_bounded() -> None:
    async with in_process(limits={"max_concurrency_per_tier": 1, "max_queue_per_tier": 1}) as stack:
        stack.large.delay("chat", 0.2)
        replies = await asyncio.gather(*(stack.chat(model="large") for _ in range(4)))
        assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503]
        assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 503)


async def test_full_small_tier_falls_back() -> None:
    async with in_process(limits={"max_concurrency_per_tier": 1, "max_queue_per_tier": 1}) as stack:
        stack.small.delay("prefill", 0.2)
        replies = await asyncio.gather(*(stack.chat() for _ in range(3)))
        assert [reply.status_code for reply in replies] == [200] * 3
        assert any(reply.headers["x-kvrelay-path"] == "fallback:small_overloaded" for reply in replies)


@pytest.mark.parametrize("offered", ["abc-123", "A" * 128])
async def test_well_formed_request_id_is_kept(stack: Stack, offered: str) -> None:
    reply = await stack.http.get("/v1/models", headers={"x-request-id": offered})
    assert reply.headers["x-request-id"] == offered


@pytest.mark.parametrize("offered", ["", "a b", "A" * 129, "x\ty", "<script>"])
async def test_malformed_request_id_is_replaced(stack: Stack, offered: str) -> None:
    reply = await stack.http.get("/v1/models", headers={"x-request-id": offered})
    assert reply.headers["x-request-id"] not in ("", offered)


async def test_bug_is_a_500_in_the_openai_shape(stack: Stack) -> None:
    stack.app.state.gateway.current.tenants = None
    reply = await stack.http.get("/v1/models")
    assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")
    assert "NoneType" not in reply.text
    assert stack.metric("requests_total", model="none", status="500") == 1


class Repeating:
    """A bug whose message contains client input."""

    def authenticate(self, authorization: str | None) -> None:
        raise ValueError(f"bad header {authorization}")


async def test_bug_is_logged_with_its_traceback_but_not_its_message(stack: Stack) -> None:
    stack.app.state.gateway.current.tenants = Repeating()
    with capture_logs() as logged:
        await stack.http.get("/v1/models", headers={"authorization": "canary"})
    (bug,) = [line for line in logged if line["event"] == "internal_error"]
    assert bug["error"] == "ValueError"
    assert "in authenticate" in bug["traceback"][-1]
    assert "canary" not in str(logged)
