"""Clients that manage caches themselves: `/v1/prefix/prefill`, `/v1/cache/transfer`, and answers from both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.gateway.stack import MESSAGES, SYSTEM, Stack, in_process, report, right_answer, text
from tests.gateway.test_tenants import KEYS, TENANTS, key
from workers.api.errors import BundleUnusable, CacheNotFound, TransferFailed
from workers.api.logs import add_request_id

UNKNOWN = "kvc-" + "0" * 32


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process(tenants=TENANTS) as stack:
        yield stack


async def post(stack: Stack, path: str, tenant: str = "acme", **body: Any) -> httpx.Response:
    return await stack.http.post(f"/v1/{path}", json=body, headers=key(tenant))


async def made(stack: Stack, tenant: str = "acme", **fields: Any) -> dict[str, Any]:
    reply = await post(stack, "prefix/prefill", tenant, **({"messages": [SYSTEM]} | fields))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def mapped(stack: Stack, cache_id: str, tenant: str = "acme") -> httpx.Response:
    return await post(stack, "cache/transfer", tenant, cache_id=cache_id, target_model="fake-large")


async def ask(stack: Stack, cache_id: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
    body = {"model": "auto", "messages": MESSAGES, "kv_transfer_params": {"cache_id": cache_id}} | fields
    return await post(stack, "chat/completions", tenant, **body)


async def test_a_prefix_is_read_handed_over_and_answered_from(stack: Stack) -> None:
    read = await made(stack)
    assert (read["model"], read["cached_tokens"]) == ("fake-small", 0)
    assert read["num_tokens"] == len(stack.small.caches[read["cache_id"]].tokens)
    from_small = await ask(stack, read["cache_id"])
    assert (text(from_small), report(from_small)["path"]) == (right_answer(stack.small, MESSAGES), "exact")
    handed = (await mapped(stack, read["cache_id"])).json()
    assert (handed["model"], handed["mapper"]) == ("fake-large", "fake-bundle")
    from_large = await ask(stack, handed["cache_id"])
    assert (text(from_large), report(from_large)["path"]) == (right_answer(stack.large, MESSAGES), "mapped")
    assert report(from_large)["mapped_tokens"] > 500 and report(from_large)["mapper"] == "fake-bundle"
    assert "worker" not in read | handed, "where a cache stands is nobody's business"


async def test_a_text_is_read_too(stack: Stack) -> None:
    read = await made(stack, messages=None, prefix="once upon a time", target_model="large")
    params = {"cache_id": read["cache_id"]}
    prompt = "once upon a time there"
    reply = await post(stack, "completions", model="large", prompt=prompt, kv_transfer_params=params)
    assert (report(reply)["path"], report(reply)["cached_tokens"]) == ("exact", 4)


@pytest.mark.parametrize("foreign", [True, False], ids=["anothers", "unknown"])
async def test_an_id_of_another_tenant_is_as_unknown_as_one_that_never_was(stack: Stack, foreign: bool) -> None:
    cache_id = (await made(stack, "default"))["cache_id"] if foreign else UNKNOWN
    refused = await mapped(stack, cache_id)
    message = f"cache_id: unknown cache {cache_id}; prefill its prefix again"
    error = {"message": message, "type": "invalid_request_error", "param": "cache_id", "code": "cache_not_found"}
    assert (refused.status_code, refused.json()) == (404, {"error": error})
    reply = await ask(stack, cache_id)
    assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "fallback:cache_not_found")
    assert not stack.large.requests("transfer")
    assert not stack.large.requests("cached_chat") + stack.small.requests("cached_chat")


async def test_a_cache_that_its_worker_lost_is_a_full_prefill(stack: Stack) -> None:
    read = await made(stack)
    stack.small.caches.clear()
    reply = await ask(stack, read["cache_id"])
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert report(reply)["path"] == "fallback:small_cache_not_found"
    stack.small.restart()
    await stack.check_health()
    assert (await mapped(stack, read["cache_id"])).status_code == 404


async def test_an_exact_answer_takes_no_mapped_cache(stack: Stack) -> None:
    handed = (await mapped(stack, (await made(stack))["cache_id"])).json()
    reply = await ask(stack, handed["cache_id"], kvrelay={"exact": True})
    assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "fallback:cache_mismatch")
    assert report(await ask(stack, handed["cache_id"]))["path"] == "mapped", "it is there as before"


async def test_what_cannot_be_handed_over(stack: Stack) -> None:
    read = await made(stack)
    same = await post(stack, "cache/transfer", cache_id=read["cache_id"], target_model="small")
    assert (same.status_code, same.json()["error"]["param"]) == (400, "target_model")
    handed = (await mapped(stack, read["cache_id"])).json()
    again = await post(stack, "cache/transfer", cache_id=handed["cache_id"], target_model="small")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "cache_id")
    for error, status, code in (
        (BundleUnusable("at /secret/path"), 409, "no_mapper"),
        (TransferFailed("at 10.0.0.7"), 502, "upstream_error"),
        (CacheNotFound("gone"), 404, "cache_not_found"),
    ):
        stack.large.fail("transfer", error)
        refused = await mapped(stack, read["cache_id"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert error.message not in refused.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("prefix/prefill", {}, None),
        ("prefix/prefill", {"prefix": "x", "messages": [SYSTEM]}, None),
        ("prefix/prefill", {"prefix": "x", "stable_messages": 1}, None),
        ("prefix/prefill", {"messages": [SYSTEM], "stable_messages": 2}, None),
        ("prefix/prefill", {"prefix": "x", "ttl_s": 0}, "ttl_s"),
        ("prefix/prefill", {"prefix": "x", "token_ids": [1]}, "token_ids"),
        ("cache/transfer", {"cache_id": "../etc", "target_model": "large"}, "cache_id"),
        ("cache/transfer", {"cache_id": UNKNOWN}, "target_model"),
        ("cache/transfer", {"cache_id": UNKNOWN, "target_model": "large", "source_worker": "x"}, "source_worker"),
        ("chat/completions", {"model": "auto", "messages": MESSAGES, "kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
async def test_bad_values_are_named(stack: Stack, path: str, body: dict[str, Any], param: str | None) -> None:
    reply = await post(stack, path, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param or "")


@pytest.mark.parametrize(
    ("path", "of"), [("prefix/prefill", {"prefix": "x"}), ("cache/transfer", {"cache_id": UNKNOWN})]
)
async def test_an_unknown_model_is_named_by_its_field(stack: Stack, path: str, of: dict[str, Any]) -> None:
    reply = await post(stack, path, target_model="gpt-17", **of)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "target_model")


@pytest.mark.parametrize("option", [{"no_cache": True}, {"policy": "fixed"}])
async def test_a_named_cache_excludes_other_options(stack: Stack, option: dict[str, Any]) -> None:
    refused = await ask(stack, UNKNOWN, kvrelay=option)
    assert refused.status_code == 400 and "kv_transfer_params cannot be combined with" in refused.text


async def test_another_model_than_the_caches_is_refused(stack: Stack) -> None:
    read = await made(stack)
    refused = await ask(stack, read["cache_id"], model="large")
    assert (refused.status_code, "its model is 'small'" in refused.text) == (400, True)


@pytest.mark.parametrize("path", ["prefix/prefill", "cache/transfer"])
async def test_nobody_reads_or_maps_without_a_key(stack: Stack, path: str) -> None:
    assert (await stack.http.post(f"/v1/{path}", json={})).status_code == 401


async def test_models_and_minutes_bound_them_too() -> None:
    bounds = {"models": ["small"], "requests_per_minute": 4, "tokens_per_minute": 700}
    async with in_process(tenants=TENANTS | {"acme": TENANTS["acme"] | bounds}) as stack:
        refused = await post(stack, "prefix/prefill", prefix="x", target_model="large")
        assert refused.status_code == 403
        assert (await mapped(stack, UNKNOWN)).status_code == 403
        for _ in range(2):
            await made(stack)
        spent = await post(stack, "prefix/prefill", prefix="x")
        assert (spent.status_code, spent.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_every_access_leaves_a_line(stack: Stack) -> None:
    with capture_logs([add_request_id]) as logged:
        read = await made(stack, tenant_salt="ab" * 32)
        handed = (await mapped(stack, read["cache_id"])).json()
        await ask(stack, handed["cache_id"])
    lines = [line for line in logged if line["event"] == "cache_access"]
    assert [(line["access"], line["worker"], line["cache_id"]) for line in lines[:3]] == [
        ("written", "small-0", read["cache_id"]),
        ("transferred", "large-0", handed["cache_id"]),
        ("read", "large-0", handed["cache_id"]),
    ]
    assert {line["tenant"] for line in lines} == {"acme"} and len({line["request_id"] for line in lines}) == 3
    assert "word41" not in str(logged) and KEYS["acme"] not in str(logged)
    assert stack.small.requests("prefill")[0]["tenant_salt"] != "ab" * 32
