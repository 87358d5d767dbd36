"""Caches managed by clients: `/v1/prefix/prefill`, `/v1/cache/transfer`, and answers from both."""

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


async def prefill(stack: Stack, tenant: str = "acme", **fields: Any) -> dict[str, Any]:
    reply = await post(stack, "prefix/prefill", tenant, **({"messages": [SYSTEM]} | fields))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def transfer(stack: Stack, cache_id: str, tenant: str = "acme") -> httpx.Response:
    return await post(stack, "cache/transfer", tenant, cache_id=cache_id, target_model="fake-large")


async def chat_from(stack: Stack, cache_id: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
    body = {"model": "auto", "messages": MESSAGES, "kv_transfer_params": {"cache_id": cache_id}} | fields
    return await post(stack, "chat/completions", tenant, **body)


async def test_a_prefix_is_prefilled_transferred_and_answered_from(stack: Stack) -> None:
    prefilled = await prefill(stack)
    assert (prefilled["model"], prefilled["cached_tokens"]) == ("fake-small", 0)
    assert prefilled["num_tokens"] == len(stack.small.caches[prefilled["cache_id"]].tokens)
    from_small = await chat_from(stack, prefilled["cache_id"])
    assert (text(from_small), report(from_small)["path"]) == (right_answer(stack.small, MESSAGES), "exact")
    mapped = (await transfer(stack, prefilled["cache_id"])).json()
    assert (mapped["model"], mapped["mapper"]) == ("fake-large", "fake-bundle")
    from_large = await chat_from(stack, mapped["cache_id"])
    assert (text(from_large), report(from_large)["path"]) == (right_answer(stack.large, MESSAGES), "mapped")
    assert report(from_large)["mapped_tokens"] > 500 and report(from_large)["mapper"] == "fake-bundle"
    assert "worker" not in prefilled | mapped, "clients do not see where a cache is stored"


async def test_a_text_prefix_is_prefilled(stack: Stack) -> None:
    prefilled = await prefill(stack, messages=None, prefix="once upon a time", target_model="large")
    params = {"cache_id": prefilled["cache_id"]}
    prompt = "once upon a time there"
    reply = await post(stack, "completions", model="large", prompt=prompt, kv_transfer_params=params)
    assert (report(reply)["path"], report(reply)["cached_tokens"]) == ("exact", 4)


@pytest.mark.parametrize("foreign", [True, False], ids=["other_tenant", "unknown"])
async def test_another_tenants_cache_is_reported_as_unknown(stack: Stack, foreign: bool) -> None:
    cache_id = (await prefill(stack, "default"))["cache_id"] if foreign else UNKNOWN
    refused = await transfer(stack, cache_id)
    message = f"cache_id: unknown cache {cache_id}; prefill its prefix again"
    error = {"message": message, "type": "invalid_request_error", "param": "cache_id", "code": "cache_not_found"}
    assert (refused.status_code, refused.json()) == (404, {"error": error})
    reply = await chat_from(stack, cache_id)
    assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "fallback:cache_not_found")
    assert not stack.large.requests("transfer")
    assert not stack.large.requests("cached_chat") + stack.small.requests("cached_chat")


async def test_a_cache_lost_by_its_worker_falls_back_to_a_full_prefill(stack: Stack) -> None:
    prefilled = await prefill(stack)
    stack.small.caches.clear()
    reply = await chat_from(stack, prefilled["cache_id"])
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert report(reply)["path"] == "fallback:small_cache_not_found"
    stack.small.restart()
    await stack.check_health()
    assert (await transfer(stack, prefilled["cache_id"])).status_code == 404


async def test_exact_does_not_use_a_mapped_cache(stack: Stack) -> None:
    mapped = (await transfer(stack, (await prefill(stack))["cache_id"])).json()
    reply = await chat_from(stack, mapped["cache_id"], kvrelay={"exact": True})
    assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "fallback:cache_mismatch")
    assert report(await chat_from(stack, mapped["cache_id"]))["path"] == "mapped", "the cache is still usable"


