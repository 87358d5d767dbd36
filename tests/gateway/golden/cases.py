"""The cases of the table: combinations of routes, caches and faults.

A case is a route, the caches that earlier requests left, and a fault. `CASES` is generated from the lists below, with
unique names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.golden.world import POLL_S, World
from tools.fake_worker import FakeWorker
from workers.api.errors import (
    BundleUnusable,
    CacheMismatch,
    CacheNotFound,
    CacheStale,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    NoTime,
    Overloaded,
    PoolFull,
    PrefillCheaper,
    TransferCorrupted,
    TransferFailed,
    WorkerUnavailable,
)

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "Know this: " + " ".join(f"word{index}" for index in range(300))}
USER = {"role": "user", "content": "What comes after word41?"}
OTHER_USER = {"role": "user", "content": "What comes before word7?"}
NEXT_USER = {"role": "user", "content": "And then?"}
LONG_USER = {"role": "user", "content": "Consider this too: " + " ".join(f"more{index}" for index in range(300))}
BULKY_USER = {"role": "user", "content": "And this: " + " ".join("x" * 100 for _ in range(21))}
MESSAGES = [SYSTEM, USER]

SURE, UNSURE, WAVERING, LOST = -0.1, -2.0, -0.9, -4.0
CONFIDENCE = {"name": "confidence", "threshold": -0.5, "num_tokens": 3}
QUESTION = "Is your answer correct and complete? Reply with Yes or No."


# Routes


@dataclass(frozen=True)
class Route:
    """Request fields (`body`), sections of the configuration (`settings`) and the set-up of the fake workers."""

    body: Json = field(default_factory=dict)
    settings: Json = field(default_factory=dict)
    prepare: Callable[[World], None] = lambda world: None
    is_text: bool = False


def scores(small: float = SURE, mid: float = SURE, token_s: float = 0.0) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.small.logprob, world.mid.logprob = small, mid
        world.small.token_s = token_s

    return prepare


def verdict(text: str) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.small.canned_answers = world.mid.canned_answers = {QUESTION: text}

    return prepare


def policy(name: str, **fields: Any) -> Json:
    return {"policy": {"name": name} | fields}


def confidence(**fields: Any) -> Json:
    return {"policy": CONFIDENCE | fields}


EARLY = confidence(num_tokens=6, speculate_after=2)
RULES = policy(
    "rules",
    rules=[
        {"name": "code", "when": {"keywords": ["word41"]}, "then": {"name": "fixed", "tier": "large"}},
        {"name": "short", "when": {"max_chars": 5000}, "then": {"name": "always_escalate"}},
    ],
    otherwise=CONFIDENCE,
)

ROUTES: dict[str, Route] = {
    "auto-accepts": Route(),
    "auto-escalates": Route(prepare=scores(UNSURE)),
    "auto-early": Route(settings=EARLY, prepare=scores(WAVERING, token_s=0.05)),
    "always-escalate": Route({"kvrelay": {"policy": "always_escalate"}}),
    "named-small": Route({"model": "small"}),
    "named-large": Route({"model": "large"}),
    "named-model": Route({"model": "fake-large"}),
    "unknown-model": Route({"model": "huge"}),
    "fixed-small": Route({"kvrelay": {"policy": "fixed"}}),
    "fixed-large": Route(settings=policy("fixed", tier="large")),
    "verifier-yes": Route(settings=policy("verifier"), prepare=verdict("Yes")),
    "verifier-no": Route(settings=policy("verifier"), prepare=verdict("No")),
    "verifier-mute": Route(settings=policy("verifier"), prepare=verdict("Perhaps")),
    "exact-accepts": Route({"kvrelay": {"exact": True}}),
    "exact-escalates": Route({"kvrelay": {"exact": True}}, prepare=scores(UNSURE)),
    "exact-always": Route({"kvrelay": {"exact": True, "policy": "always_escalate"}}),
    "no-cache-accepts": Route({"kvrelay": {"no_cache": True}}),
    "no-cache-escalates": Route({"kvrelay": {"no_cache": True}}, prepare=scores(UNSURE)),
    "no-cache-always": Route({"kvrelay": {"no_cache": True, "policy": "always_escalate"}}),
    "no-cache-named": Route({"kvrelay": {"no_cache": True}, "model": "large"}),
    "max-tier-small": Route({"kvrelay": {"max_tier": "small"}}, prepare=scores(UNSURE)),
    "buffer-accepts": Route(settings=confidence(streaming="buffer")),
    "buffer-escalates": Route(settings=confidence(streaming="buffer"), prepare=scores(UNSURE)),
    "stream-small": Route(settings=confidence(streaming="stream_small"), prepare=scores(UNSURE)),
    "rules": Route(settings=RULES),
    "text-accepts": Route(is_text=True),
    "text-escalates": Route(is_text=True, prepare=scores(UNSURE)),
    "text-named": Route({"model": "large"}, is_text=True),
    "logprobs": Route({"logprobs": True, "top_logprobs": 1}, prepare=scores(UNSURE)),
    "probe": Route({"kvrelay": {"policy": "always_escalate", "agreement_probe": 4}}),
    "explained": Route({"kvrelay": {"explain": True}}, prepare=scores(UNSURE)),
    "mid-accepts": Route(prepare=scores(UNSURE, SURE)),
    "mid-escalates": Route(prepare=scores(UNSURE, UNSURE)),
    "leap": Route(settings=confidence(leap_below=-1.5), prepare=scores(UNSURE)),
    "skip": Route(settings=confidence(skip=["mid"]), prepare=scores(UNSURE)),
    "max-tier-mid": Route({"kvrelay": {"max_tier": "mid"}}, prepare=scores(UNSURE)),
    "named-mid": Route({"model": "mid"}),
    "verifier-mid": Route(settings=policy("verifier"), prepare=verdict("No")),
}


# Caches: each function sends earlier requests, outside the record, and returns the recorded request's body.


async def _none(world: World) -> Json:
    return {"messages": MESSAGES}


async def _chat(world: World, messages: list[Json], **fields: Any) -> Json:
    """Send a chat request and return the reply's body."""
    reply = await world.http.post("/v1/chat/completions", json={"model": "auto", "messages": messages} | fields)
    assert reply.status_code == 200, reply.text
    body: Json = reply.json()
    return body


