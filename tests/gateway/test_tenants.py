"""Tenants: their keys and limits, and that one tenant's cache never serves another."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.app import create_app
from gateway.settings import from_values
from tests.gateway.redis_process import redis_process
from tests.gateway.stack import MESSAGES, Stack, follow_up, in_process, report, right_answer, text, values
from tools.fake_worker import FAKE_SECRET
from workers.api.config import SettingsError, read_secret
from workers.api.logs import add_request_id

KEYS = {"default": "key-of-default", "acme": "key-of-acme"}
TENANTS = {name: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process(tenants=TENANTS) as stack:
        yield stack


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


async def ask(stack: Stack, tenant: str, messages: list[dict[str, Any]] = MESSAGES, **fields: Any) -> httpx.Response:
    body = {"model": "auto", "messages": messages} | fields
    return await stack.http.post("/v1/chat/completions", json=body, headers=key(tenant))


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-of-acme"}, {"authorization": "Bearer "}],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/cascade/explain", "/v1/models", "/v1/models/auto"])
async def test_unknown_or_missing_key_is_rejected(stack: Stack, headers: dict[str, str], path: str) -> None:
    method = "GET" if "models" in path else "POST"
    reply = await stack.http.request(method, path, headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "key-of" not in reply.text


async def test_health_needs_no_key(stack: Stack) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert (await stack.http.get(path)).status_code == 200


async def test_each_tenant_has_its_own_salt(stack: Stack) -> None:
    for tenant in KEYS:
        await ask(stack, tenant)
    salts = {body["tenant_salt"] for body in stack.small.requests("prefill")}
    assert len(salts) == 2
    assert not salts & {hashlib.sha256(name.encode()).hexdigest() for name in KEYS}, "they depend on the secret"


async def test_client_salt_is_overwritten(stack: Stack) -> None:
    await ask(stack, "acme")
    await ask(stack, "acme", tenant_salt="ab" * 32, cache_salt="cd" * 32, model="large")
    salts = {body["tenant_salt"] for body in stack.small.requests("prefill") + stack.large.requests("chat")}
    assert len(salts) == 1
    assert salts.isdisjoint({"ab" * 32, "cd" * 32})


async def test_tenants_never_share_caches(stack: Stack) -> None:
    await ask(stack, "acme")
    reply = await ask(stack, "default")
    assert report(reply)["cached_tokens"] == 0
    assert stack.metric("prefix_lookup_hits_total", tier="small") == 0
    again = await ask(stack, "acme")
    assert report(again)["cached_tokens"] > 0


async def test_worker_rejects_another_tenants_cache_id(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """An attacker who can write to Redis stores acme's cache under a prefix of default."""
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        async with in_process(tenants=TENANTS, registry={"url": redis.url}) as stack:
            first = await ask(stack, "default", kvrelay={"policy": "always_escalate"})
            await ask(stack, "acme", [{"role": "user", "content": f"secret {MESSAGES[0]['content']}"}])
            foreign = list(stack.small.caches.values())[-1]
            await plant(stack, cache_id=foreign.cache_id)
            reply = await ask(stack, "default")
            assert text(reply) == right_answer(stack.small, MESSAGES)
            assert stack.metric("prefix_lookup_stale_total", tier="small") == 1
            hits = stack.metric("prefix_lookup_hits_total", tier="small")
            await plant(stack, tenant="acme")
            assert text(await ask(stack, "default")) == right_answer(stack.small, MESSAGES)
            assert stack.metric("prefix_lookup_hits_total", tier="small") == hits, "the entry is gone"
            following = await ask(stack, "default", follow_up(MESSAGES, first, "And then?"))
            assert following.status_code == 200


async def plant(stack: Stack, **changes: Any) -> None:
    """Change the entries in Redis for the small model's caches of tenant default."""
    import redis.asyncio

    from gateway.state.registry import ENTRY, KEY_PREFIX

    async with redis.asyncio.from_url(stack.app.state.gateway.settings.registry.url) as raw:
        for name in await raw.keys(f"{KEY_PREFIX}*"):
            entry = ENTRY.validate_json(await raw.get(name) or b"")
            if entry.tenant == "default" and entry.worker == "small-0":
                await raw.set(name, ENTRY.dump_json(replace(entry, **changes)), px=60_000)


LIMITED = {"default": TENANTS["default"], "acme": TENANTS["acme"] | {"requests_per_minute": 3}}


