"""The gateway among fake workers, and the record of a turn: reply, worker calls, metrics and charges."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from gateway.app import create_app
from gateway.settings import from_values
from tests.gateway.golden.clock import CLOCK
from tests.gateway.golden.transport import AsgiTransport, Exchange
from tools.fake_worker import FAKE_SECRET, FakeWorker
from workers.api.schemas import Rates

Json = dict[str, Any]

ADMIN_KEY = "key-of-the-operator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
POLL_S = 10.0  # between health checks of a worker
SETTLE_S = 0.2  # after a turn, for background work
CALLS = {
    "/v1/prefix/prefill": "prefill",
    "/v1/cache/transfer": "transfer",
    "/v1/tokenize": "tokenize",
    "/v1/chat/completions": "chat",
    "/v1/completions": "complete",
}
RATES = Rates(prefill_tokens_per_s=1000.0, map_tokens_per_s=10_000.0)

# The recorded counters and histograms: all but those that depend only on chunking or timing.
COUNTED = (
    *("requests_total", "cascade_decisions_total", "full_prefill_fallback_total", "client_disconnects_total"),
    *("handoffs_total", "early_handoffs_total", "worker_restarts_total", "circuit_transitions_total"),
    *("prefix_lookups_total", "prefix_lookup_hits_total", "prefix_lookup_stale_total"),
    *("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count", "overhead_seconds_count"),
    *("request_prefill_time_seconds_count", "handoff_duration_seconds_count", "cascade_confidence_count"),
)
TIMES = {"ttft_ms", "handoff_ttft_ms", "small_prefill_ms", "prefill_ms", "map_ms", "copy_ms", "transfer_ms"}
SAMPLE = re.compile(r"kvrelay_(?P<name>\w+)(\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')
FLAGS = {"forced", "early_handoff"}
REPORT_KEYS = {
    *("tier", "path", "policy", "reason", "rule", "forced", "confidence", "bytes", "handoff_tokens", "early_handoff"),
    *("mapped_tokens", "cached_tokens", "mapper", "top1_agreement", "full_prefill_ms"),
    *TIMES,
}


class Names:
    """Short names for ids, in order of appearance."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._names: dict[str, str] = {}

    def of(self, value: str | None) -> str | None:
        if value is None:
            return None
        return self._names.setdefault(value, f"{self._prefix}{len(self._names) + 1}")


class WorkerTransport(httpx.AsyncBaseTransport):
    """Carries the gateway's calls to one worker and records them."""

    def __init__(self, world: World, worker: FakeWorker):
        self._world = world
        self._worker = worker

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body, kind = await request.aread(), CALLS.get(request.url.path)
        world, name = self._world, self._worker.name
        if kind is None:
            if name in world.unreachable and not world.hides_faults:
                raise httpx.ConnectError("refused")
            exchange = Exchange(self._worker, request, body)
            await exchange.begin()
            return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)
        call = world.record(name, kind, orjson.loads(body))
        if name in world.unreachable:
            call["got"] = "unreachable"
            raise httpx.ConnectError("refused")
        pieces: list[bytes] = []
        exchange = Exchange(
            self._worker,
            request,
            body,
            on_piece=pieces.append,
            on_end=lambda is_whole: call.update(got=world.outcome(exchange.status, b"".join(pieces), is_whole)),
        )
        await exchange.begin()
        return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)