async def _next_turn(world: World, question: Json, messages: list[Json] = MESSAGES, **fields: Any) -> list[Json]:
    reply = await _chat(world, messages, **fields)
    return [*messages, reply["choices"][0]["message"], question]


async def _small_whole(world: World) -> Json:
    await _chat(world, MESSAGES, model="small")
    return {"messages": MESSAGES}


async def _small_prefix(world: World) -> Json:
    await _chat(world, [SYSTEM, OTHER_USER], model="small")
    return {"messages": MESSAGES}


async def _small_turn(world: World) -> Json:
    return {"messages": await _next_turn(world, NEXT_USER, model="small")}


async def _small_lost(world: World) -> Json:
    body = await _small_whole(world)
    world.small.caches.clear()
    return body


async def _small_restarted(world: World) -> Json:
    body = await _small_whole(world)
    world.small.restart()
    return body


async def _large_exact(world: World) -> Json:
    return {"messages": await _next_turn(world, NEXT_USER, model="large")}


async def _large_exact_lost(world: World) -> Json:
    body = await _large_exact(world)
    world.large.caches.clear()
    return body


async def _large_exact_far(world: World) -> Json:
    return {"messages": await _next_turn(world, LONG_USER, model="large")}


async def _large_exact_bulky(world: World) -> Json:
    return {"messages": await _next_turn(world, BULKY_USER, model="large")}


async def _large_exact_bulky_lost(world: World) -> Json:
    body = await _large_exact_bulky(world)
    world.large.caches.clear()
    return body


async def _large_mapped(world: World) -> Json:
    return {"messages": await _next_turn(world, NEXT_USER, kvrelay={"policy": "always_escalate"})}


async def _large_mapped_lost(world: World) -> Json:
    body = await _large_mapped(world)
    world.large.restart()
    return body