async def test_requests_per_minute_are_limited_per_tenant() -> None:
    async with in_process(tenants=LIMITED) as stack:
        for _ in range(3):
            assert (await ask(stack, "acme")).status_code == 200
        refused = await ask(stack, "acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["message"] == "more than 3 requests in a minute"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await ask(stack, "default")).status_code == 200


async def test_tokens_are_counted_at_the_end() -> None:
    tenants = {"default": TENANTS["default"], "acme": TENANTS["acme"] | {"tokens_per_minute": 700}}
    async with in_process(tenants=tenants) as stack:
        assert (await ask(stack, "acme")).json()["usage"]["total_tokens"] in range(600, 700)
        assert (await ask(stack, "acme")).status_code == 200, "the quota is not used up yet"
        refused = await ask(stack, "acme")
        assert (refused.status_code, refused.json()["error"]["message"]) == (429, "more than 700 tokens in a minute")


ONLY = {"default": TENANTS["default"], "acme": TENANTS["acme"] | {"models": ["fake-large"]}}


async def test_tenant_is_limited_to_its_models() -> None:
    async with in_process(tenants=ONLY) as stack:
        assert report(await ask(stack, "acme"))["tier"] == "large", "auto chooses among the allowed models"
        assert not stack.small.requests("prefill"), "the small model does not prefill for it"
        refused = await ask(stack, "acme", model="small")
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert "allowed: large" in refused.json()["error"]["message"]
        assert (await ask(stack, "acme", kvrelay={"max_tier": "small"})).status_code == 400
        listed = await stack.http.get("/v1/models", headers=key("acme"))
        assert [model["id"] for model in listed.json()["data"]] == ["auto", "large", "fake-large"]
        assert (await stack.http.get("/v1/models/small", headers=key("acme"))).status_code == 403
        assert report(await ask(stack, "default"))["tier"] == "small"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"model": "gpt-17", "messages": MESSAGES}, 404),
        ("/v1/chat/completions", {"model": "auto", "messages": MESSAGES, "kvrelay": {"max_tier": "huge"}}, 400),
        ("/v1/prefix/prefill", {"target_model": "gpt-17", "prefix": "x"}, 404),
        ("/v1/models/gpt-17", None, 404),
    ],
)
async def test_rejection_names_only_allowed_models(path: str, body: dict[str, Any] | None, status: int) -> None:
    tenants = {"default": TENANTS["default"], "acme": TENANTS["acme"] | {"models": ["small"]}}
    async with in_process(tenants=tenants) as stack:
        reply = await stack.http.request("GET" if body is None else "POST", path, json=body, headers=key("acme"))
        assert reply.status_code == status
        assert "small" in reply.json()["error"]["message"] and "large" not in reply.text


async def test_cache_access_is_logged_without_prompt_text(stack: Stack) -> None:
    with capture_logs([add_request_id]) as logged:
        reply = await ask(stack, "acme", kvrelay={"policy": "always_escalate"})
    lines = [line for line in logged if line["event"] == "cache_access"]
    assert [(line["access"], line["worker"]) for line in lines] == [
        ("written", "small-0"),
        ("transferred", "large-0"),
        ("read", "large-0"),
        ("written", "large-0"),
    ]
    assert {line["tenant"] for line in lines} == {"acme"}
    assert {line["request_id"] for line in lines} == {reply.headers["x-request-id"]}
    assert lines[1]["source"] == lines[0]["cache_id"] and lines[2]["cache_id"] == lines[1]["cache_id"]
    (request,) = [line for line in logged if line["event"] == "request"]
    assert request["tenant"] == "acme"
    for word in ("word41", text(reply), KEYS["acme"]):
        assert word not in str(logged)


async def test_judging_and_rejected_answers_are_logged_too() -> None:
    async with in_process(policy={"name": "verifier", "question": "Right?"}) as stack:
        stack.small.canned_answers = {"Right?": "No"}
        with capture_logs() as logged:
            await stack.chat()
    lines = [(line["access"], line["cache_id"]) for line in logged if line.get("worker") == "small-0"]
    read, kept = stack.small.caches
    assert lines == [("written", read), ("read", read), ("read", kept), ("written", kept)]


async def test_loopback_without_keys_is_the_default_tenant() -> None:
    async with in_process() as stack:
        assert (await stack.chat()).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_address_requires_keys(host: str) -> None:
    open_to_all = values(server={"host": host})
    with pytest.raises(SettingsError, match=r"server\.host.*api_keys"):
        create_app(from_values(open_to_all), FAKE_SECRET)
    create_app(from_values(open_to_all | {"tenants": TENANTS}), FAKE_SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_loopback_requires_no_keys(host: str) -> None:
    create_app(from_values(values(server={"host": host})), FAKE_SECRET)


def test_secret_readable_by_others_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x" * 40 + "\n")
    path.chmod(0o600)
    assert read_secret(path) == "x" * 40
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="mode 0640; it must be 0600"):
        read_secret(path)


@pytest.mark.parametrize("content", ["", "short", "x" * 20 + "\n" + "y" * 20, "ü" * 40])
def test_malformed_secret_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="at least 16 printable"):
        read_secret(path)


def test_missing_secret_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read .*nowhere"):
        read_secret(tmp_path / "nowhere")