class World:
    """`settings` replace whole sections of the configuration; `maps_down` gives the small worker a bundle."""

    def __init__(self, folder: Path, *, tiers: str = "2", maps_down: bool = False, settings: Json | None = None):
        self.small = FakeWorker("small-0", "fake-small", rates=RATES)
        source = {"small-0": self.small}
        self.mid = FakeWorker("mid-0", "fake-mid", peers=source, rates=RATES)
        self.large = FakeWorker("large-0", "fake-large", peers=source, rates=RATES)
        if maps_down:
            self.small.peers = {"large-0": self.large}
        workers = [self.small, *([self.mid] if tiers == "3" else []), self.large]
        if tiers == "2+1":
            workers.append(FakeWorker("large-1", "fake-large", peers=source, rates=RATES))
        self.workers = {worker.name: worker for worker in workers}
        tier_of = {name: name.split("-")[0] for name in self.workers}
        self.turns: list[Json] = []
        self.last_reply: Json = {}
        self.calls: list[Json] = []
        self.unreachable: set[str] = set()
        self.hides_faults = True  # health checks of unreachable workers succeed
        self._num_calls: Counter[tuple[str, str]] = Counter()
        self._hooks: dict[tuple[str, str, int], Callable[[], None]] = {}
        self._caches, self._salts = Names("c"), Names("s")
        self._began_at = CLOCK.now
        self._counted: dict[str, float] = {}
        self._charged: Json = {}
        self._settings = {
            "tiers": [{"name": name, "model": f"fake-{name}"} for name in dict.fromkeys(tier_of.values())],
            "workers": {name: {"tier": tier, "url": f"http://{name}"} for name, tier in tier_of.items()},
            "policy": {"name": "confidence", "threshold": -0.5, "num_tokens": 3},
            "deadlines": {
                "request_s": 10.0,
                "decode_reserve_s": 0.5,
                "token_gap_s": 1.0,
                "worker_poll_s": POLL_S,
                "drain_s": 0.0,
                "shutdown_grace_s": 0.0,
            },
            "shadow": {"share": 0.0},
            "breaker": {"jitter": 0.0},
            "admin": {"key_file": str(folder / "admin-key")},
        } | (settings or {})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        transports = {name: WorkerTransport(self, worker) for name, worker in self.workers.items()}
        app = create_app(from_values(self._settings), FAKE_SECRET, transports=transports)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=AsgiTransport(app), base_url="http://gateway", timeout=None) as self.http,
        ):
            yield self

    # Calls to workers

    def record(self, worker: str, kind: str, body: Json) -> Json:
        self._num_calls[worker, kind] += 1
        self._hooks.pop((worker, kind, self._num_calls[worker, kind]), lambda: None)()
        call = {"to": worker, "call": kind, **self._described(kind, body), "got": "given up"}
        if at := round(CLOCK.now - self._began_at, 3):
            call["at_s"] = at
        self.calls.append(call)
        return call

    def _described(self, kind: str, body: Json) -> Json:
        """The recorded fields of a request to a worker; a flag at its default is left out."""
        fields: Json = {}
        if kind == "prefill":
            fields |= {"messages": len(body.get("messages", []))} if "messages" in body else {"text": True}
        if kind == "transfer":
            fields |= {"cache": self._caches.of(body["cache_id"]), "from": body["source_worker"]}
            fields |= {"num_tokens": body.get("num_tokens"), "by_cost": body.get("by_cost", False)}
            fields |= {key: body[key] for key in ("mapper",) if body.get(key, "auto") != "auto"}
            fields |= {"native_head": body["native_head"]} if body.get("native_head", 4) != 4 else {}
        if kind in ("chat", "complete"):
            params = body.get("kv_transfer_params") or {}
            fields |= {"cache": self._caches.of(params.get("cache_id"))}
            fields |= {"messages": len(body["messages"])} if "messages" in body else {"text": True}
            fields |= {key: params[key] for key in ("require_exact", "agreement_probe", "shadow") if params.get(key)}
            fields |= {key: params[key] for key in ("reuse", "store") if params.get(key) is False}
            options = body.get("stream_options") or {}
            fields |= {"interval_ms": options["interval_ms"]} if options.get("interval_ms") else {}
            fields |= {key: body[key] for key in ("logprobs", "top_logprobs") if body.get(key)}
            fields |= {key: body[key] for key in ("priority", "max_tokens", "response_format") if body.get(key)}
        fields |= {key: body[key] for key in ("stable_messages", "target_model") if body.get(key)}
        fields |= {"tools": len(body["tools"])} if body.get("tools") else {}
        if body.get("deadline_ms") is not None:
            fields["deadline_s"] = round(body["deadline_ms"] / 1000, 3)
        if (salt := self._salts.of(body.get("tenant_salt"))) not in (None, "s1"):
            fields["salt"] = salt
        return fields

    def outcome(self, status: int, raw: bytes, is_whole: bool) -> str:
        """The result of a call, as the gateway received it."""
        if status == 0:
            return "given up"
        if status != 200:
            code = orjson.loads(raw)["error"]["code"] if is_whole else "unread"
            return f"{status} {code}"
        if raw.startswith(b"data:"):
            return self._outcome_of_stream(raw, is_whole)
        if not is_whole:
            return "given up"
        reply = orjson.loads(raw)
        if "cache_id" not in reply:
            return "garbage" if "nonsense" in reply else "ok"
        cache = f"{self._caches.of(reply['cache_id'])} of {reply['num_tokens']}"
        if "cached_tokens" in reply:
            return f"{cache}, {reply['cached_tokens']} cached"
        return f"{cache}, {reply['decision']}"

    def _outcome_of_stream(self, raw: bytes, is_whole: bool) -> str:
        frames = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]
        if frames[-1] == "[DONE]":
            usage = orjson.loads(frames[-2])["kv_transfer_params"]
            return f"whole, {self._caches.of(usage.get('cache_id')) or 'nothing'} kept"
        last = orjson.loads(frames[-1])
        if "error" in last:
            return f"broke off: {last['error']['code']}"
        return "cut off" if is_whole else "hung up"

    # Turns of the client

    async def forget_metrics(self) -> None:
        """Count metrics and charges from here on."""
        await self._metrics()
        await self._charge()

    async def turn(
        self,
        body: Json,
        *,
        path: str = "/v1/chat/completions",
        label: str | None = None,
        hang_up_at_s: float | None = None,
        api_key: str | None = None,
    ) -> Json:
        """Send one request and record its reply, worker calls, metrics and charges."""
        self.calls, self._began_at = [], CLOCK.now
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        pieces: list[bytes] = []
        record: Json = {"turn": label}
        try:
            async with (
                asyncio.timeout(hang_up_at_s),
                self.http.stream("POST", path, json=body, headers=headers) as reply,
            ):
                async for piece in reply.aiter_bytes():
                    pieces.append(piece)
        except TimeoutError:
            record |= {"hung_up": True} | (self._reply_record(reply, b"".join(pieces)) if pieces else {})
        else:
            record |= self._reply_record(reply, b"".join(pieces))
        record["took_s"] = round(CLOCK.now - self._began_at, 3)
        await asyncio.sleep(SETTLE_S)
        record["calls"] = [dict(call) for call in self.calls]
        record["metrics"] = await self._metrics()
        record["charged"] = await self._charge()
        self.turns.append({key: record[key] for key in record if record[key] is not None})
        return self.turns[-1]

    async def heal(self) -> None:
        """Clear all faults."""
        for worker in self.workers.values():
            worker.heal()

    async def drain(self, worker: str) -> None:
        await self.http.post(f"/admin/workers/{worker}/drain", headers=ADMIN)

    def before(self, worker: str, kind: str, number: int, change: Callable[[], None]) -> None:
        """Call `change` just before the worker gets its n-th call of a kind from now on."""
        self._hooks[worker, kind, self._num_calls[worker, kind] + number] = change

    def _reply_record(self, reply: httpx.Response, raw: bytes) -> Json:
        record: Json = {"status": reply.status_code, "headers": _headers(reply)}
        if reply.headers["content-type"].startswith("text/event-stream"):
            return record | self._stream_record(raw.decode())
        body = self.last_reply = orjson.loads(raw)
        if "error" in body:
            return record | {"error": _error(body["error"])}
        if "choices" in body:
            (choice,) = body["choices"]
            record["answer"] = _answer(choice.get("message") or choice, choice)
            record["usage"] = _usage(body["usage"])
            record["report"] = self._report(body["kvrelay"])
            return record
        return record | {"reply": self._plain(body)}

    def _stream_record(self, text: str) -> Json:
        kinds, report, deltas, finish, usage = [], None, [], None, None
        error = None
        for event in text.split("\n\n")[:-1]:
            kind = "comment"
            if event.startswith("data: "):
                chunk = {} if event == "data: [DONE]" else orjson.loads(event.removeprefix("data: "))
                kind = _kind(chunk)
                report = chunk.get("kvrelay", report)
                usage = chunk.get("usage", usage)
                error = chunk.get("error", error)
                for choice in chunk.get("choices") or ():
                    deltas.append(choice.get("delta") or {"content": choice.get("text")})
                    finish = choice.get("finish_reason") or finish
            kinds.append(kind)
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        record: Json = {"events": _counted(kinds)}
        record["answer"] = _answer({"content": text, "tool_calls": calls}, {"finish_reason": finish})
        record |= {"usage": _usage(usage)} if usage else {}
        record |= {"report": self._report(report)} if report else {}
        return record | ({"error": _error(error)} if error else {})

    def _report(self, field: Json) -> Json:
        """The `kvrelay` field without nulls and false flags, and with names in place of times."""
        explained = field.pop("explained", None)
        report: Json = {
            key: value
            for key, value in field.items()
            if key not in TIMES and value is not (False if key in FLAGS else None)
        }
        report["times"] = " ".join(key.removesuffix("_ms") for key in field if key in TIMES and field[key] is not None)
        if "confidence" in report:
            report["confidence"] = round(report["confidence"], 4)
        if explained is not None:
            report["explained"] = self._plain(explained)
        if field.keys() != REPORT_KEYS:
            report["keys"] = sorted(field.keys() ^ REPORT_KEYS)
        return report

    def _plain(self, value: Any) -> Any:
        """A reply's JSON with short ids, and without times and digests."""
        if isinstance(value, list):
            return [self._plain(one) for one in value]
        if not isinstance(value, dict):
            return round(value, 2) if isinstance(value, float) else value
        plain: Json = {}
        for key, inner in value.items():
            if key == "cache_id":
                plain[key] = self._caches.of(inner)
            elif isinstance(inner, (str, float)) and (key.endswith("_ms") or key in ("digest", "epoch", "expires_at")):
                plain[key] = "..."
            else:
                plain[key] = self._plain(inner)
        return plain

    async def _metrics(self) -> Json:
        """Changes since the turn before, by metric and label values, sorted by label name."""
        counted: dict[str, float] = {}
        for line in (await self.http.get("/metrics")).text.splitlines():
            sample = SAMPLE.fullmatch(line)
            if sample is not None and sample["name"] in COUNTED and 'model="none"' not in line:  # the harness
                name = re.sub("_total$|(_seconds)?_count$", "", sample["name"])
                labels = sorted(LABEL.findall(sample["labels"] or ""))
                counted[" ".join([name, *(value for _, value in labels)])] = float(sample["value"])
        changes = {key: counted[key] - self._counted.get(key, 0.0) for key in sorted(counted)}
        self._counted = counted
        return {key: int(change) for key, change in changes.items() if change}

    async def _charge(self) -> Json:
        tenants = (await self.http.get("/admin/usage", headers=ADMIN)).json()["tenants"]
        charged: Json = {}
        for name, used in tenants.items():
            before = self._charged.get(name, {})
            for key, count in used.items():
                if count != before.get(key, 0):
                    charged[key if name == "default" else f"{name} {key}"] = count - before.get(key, 0)
        self._charged = tenants
        return charged


