"""Invalid requests get the status, type, code and field of the worker API before any work begins."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.engines import tiny
from tests.workers.server.support import SALT, SECRET, TALK, ServedWorker, chat_request, content, serving, until
from workers.api.errors import DeadlineExceeded, InvalidRequest, KvrelayError, Overloaded
from workers.api.schemas import SECRET_HEADER, Message, PrefillRequest
from workers.engines.scheduling import Compute

USER = {"role": "user", "content": "The dog?"}
CHAT = {"messages": [USER], "tenant_salt": SALT, "temperature": 0}
UNKNOWN = "kvc-" + "0" * 32
LONG = {"role": "user", "content": "dog " * 2000}
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/prefix/prefill", "/v1/cache/transfer", "/v1/tokenize"]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param", "message"),
    [
        ("chat/completions", {"messages": []}, 400, "invalid_request", "messages", "at least 1"),
        ("chat/completions", {"messages": [{"role": "robot"}]}, 400, "invalid_request", "messages.0.role", "'robot'"),
        ("chat/completions", {"messages": "hello"}, 400, "invalid_request", "messages", "list"),
        ("chat/completions", {"frequency_penalty": 1}, 400, "invalid_request", "frequency_penalty", "not permitted"),
        ("chat/completions", {"temperature": 3}, 400, "invalid_request", "temperature", "less than or equal to 2"),
        ("chat/completions", {"max_tokens": 0}, 400, "invalid_request", "max_tokens", "got 0"),
        ("chat/completions", {"model": "gpt"}, 404, "model_not_found", "model", "'gpt'.*'large'"),
        ("chat/completions", {"top_logprobs": 2}, 400, "invalid_request", "top_logprobs", "logprobs: true"),
        ("chat/completions", {"stop": ["a", ""]}, 400, "invalid_request", "stop", "empty"),
        ("chat/completions", {"seed": 2**64}, 400, "invalid_request", "seed", str(2**64)),
        ("chat/completions", {"stream_options": {}}, 400, "invalid_request", "stream_options", "stream: true"),
        ("chat/completions", {"tools": [{"type": "function"}]}, 400, "invalid_request", "tools", "large"),
        ("chat/completions", {"messages": [LONG]}, 400, "context_length_exceeded", "messages", "length is 1024"),
        ("chat/completions", {"max_tokens": 2000}, 400, "context_length_exceeded", "max_tokens", "2000 answer tokens"),
        ("chat/completions", {"stable_messages": 2}, 400, "invalid_request", "stable_messages", "there are 1"),
        ("chat/completions", {"tenant_salt": "x"}, 400, "invalid_request", "tenant_salt", "pattern"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "invalid_request",
            "messages.0.content.0.type",
            "'text'",
        ),
        (
            "chat/completions",
            {"kv_transfer_params": {"cache_id": UNKNOWN}},
            404,
            "cache_not_found",
            "cache_id",
            UNKNOWN,
        ),
        (
            "chat/completions",
            {"kv_transfer_params": {"cache_id": "../etc"}},
            400,
            "invalid_request",
            "kv_transfer_params.cache_id",
            "pattern",
        ),
        ("completions", {"prompt": ""}, 400, "invalid_request", "prompt", "empty"),
        ("completions", {"prompt": [1, 99_999]}, 400, "invalid_request", "prompt", "99999 does not exist"),
        ("prefix/prefill", {"token_ids": [5], "prefix": "x"}, 400, "invalid_request", None, "exactly one"),
        ("prefix/prefill", {}, 400, "invalid_request", None, "got none"),
        ("prefix/prefill", {"messages": [USER], "stable_messages": 2}, 400, "invalid_request", None, "messages has 1"),
        ("prefix/prefill", {"token_ids": [5] * 1025}, 400, "context_length_exceeded", None, "1025 tokens"),
        ("prefix/prefill", {"token_ids": [5], "target_model": "gpt"}, 404, "model_not_found", "target_model", "gpt"),
        ("tokenize", {"token_ids": [-3], "tenant_salt": None}, 400, "invalid_request", "tenant_salt", "permitted"),
    ],
)
async def test_invalid_requests_are_rejected_before_work(
    served: ServedWorker, path: str, body: dict[str, Any], status: int, code: str, param: str | None, message: str
) -> None:
    base: dict[str, dict[str, Any]] = {"chat/completions": CHAT, "completions": {"tenant_salt": SALT}, "tokenize": {}}
    reply = await served.http.post(f"/v1/{path}", json=base.get(path, {"tenant_salt": SALT}) | body)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
    assert re.search(message, error["message"]), error["message"]
    assert SALT not in error["message"]
    assert served.worker.pool.stats.num_caches == 0 and served.worker.engine.rates.rate("prefill") is None


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_unsupported_field_is_named(served: ServedWorker, path: str) -> None:
    prompt = {"messages": [USER]} if path.startswith("chat") else {"prompt": "The dog?"}
    others = {"n": 2, "top_k": 5, "logit_bias": {"5": 1}, "presence_penalty": 1}
    for name, value in others.items():
        reply = await served.http.post(f"/v1/{path}", json=prompt | {"tenant_salt": SALT, name: value})
        assert (reply.status_code, error_of(reply)["param"]) == (400, name)


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
async def test_json_mode_needs_an_engine_that_supports_it(served: ServedWorker, form: str) -> None:
    schema = {"json_schema": {"name": "a", "schema": {"type": "object"}}} if form == "json_schema" else {}
    base = {"messages": [USER], "tenant_salt": SALT, "max_tokens": 1}
    body = base | {"response_format": {"type": form} | schema}
    reply = await served.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "response_format.type")
    assert f"'{form}' is not supported by 'large'; supported: text" in error_of(reply)["message"]
    body = base | {"response_format": {"type": "text"}}
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_malformed_body_is_a_400(served: ServedWorker) -> None:
    reply = await served.http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 400 and error_of(reply)["type"] == "invalid_request_error"


async def test_lone_surrogate_is_a_400(served: ServedWorker) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}], "tenant_salt": "' + SALT.encode() + b'"}'
    reply = await served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and error_of(reply)["param"] == "messages"


@pytest.mark.parametrize("path", ROUTES)
async def test_missing_body_is_an_invalid_request(served: ServedWorker, path: str) -> None:
    error = error_of(await served.http.post(path))
    assert (error["code"], error["param"], error["message"]) == ("invalid_request", None, "a JSON body is required")


async def test_tokenizer_queue_is_bounded(folder: Path) -> None:
    async with serving(folder, max_running=1, max_queue=0) as served:
        replies = await asyncio.gather(*(served.http.post("/v1/tokenize", json={"prefix": "dog"}) for _ in range(3)))
        assert sorted(reply.status_code for reply in replies) == [200, 503, 503]
        assert (await served.http.post("/v1/tokenize", json={"prefix": "dog"})).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/tokenize", 405)])
async def test_unknown_routes_and_methods_are_rejected(
    served: ServedWorker, method: str, path: str, status: int
) -> None:
    reply = await served.http.request(method, path)
    assert reply.status_code == status and path in error_of(reply)["message"]


async def test_oversized_body_is_a_413(folder: Path) -> None:
    async with serving(folder, max_body_bytes=1000) as served:
        small = await served.http.post("/v1/tokenize", json={"prefix": "dog " * 100})
        assert small.status_code == 200
        large = await served.http.post("/v1/tokenize", json={"prefix": "dog " * 400})
        assert large.status_code == 413 and error_of(large)["code"] == "request_too_large"

        async def pieces() -> Any:
            for _ in range(10):
                yield b" " * 500

        unannounced = await served.http.post("/v1/tokenize", content=pieces())
        assert unannounced.status_code == 413


async def test_oversized_head_is_a_431(served: ServedWorker) -> None:
    reply = await served.http.get("/v1/info", headers={"x-padding": "x" * 70_000})
    assert reply.status_code == 431 and error_of(reply)["code"] == "headers_too_large"


async def test_slow_body_is_a_408(folder: Path) -> None:
    async def trickle() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    async with serving(folder, body_timeout_s=0.1) as served:
        async with asyncio.timeout(5):
            reply = await served.http.post("/v1/tokenize", content=trickle())
    assert reply.status_code == 408 and error_of(reply)["code"] == "request_timeout"
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("secret", [None, "", SECRET[:-1], SECRET + "x"])
@pytest.mark.parametrize("path", ROUTES)
async def test_every_call_but_health_needs_the_cluster_secret(
    served: ServedWorker, path: str, secret: str | None
) -> None:
    headers = {SECRET_HEADER: secret} if secret is not None else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://worker.test") as outsider:
        reply = await outsider.post(path, json=CHAT, headers=headers)
        assert reply.status_code == 401 and error_of(reply)["type"] == "authentication_error"
        for route in ("/v1/info", f"/v1/cache/{UNKNOWN}"):
            assert (await outsider.get(route, headers=headers)).status_code == 401
        for open_path in ("/livez", "/readyz", "/health", "/metrics"):
            assert (await outsider.get(open_path)).status_code == 200


async def test_full_queue_is_a_503_with_retry_after(folder: Path) -> None:
    async with serving(folder, max_running=1, max_queue=1) as served:
        hold = served.worker.engine.admit()
        await hold.__aenter__()
        waiting = asyncio.create_task(served.chat())
        await until(lambda: served.worker.engine.admission.num_waiting == 1)
        reply = await served.http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 503 and error_of(reply)["code"] == "overloaded"
        assert int(reply.headers["retry-after"]) >= 1
        metrics = (await served.http.get("/metrics")).text
        assert "kvrelay_num_requests_running 1.0" in metrics and "kvrelay_num_requests_waiting 1.0" in metrics
        with pytest.raises(Overloaded):
            await served.client.chat(chat_request(), timeout_s=5)
        await hold.__aexit__(None, None, None)
        assert content(await waiting)


async def test_work_ends_at_its_deadline(served: ServedWorker) -> None:
    long = [Message(role="user", content="fox " * 300)]
    with pytest.raises(DeadlineExceeded):
        await served.chat(long, max_tokens=600, deadline_ms=30)
    with pytest.raises(DeadlineExceeded):
        request = PrefillRequest(messages=long, tenant_salt=SALT, deadline_ms=0.01)
        await served.client.prefill(request, timeout_s=30)
    assert served.worker.engine.admission.num_running == 0
    assert content(await served.chat(deadline_ms=60_000))


async def test_error_before_the_first_token_is_an_http_status(served: ServedWorker) -> None:
    reply = await served.http.post("/v1/chat/completions", json=CHAT | {"stream": True, "deadline_ms": 0.001})
    assert reply.status_code == 504 and error_of(reply)["code"] == "deadline_exceeded"
    assert reply.headers["x-should-retry"] == "false"


async def test_error_after_content_is_one_frame(served: ServedWorker) -> None:
    served.worker.engine.compute = FailingCompute(served.worker.engine.compute, after=4)  # type: ignore[assignment]
    reply = await served.http.post("/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 40})
    frames = reply.text.split("\n\n")
    assert reply.status_code == 200 and frames[-1] == ""
    assert '"content"' in frames[0] and "deadline_exceeded" in frames[-2] and "[DONE]" not in reply.text
    request = chat_request(stream=True, max_tokens=40)
    with pytest.raises(DeadlineExceeded):
        served.worker.engine.compute.left = 4  # type: ignore[attr-defined]
        async for _ in served.client.chat_stream(request, timeout_s=30):
            pass


class FailingCompute:
    """Runs `after` steps, then raises `DeadlineExceeded`; prefills and stores are steps too."""

    def __init__(self, compute: Compute, after: int):
        self._compute = compute
        self.left = after

    async def run(self, step: Any, *, priority: int = 0) -> Any:
        self.left -= 1
        if self.left < 0:
            raise DeadlineExceeded("planted")
        return await self._compute.run(step, priority=priority)

    def close(self) -> None:
        self._compute.close()


async def test_bug_is_a_500_without_details(served: ServedWorker) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("a secret of the house")

    served.worker.prompts.encode_chat = fail  # type: ignore[assignment]
    transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers={SECRET_HEADER: SECRET}) as http:
        reply = await http.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 500 and error_of(reply)["type"] == "internal_error"
    assert "secret of the house" not in reply.text


async def test_client_raises_the_error_that_the_worker_raised(served: ServedWorker) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await served.chat(TALK, max_tokens=5000)
    assert isinstance(raised.value, KvrelayError) and raised.value.param == "max_tokens"
    assert tiny.CONTEXT == served.worker.engine.model.max_model_len
