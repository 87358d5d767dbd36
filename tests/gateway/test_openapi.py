"""Whatever schemathesis makes of the OpenAPI document, right and wrong: nothing of it ends in a 5xx."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from threading import Thread
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.gateway.stack import Stack, live_stack

MODELS = ["auto", "small", "fake-large"]
KEY = "key-of-default"
TENANTS = {"default": {"api_keys": [hashlib.sha256(KEY.encode()).hexdigest()]}}
CALLS = {
    "POST": ["chat/completions", "completions", "cascade/explain", "prefix/prefill", "cache/transfer"],
    "GET": ["models", "models/{name}"],
}
OPERATIONS = [(method, f"/v1/{path}") for method, paths in CALLS.items() for path in paths]
MOST = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Served from a loop of its own: what asks is synchronous."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    held = AsyncExitStack()

    def there(work: Any) -> Any:
        running: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)
        return running.result(60)

    yield there(held.enter_async_context(live_stack(tenants=TENANTS)))
    there(held.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def document(stack: Stack) -> dict[str, Any]:
    """With the names that the configuration knows: any other ends in the same refusal."""
    described: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json").json()
    for schema in described["components"]["schemas"].values():
        for field, known in (("model", MODELS), ("target_model", MODELS)):
            if field in schema.get("properties", {}):
                schema["properties"][field] = {"enum": known}
    return described


def test_the_document_describes_what_is_served(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    assert described >= set(OPERATIONS)
    assert {path for _, path in described} - {path for _, path in OPERATIONS} == {
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
    }
    assert all("requestBody" in document["paths"][path]["post"] for method, path in OPERATIONS if method == "POST")


# The gateway runs in a thread of this process, and draws its jitter when it likes.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_ends_in_a_5xx(
    stack: Stack, document: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    strategy = operation.as_strategy(generation_mode=mode)

    @MOST
    @given(case=strategy)
    def holds(case: Any) -> None:
        reply = case.call(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert reply.status_code < 500, (case.body, reply.text)
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    run: Callable[[], None] = holds
    run()