async def test_impossible_transfers_are_refused(stack: Stack) -> None:
    prefilled = await prefill(stack)
    same = await post(stack, "cache/transfer", cache_id=prefilled["cache_id"], target_model="small")
    assert (same.status_code, same.json()["error"]["param"]) == (400, "target_model")
    mapped = (await transfer(stack, prefilled["cache_id"])).json()
    again = await post(stack, "cache/transfer", cache_id=mapped["cache_id"], target_model="small")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "cache_id")
    for error, status, code in (
        (BundleUnusable("at /secret/path"), 409, "no_mapper"),
        (TransferFailed("at 10.0.0.7"), 502, "upstream_error"),
        (CacheNotFound("gone"), 404, "cache_not_found"),
    ):
        stack.large.fail("transfer", error)
        refused = await transfer(stack, prefilled["cache_id"])
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
async def test_invalid_values_are_named(stack: Stack, path: str, body: dict[str, Any], param: str | None) -> None:
    reply = await post(stack, path, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"] or "").startswith(param or "")


@pytest.mark.parametrize(
    ("path", "body"), [("prefix/prefill", {"prefix": "x"}), ("cache/transfer", {"cache_id": UNKNOWN})]
)
async def test_an_unknown_target_model_names_its_field(stack: Stack, path: str, body: dict[str, Any]) -> None:
    reply = await post(stack, path, target_model="gpt-17", **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "target_model")


@pytest.mark.parametrize("option", [{"no_cache": True}, {"policy": "fixed"}])
async def test_a_named_cache_excludes_other_options(stack: Stack, option: dict[str, Any]) -> None:
    refused = await chat_from(stack, UNKNOWN, kvrelay=option)
    assert refused.status_code == 400 and "kv_transfer_params cannot be combined with" in refused.text


async def test_a_model_other_than_the_caches_is_refused(stack: Stack) -> None:
    prefilled = await prefill(stack)
    refused = await chat_from(stack, prefilled["cache_id"], model="large")
    assert (refused.status_code, "its model is 'small'" in refused.text) == (400, True)


@pytest.mark.parametrize("path", ["prefix/prefill", "cache/transfer"])
async def test_prefill_and_transfer_require_a_key(stack: Stack, path: str) -> None:
    assert (await stack.http.post(f"/v1/{path}", json={})).status_code == 401


async def test_the_tenants_models_and_rate_limits_apply() -> None:
    bounds = {"models": ["small"], "requests_per_minute": 4, "tokens_per_minute": 700}
    async with in_process(tenants=TENANTS | {"acme": TENANTS["acme"] | bounds}) as stack:
        refused = await post(stack, "prefix/prefill", prefix="x", target_model="large")
        assert refused.status_code == 403
        assert (await transfer(stack, UNKNOWN)).status_code == 403
        for _ in range(2):
            await prefill(stack)
        spent = await post(stack, "prefix/prefill", prefix="x")
        assert (spent.status_code, spent.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_every_cache_access_is_logged(stack: Stack) -> None:
    with capture_logs([add_request_id]) as logged:
        prefilled = await prefill(stack, tenant_salt="ab" * 32)
        mapped = (await transfer(stack, prefilled["cache_id"])).json()
        await chat_from(stack, mapped["cache_id"])
    lines = [line for line in logged if line["event"] == "cache_access"]
    assert [(line["access"], line["worker"], line["cache_id"]) for line in lines[:3]] == [
        ("written", "small-0", prefilled["cache_id"]),
        ("transferred", "large-0", mapped["cache_id"]),
        ("read", "large-0", mapped["cache_id"]),
    ]
    assert {line["tenant"] for line in lines} == {"acme"} and len({line["request_id"] for line in lines}) == 3
    assert "word41" not in str(logged) and KEYS["acme"] not in str(logged)
    assert stack.small.requests("prefill")[0]["tenant_salt"] != "ab" * 32