async def _both(world: World) -> Json:
    """The small model has cached the whole prompt, the large one the turn before."""
    messages = await _next_turn(world, NEXT_USER, model="large")
    await _chat(world, messages, model="small")
    return {"messages": messages}


async def _above(world: World) -> Json:
    """The large model has cached two turns, the small one none."""
    messages = await _next_turn(world, LONG_USER, model="large")
    return {"messages": await _next_turn(world, NEXT_USER, messages, model="large")}


async def _above_lost(world: World) -> Json:
    body = await _above(world)
    world.large.caches.clear()
    return body


async def _prefill(world: World, **fields: Any) -> str:
    reply = await world.http.post("/v1/prefix/prefill", json={"messages": MESSAGES} | fields)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["cache_id"])


async def _named_small(world: World) -> Json:
    return {"messages": MESSAGES, "kv_transfer_params": {"cache_id": await _prefill(world)}}


async def _named_large(world: World) -> Json:
    return {"messages": MESSAGES, "kv_transfer_params": {"cache_id": await _prefill(world, target_model="large")}}


async def _named_mapped(world: World) -> Json:
    body = {"cache_id": await _prefill(world), "target_model": "large"}
    reply = await world.http.post("/v1/cache/transfer", json=body)
    assert reply.status_code == 200, reply.text
    return {"messages": MESSAGES, "kv_transfer_params": {"cache_id": reply.json()["cache_id"]}}


async def _named_unknown(world: World) -> Json:
    return {"messages": MESSAGES, "kv_transfer_params": {"cache_id": "kvc-" + "0" * 32}}


async def _named_lost(world: World) -> Json:
    body = await _named_small(world)
    world.small.caches.clear()
    return body


async def _named_restarted(world: World) -> Json:
    """The gateway has noticed the restart."""
    body = await _named_small(world)
    world.small.restart()
    await asyncio.sleep(1.5 * POLL_S)
    return body


async def _named_other(world: World) -> Json:
    """The named cache holds other tokens."""
    body = await _named_small(world)
    return body | {"messages": [{"role": "user", "content": "Something else entirely"}]}


CACHES: dict[str, Callable[[World], Awaitable[Json]]] = {
    "none": _none,
    "small-whole": _small_whole,
    "small-prefix": _small_prefix,
    "small-turn": _small_turn,
    "small-lost": _small_lost,
    "small-restarted": _small_restarted,
    "large-exact": _large_exact,
    "large-exact-lost": _large_exact_lost,
    "large-exact-far": _large_exact_far,
    "large-exact-bulky": _large_exact_bulky,
    "large-exact-bulky-lost": _large_exact_bulky_lost,
    "large-mapped": _large_mapped,
    "large-mapped-lost": _large_mapped_lost,
    "both": _both,
    "above": _above,
    "above-lost": _above_lost,
    "named-small": _named_small,
    "named-large": _named_large,
    "named-mapped": _named_mapped,
    "named-unknown": _named_unknown,
    "named-lost": _named_lost,
    "named-restarted": _named_restarted,
    "named-other": _named_other,
}


# Faults: `where what`, several joined by ` + `

CACHED, PLAIN = ("cached_chat", "cached_complete"), ("chat", "complete")
WHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prefill": ("small-0", ("prefill",)),
    "small-answer": ("small-0", CACHED + PLAIN),
    "small": ("small-0", ("prefill", "transfer") + CACHED + PLAIN),
    "descent": ("small-0", ("transfer",)),
    "transfer": ("large-0", ("transfer",)),
    "large-cached": ("large-0", CACHED),
    "large-plain": ("large-0", PLAIN),
    "large-answer": ("large-0", CACHED + PLAIN),
    "large": ("large-0", ("transfer",) + CACHED + PLAIN),
    "mid-transfer": ("mid-0", ("transfer",)),
    "mid-cached": ("mid-0", CACHED),
    "mid-plain": ("mid-0", PLAIN),
    "mid": ("mid-0", ("transfer",) + CACHED + PLAIN),
}
ERRORS: dict[str, KvrelayError] = {
    "unavailable": WorkerUnavailable("gone"),
    "bug": KvrelayError("a bug"),
    "overloaded": Overloaded("full", retry_after_s=3),
    "pool-full": PoolFull("full", retry_after_s=3),
    "times-out": DeadlineExceeded("too late"),
    "invalid": InvalidRequest("no template for tools", param="tools"),
    "too-long": ContextLengthExceeded("the prompt is too long", param="messages"),
    "not-found": CacheNotFound("evicted"),
    "stale": CacheStale("written since"),
    "mismatch": CacheMismatch("another tenant's"),
    "no-bundle": BundleUnusable("no mapper for this pair"),
    "prefill-cheaper": PrefillCheaper("a prefill costs no more"),
    "no-time": NoTime("it would end too late"),
    "failed": TransferFailed("the source is gone"),
    "corrupted": TransferCorrupted("what arrived is not what was sent"),
}
LATE_S = 60.0