def _headers(reply: httpx.Response) -> Json:
    record = {key.removeprefix("x-kvrelay-"): value for key, value in reply.headers.items() if _is_recorded(key)}
    if "overhead-ms" in record:
        record["overhead-ms"] = "ms" if re.fullmatch(r"\d+\.\d\d", record["overhead-ms"]) else "?"
    return record


def _is_recorded(header: str) -> bool:
    return header.startswith("x-kvrelay-") or header in ("retry-after", "x-should-retry")


def _error(error: Json) -> Json:
    return {key: error[key] for key in ("type", "code", "param") if error[key] is not None}


def _answer(message: Json, choice: Json) -> Json:
    text = message.get("content", message.get("text"))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"text": text, "finish": choice.get("finish_reason")} | ({"tool_calls": calls} if calls else {})


def _usage(usage: Json) -> Json:
    counts = {key.removesuffix("_tokens"): usage[key] for key in ("prompt_tokens", "completion_tokens")}
    return counts | {"cached": usage["prompt_tokens_details"]["cached_tokens"]}


def _kind(chunk: Json) -> str:
    if not chunk:
        return "done"
    if "error" in chunk:
        return "error"
    kinds = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {"content": choice.get("text")}
        kinds += ["finish"] if choice.get("finish_reason") else []
        kinds += ["role"] if delta.get("role") else []
        kinds += [key.removesuffix("_calls") for key in ("content", "tool_calls") if delta.get(key)]
    kinds += [key for key in ("usage", "kvrelay") if chunk.get(key)]
    return "+".join(kinds) or "empty"


def _counted(kinds: list[str]) -> str:
    """`role content content done` as `role content*2 done`."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        num_before = runs.pop()[1] if runs and runs[-1][0] == kind else 0
        runs.append((kind, num_before + 1))
    return " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)
