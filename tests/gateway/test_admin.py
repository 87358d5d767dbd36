"""`/admin`: behind its own key, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway import settings
from gateway.app import create_app
from gateway.reload import ConfigSource
from gateway.state.tenants import key_hash
from tests.gateway.stack import Stack, fakes, in_process, report, values
from tests.gateway.test_tenants import KEYS, TENANTS, ask, key
from tools.fake_worker import FAKE_SECRET
from workers.api.config import SettingsError
from workers.api.errors import BundleUnusable, KvrelayError, WorkerUnavailable

ADMIN_KEY = "key-of-the-operator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BUNDLE = "workers/large-0/bundles/fake-bundle/resume"
CALLS = [
    ("GET", "state"),
    ("GET", "usage"),
    ("POST", "reload"),
    ("POST", "workers/small-0/drain"),
    ("POST", BUNDLE),
]


def key_file(folder: Path, content: str = ADMIN_KEY) -> dict[str, str]:
    path = folder / "admin-key"
    path.write_text(content)
    path.chmod(0o600)
    return {"key_file": str(path)}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with in_process(tenants=TENANTS, admin=key_file(tmp_path)) as stack:
        yield stack


async def admin(stack: Stack, method: str, path: str) -> Any:
    reply = await stack.http.request(method, f"/admin/{path}", headers=ADMIN)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize("headers", [{}, key("default"), {"authorization": "Bearer "}])
async def test_every_route_needs_the_admin_key(stack: Stack, method: str, path: str, headers: dict[str, str]) -> None:
    refused = await stack.http.request(method, f"/admin/{path}", headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert not (await admin(stack, "GET", "state"))["workers"]["small-0"]["is_drained"]


async def test_admin_key_is_not_an_api_key(stack: Stack) -> None:
    assert (await stack.http.get("/v1/models", headers=ADMIN)).status_code == 401


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_routes_are_404_without_a_key_file(method: str, path: str) -> None:
    async with in_process() as stack:
        reply = await stack.http.request(method, f"/admin/{path}", headers=ADMIN)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_key_of_a_tenant_is_rejected(tmp_path: Path) -> None:
    shared = values(tenants={"default": {"api_keys": [key_hash(ADMIN_KEY)]}}, admin=key_file(tmp_path))
    with pytest.raises(SettingsError, match=r"admin\.key_file: a tenant has the same key"):
        create_app(settings.from_values(shared), FAKE_SECRET)


def test_key_file_readable_by_others_is_rejected(tmp_path: Path) -> None:
    open_to_all = key_file(tmp_path)
    Path(open_to_all["key_file"]).chmod(0o644)
    with pytest.raises(SettingsError, match=r"admin\.key_file: .* has mode 0644"):
        create_app(settings.from_values(values(admin=open_to_all)), FAKE_SECRET)


async def test_usage_by_tenant(stack: Stack) -> None:
    replies = [await ask(stack, tenant) for tenant in ("acme", "acme", "default")]
    await stack.http.post("/v1/prefix/prefill", json={"prefix": "one two three"}, headers=key("default"))
    used = (await admin(stack, "GET", "usage"))["tenants"]
    spent = [reply.json()["usage"] for reply in replies]
    assert used["acme"] == {
        "requests": 2,
        "tokens_read": spent[0]["prompt_tokens"] + spent[1]["prompt_tokens"],
        "tokens_written": spent[0]["completion_tokens"] + spent[1]["completion_tokens"],
    }
    assert (used["default"]["requests"], used["default"]["tokens_read"]) == (2, spent[2]["prompt_tokens"] + 3)
    assert not any(secret in str(used) for secret in KEYS.values())


async def test_drained_worker_gets_no_new_calls(stack: Stack) -> None:
    await ask(stack, "acme")
    assert (await admin(stack, "POST", "workers/small-0/drain"))["is_usable"] is False
    num_calls = len(stack.small.requests("prefill") + stack.small.requests("cached_chat"))
    reply = report(await ask(stack, "acme"))
    assert (reply["tier"], reply["path"]) == ("large", "fallback:small_no_usable_worker")
    assert len(stack.small.requests("prefill") + stack.small.requests("cached_chat")) == num_calls
    await stack.app.state.gateway.reload(settings.from_values(values(tenants=TENANTS, limits={"max_messages": 9})))
    assert report(await ask(stack, "acme"))["tier"] == "large", "a reload does not bring it back"


async def test_resumed_worker_still_has_its_caches(stack: Stack) -> None:
    await ask(stack, "acme")
    await admin(stack, "POST", "workers/small-0/drain")
    await ask(stack, "acme")
    await admin(stack, "POST", "workers/small-0/resume")
    assert report(await ask(stack, "acme"))["path"] == "exact"


async def test_drained_worker_that_returns_stays_drained(stack: Stack) -> None:
    gateway = stack.app.state.gateway
    large_1 = {"large-1": settings.WorkerLocation(tier="large", url="http://large-1")}

    async def is_drained(worker: str = "large-1") -> bool:
        return bool((await admin(stack, "GET", "state"))["workers"][worker]["is_drained"])

    await gateway.set_discovered(large_1)
    await admin(stack, "POST", "workers/large-1/drain")
    for found in ({}, large_1):  # its beat ends and begins, as in a restart
        await gateway.set_discovered(found)
    assert await is_drained() and not await is_drained("large-0")
    await admin(stack, "POST", "workers/large-1/resume")
    for found in ({}, large_1):
        await gateway.set_discovered(found)
    assert not await is_drained()


async def test_state_shows_circuits(stack: Stack) -> None:
    assert (await admin(stack, "GET", "state"))["generation"] == 1
    stack.large.garble("transfer")
    for number in range(5):
        prompt = [{"role": "user", "content": f"{number} word " * 300}]
        await ask(stack, "acme", prompt, kvrelay={"policy": "always_escalate"})
    workers = (await admin(stack, "GET", "state"))["workers"]
    assert workers["large-0"]["circuits"]["transfers"] == "open"
    assert workers["small-0"]["circuits"] == {"answers": "closed", "transfers": "closed"}


async def test_resume_a_bundle(stack: Stack) -> None:
    stack.large.bundle_off = "top-1 agreement is below the gate's"
    await stack.check_health()
    state = await admin(stack, "GET", "state")
    assert state["workers"]["large-0"]["bundles"] == {
        "fake-bundle": {"is_usable": False, "reason": "top-1 agreement is below the gate's"}
    }
    refused = await ask(stack, "acme", kvrelay={"policy": "always_escalate"})
    assert report(refused)["path"] == "fallback:no_bundle"
    assert (await admin(stack, "POST", BUNDLE))["bundles"] == {"fake-bundle": {"is_usable": True, "reason": None}}
    assert report(await ask(stack, "acme", kvrelay={"policy": "always_escalate"}))["path"] in ("mapped", "exact")


@pytest.mark.parametrize(
    ("path", "error", "status", "says"),
    [
        (BUNDLE.replace("fake-bundle", "other"), None, 404, "unknown bundle 'other'; known: fake-bundle"),
        (BUNDLE.replace("large-0", "small-0"), None, 404, "unknown bundle 'fake-bundle'; known: none"),
        (BUNDLE, BundleUnusable("fake-bundle was refused at the start: no evaluation"), 409, "no evaluation"),
        (BUNDLE, WorkerUnavailable("http://10.0.0.7:8001 is gone"), 502, "the model's worker failed"),
    ],
)
async def test_resume_of_an_unusable_bundle_is_an_error(
    stack: Stack, path: str, error: KvrelayError | None, status: int, says: str
) -> None:
    if error is not None:
        stack.large.fail("resume_bundle", error)
    reply = await stack.http.post(f"/admin/{path}", headers=ADMIN)
    assert reply.status_code == status and says in reply.json()["error"]["message"]


async def test_unknown_worker_is_named(stack: Stack) -> None:
    reply = await stack.http.post("/admin/workers/small-7/drain", headers=ADMIN)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        404,
        "unknown worker 'small-7'; known: small-0, large-0",
    )


def write(path: Path, config: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(config))


@asynccontextmanager
async def from_file(path: Path, config: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    write(path, config)
    source = ConfigSource(path, lambda: settings.load(path))
    transports = {worker.name: httpx.ASGITransport(worker) for worker in fakes()}
    app = create_app(source.read(), FAKE_SECRET, transports=transports)
    app.state.source = source
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            yield http


async def test_reload_reports_its_result(tmp_path: Path) -> None:
    key_file(tmp_path)
    config = values(admin={"key_file": "admin-key"})  # from the file's own folder
    path = tmp_path / "kvrelay.yaml"
    async with from_file(path, config) as http:
        write(path, config | {"limits": {"max_messages": 5}})
        reply = await http.post("/admin/reload", headers=ADMIN)
        assert (reply.status_code, reply.json()) == (200, {"generation": 2})
        write(path, config | {"limits": {"max_messages": 0}})
        refused = await http.post("/admin/reload", headers=ADMIN)
        assert refused.status_code == 400
        assert "limits.max_messages" in refused.json()["error"]["message"]
        assert (await http.get("/admin/state", headers=ADMIN)).json()["generation"] == 2