async def apply(world: World, fault: str) -> None:
    for part in fault.split(" + "):
        if part == "none":
            continue
        where, what = part.split(" ")
        name, calls = WHERE[where]
        worker = world.workers[name]
        if what == "unreachable":
            world.unreachable.add(name)
        elif what == "down":
            await _down(worker)
        elif what == "frozen":
            worker.is_frozen = True
        elif what == "hybrid":
            worker.by_cost = 200
        elif where == "follow-up":
            raise AssertionError(fault)
        else:
            for call in calls:
                fail(worker, call, what)


async def _down(worker: FakeWorker) -> None:
    """Fail every call, and wait for two health checks."""
    worker.fail("info", WorkerUnavailable("gone"))
    worker.fail("readyz", WorkerUnavailable("gone"))
    for call in ("prefill", "transfer", *CACHED, *PLAIN):
        worker.fail(call, WorkerUnavailable("gone"))
    await asyncio.sleep(2.5 * POLL_S)


def fail(worker: FakeWorker, call: str, what: str) -> None:
    if what in ERRORS:
        worker.fail(call, ERRORS[what])
    elif what == "late":
        worker.delay(call, LATE_S)
    elif what == "slow":
        worker.delay(call, 2.0)
    elif what == "garbage":
        worker.garble(call)
    else:
        kind, after = what.split("@")
        {"breaks": worker.break_off, "cut": worker.cut, "stalls": worker.stall}[kind](call, after=int(after))


# Cases

STREAMED = ("unavailable", "late", "down", "hybrid", "cheaper", "@")  # the rest act before the first token


@dataclass(frozen=True)
class Case:
    route: str
    cache: str = "none"
    fault: str = "none"
    stream: bool = False
    tiers: str = "2"

    @property
    def name(self) -> str:
        form = "stream" if self.stream else "whole"
        return f"{self.route} / {self.cache} / {self.fault} / {form} / {self.tiers}"

    @property
    def settings(self) -> Json:
        return ROUTES[self.route].settings

    @property
    def maps_down(self) -> bool:
        """Whether the small worker has a bundle for the large one's caches."""
        return self.cache.startswith("above")

    async def play(self, world: World) -> None:
        route = ROUTES[self.route]
        prepared = await CACHES[self.cache](world)
        if self.cache != "none":
            await world.forget_metrics()
        route.prepare(world)
        await apply(world, self.fault)
        body: Json = {"model": "auto"} | prepared | route.body
        path = "/v1/chat/completions"
        if route.is_text:
            path, body["prompt"] = "/v1/completions", " ".join(one["content"] for one in body.pop("messages"))
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        await world.turn(body, path=path)


def rows(
    routes: str,
    caches: str = "none",
    faults: Sequence[str] = ("none",),
    *,
    streams: bool = True,
    tiers: str = "2",
) -> Iterator[Case]:
    """Every combination as a whole answer, and as a stream without a fault or with one in `STREAMED`."""
    for route in routes.split():
        for cache in caches.split():
            for fault in faults:
                yield Case(route, cache, fault, tiers=tiers)
                if streams and (fault == "none" or any(one in fault for one in STREAMED)):
                    yield Case(route, cache, fault, stream=True, tiers=tiers)


def at(where: str, whats: str) -> list[str]:
    return [f"{where} {what}" for what in whats.split()]


