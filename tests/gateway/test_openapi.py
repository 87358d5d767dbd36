"""The OpenAPI document: it describes what is served, and no request that it allows or forbids ends in a 5xx."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from threading import Thread
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.gateway.stack import MESSAGES, Stack, in_process, live_stack

MODELS = ["auto", "small", "fake-large"]
KEY = "key-of-default"
TENANTS = {"default": {"api_keys": [hashlib.sha256(KEY.encode()).hexdigest()]}}
CALLS = {
    "POST": ["chat/completions", "completions", "cascade/explain", "prefix/prefill", "cache/transfer"],
    "GET": ["models", "models/{name}"],
}
OPERATIONS = [(method, f"/v1/{path}") for method, paths in CALLS.items() for path in paths]
HYPOTHESIS = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Runs on an event loop of its own, because the tests are synchronous."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    held = AsyncExitStack()

    def run(work: Any) -> Any:
        running: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)
        return running.result(60)

    yield run(held.enter_async_context(live_stack(tenants=TENANTS)))
    run(held.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def document(stack: Stack) -> dict[str, Any]:
    """Narrowed to the configured model names: every other name gets the same error."""
    described: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json").json()
    for name, schema in described["components"]["schemas"].items():
        for field in ("model", "target_model"):
            if name.endswith("Request") and field in schema["properties"]:
                schema["properties"][field] = {"enum": MODELS}
    return described


def test_document_describes_every_route(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    assert described >= set(OPERATIONS)
    assert {path for _, path in described} - {path for _, path in OPERATIONS} == {
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
    }
    assert all("requestBody" in document["paths"][path]["post"] for method, path in OPERATIONS if method == "POST")


PREFIX = {"prefix": "Hello"}
CHAT = {"model": "large", "messages": MESSAGES}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", {"model": "large", "prompt": "Hello"}),
        ("POST", "/v1/cascade/explain", CHAT),
        ("POST", "/v1/prefix/prefill", PREFIX),
        ("POST", "/v1/cache/transfer", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/{name}", None),
        ("GET", "/readyz", None),
    ],
)
def test_replies_and_errors_match_their_schemas(
    stack: Stack, document: dict[str, Any], method: str, path: str, body: dict[str, Any] | None
) -> None:
    with httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as http:
        if path == "/v1/cache/transfer":
            cache_id = http.post("/v1/prefix/prefill", json=PREFIX | {"target_model": "small"}).json()["cache_id"]
            body = {"cache_id": cache_id, "target_model": "large"}
        reply = http.request(method, path.format(name="large"), json=body)
        refused = http.request(method, path.format(name="large"), headers={"authorization": "Bearer unknown"})
    responses = document["paths"][path][method.lower()]["responses"]
    assert reply.status_code == 200, reply.text
    validate(document, responses["200"], reply.json())
    if path != "/readyz":
        assert refused.status_code == 401
        validate(document, responses["default"], refused.json())


def validate(document: dict[str, Any], response: dict[str, Any], body: Any) -> None:
    schema = response["content"]["application/json"]["schema"]
    assert schema
    jsonschema.validate(body, schema | {"components": document["components"]})


def test_operation_ids_are_unique_and_422_is_absent(document: dict[str, Any]) -> None:
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all("422" not in one["responses"] for one in operations)


@pytest.mark.parametrize("docs", [True, False])
async def test_documentation_page_can_be_switched_off(docs: bool) -> None:
    async with in_process(server={"docs": docs}) as stack:
        page = await stack.http.get("/docs")
        assert (await stack.http.get("/openapi.json")).json()["info"]["title"] == "kvrelay"
    if docs:
        assert page.status_code == 200 and "/openapi.json" in page.text
    else:
        assert (page.status_code, page.json()["error"]["code"]) == (404, "not_found")


# The gateway runs in a thread of this process, and draws its jitter when it likes.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_ends_in_a_5xx(
    stack: Stack, document: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    strategy = operation.as_strategy(generation_mode=mode)

    @HYPOTHESIS
    @given(case=strategy)
    def holds(case: Any) -> None:
        reply = case.call(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert reply.status_code < 500, (case.body, reply.text)
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    check: Callable[[], None] = holds
    check()