BEFORE_FIRST = "unavailable bug overloaded times-out late garbage invalid too-long"
BROKEN = "breaks@0 breaks@2 cut@2 stalls@2"
NO_SMALL = [*at("prefill", BEFORE_FIRST), "small down", "small unreachable", "small frozen"]
NO_TRANSFER = at(
    "transfer",
    "failed corrupted not-found stale mismatch no-bundle prefill-cheaper no-time overloaded pool-full "
    "bug unavailable late garbage",
)
NO_LARGE = ["large unavailable", "large unreachable", "large overloaded", "large late", "large down", "large too-long"]


def _all() -> Iterator[Case]:
    # The small model answers.
    yield from rows(
        "auto-accepts", "small-whole small-prefix small-turn small-lost small-restarted above above-lost both"
    )
    yield from rows("auto-accepts", faults=["none", *NO_SMALL])
    yield from rows("auto-accepts", faults=at("small-answer", f"{BEFORE_FIRST} not-found {BROKEN}"))
    yield from rows("auto-accepts", faults=at("small-answer", "breaks@5 cut@5 stalls@5"))
    yield from rows("auto-accepts", "small-whole", at("small-answer", "unavailable late breaks@5"))
    yield from rows("auto-accepts", "above", at("descent", "failed late no-bundle prefill-cheaper hybrid"))
    yield from rows("auto-accepts", "above", at("small-answer", "unavailable breaks@2 breaks@5"))
    yield from rows("auto-accepts", faults=["small down + large down", "small unavailable + large unavailable"])
    yield from rows("auto-accepts", faults=["large down"])
    # The large model takes over.
    yield from rows(
        "auto-escalates",
        "none small-whole small-prefix small-turn small-lost large-exact large-exact-lost large-exact-far "
        "large-exact-bulky large-exact-bulky-lost large-mapped large-mapped-lost both above above-lost",
    )
    yield from rows("auto-escalates", faults=at("prefill", "unavailable late overloaded too-long invalid"))
    yield from rows("auto-escalates", faults=at("small-answer", "unavailable late breaks@0 cut@0 stalls@0"))
    yield from rows("auto-escalates", faults=[*NO_TRANSFER, "transfer hybrid"])
    yield from rows("auto-escalates", faults=at("large-cached", f"{BEFORE_FIRST} not-found mismatch {BROKEN}"))
    yield from rows("auto-escalates", faults=[*NO_LARGE, *at("large", "breaks@2 stalls@2")])
    for broken in ("unavailable", "late", "breaks@2", "overloaded"):
        yield from rows("auto-escalates", faults=[f"transfer failed + large-plain {broken}"])
    yield from rows(
        "auto-escalates", "large-exact large-mapped", at("large-cached", "unavailable late breaks@2 stalls@2")
    )
    yield from rows("auto-escalates", "large-exact above", ["large down", "large unavailable"])
    yield from rows("auto-escalates", "small-whole", at("small-answer", "invalid unavailable late"))
    yield from rows("auto-early", "none small-whole large-exact")
    yield from rows("auto-early", faults=at("transfer", "slow late failed prefill-cheaper"))
    yield from rows("auto-early", faults=at("large-cached", "unavailable breaks@2"))
    yield from rows("auto-early", faults=["small-answer breaks@3", "small-answer stalls@3", "large down"])
    yield from rows(
        "always-escalate", "none small-whole small-prefix small-lost large-exact large-mapped large-exact-lost"
    )
    yield from rows("always-escalate", faults=NO_SMALL)
    yield from rows("always-escalate", faults=at("transfer", "failed not-found no-bundle prefill-cheaper late hybrid"))
    yield from rows("always-escalate", faults=at("large-cached", "unavailable late too-long breaks@2 stalls@2"))
    yield from rows("always-escalate", faults=[*NO_LARGE, "large breaks@2"])
    yield from rows("always-escalate", faults=["small down + large down", "small down + large unavailable"])
    # One tier answers.
    yield from rows("named-large", "none large-exact large-exact-lost large-mapped small-whole")
    yield from rows("named-large", faults=at("large", f"{BEFORE_FIRST} {BROKEN} unreachable down"))
    yield from rows("named-large", "large-exact", at("large-cached", "unavailable late breaks@2"))
    yield from rows("named-small", "none small-whole", ["none", "small unavailable", "small down", "small breaks@2"])
    yield from rows("named-model unknown-model max-tier-small fixed-small")
    yield from rows("fixed-large", "none large-exact", ["none", "large unavailable", "large breaks@2"])
    yield from rows("named-large", faults=["none", "large unavailable", "large overloaded"], tiers="2+1", streams=False)
    # A second worker in the large tier.
    yield from rows(
        "auto-escalates",
        "none large-exact",
        ["none", "transfer failed", *at("large-cached", "unavailable late"), *at("large", "unavailable late down")],
        streams=False,
        tiers="2+1",
    )
    # The policy judges the whole answer.
    yield from rows(
        "verifier-yes verifier-no verifier-mute buffer-accepts buffer-escalates stream-small", "none small-whole"
    )
    yield from rows("verifier-yes", faults=["small-answer breaks@5", "large down"])
    yield from rows(
        "verifier-no", faults=["transfer failed", "large unavailable", "large-cached breaks@2", "large down"]
    )
    yield from rows("buffer-accepts", faults=["small-answer breaks@5", "small-answer stalls@5"])
    # Exact caches only, or no caches.
    yield from rows("exact-accepts exact-escalates exact-always", "none small-whole large-exact large-mapped above")
    yield from rows(
        "exact-escalates", faults=["large unavailable", "large-plain breaks@2", "large down", "prefill late"]
    )
    yield from rows("exact-always", faults=["large unavailable", "large down", "large-plain late"])
    yield from rows("no-cache-accepts no-cache-escalates no-cache-always no-cache-named", "none large-exact")
    yield from rows("no-cache-accepts", faults=at("small-answer", "unavailable late breaks@0 breaks@5"))
    yield from rows("no-cache-escalates", faults=["large unavailable", "large-plain breaks@2", "large down"])
    # A cache that the client names.
    yield from rows(
        "auto-accepts", "named-small named-large named-mapped named-unknown named-lost named-restarted named-other"
    )
    yield from rows("named-small named-large", "named-small named-mapped", streams=False)
    yield from rows("exact-accepts", "named-small named-mapped")
    yield from rows("auto-accepts", "named-small", at("small-answer", "unavailable late breaks@2"))
    yield from rows("auto-accepts", "named-mapped", at("large-cached", "unavailable breaks@2"))
    # Other forms of a request.
    yield from rows("rules logprobs probe explained")
    yield from rows("text-accepts text-escalates text-named", faults=["none"])
    yield from rows("text-escalates", faults=["transfer failed", "large-cached breaks@2", "large unavailable"])
    # Three tiers.
    yield from rows(
        "auto-accepts always-escalate mid-accepts mid-escalates leap skip max-tier-mid named-mid", tiers="3"
    )
    yield from rows("verifier-mid", tiers="3")
    yield from rows("mid-accepts mid-escalates", "small-whole large-exact above", tiers="3")
    yield from rows("mid-escalates", "above", ["large-cached stale"], tiers="3")
    yield from rows(
        "mid-accepts mid-escalates",
        faults=[
            *at("mid-transfer", "failed late prefill-cheaper"),
            *at("mid-cached", "unavailable late breaks@0 breaks@5 stalls@5"),
            *at("mid", "unavailable late down overloaded too-long breaks@5"),
            "prefill unavailable",
            "prefill late",
            "small-answer unavailable",
            "large down",
            "mid down + large down",
            "mid unavailable + large unavailable",
        ],
        tiers="3",
    )
    yield from rows(
        "mid-escalates", faults=["transfer failed", "large-cached unavailable", "large-cached breaks@2"], tiers="3"
    )
    yield from rows("mid-escalates", faults=["large unavailable", "large late"], tiers="3")


def _by_name() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for case in _all():
        assert case.name not in cases, case.name
        cases[case.name] = case
    return cases


CASES = _by_name()
