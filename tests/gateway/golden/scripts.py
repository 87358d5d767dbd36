"""The scripts of the table: several turns, hang-ups, limits, circuits, clients that manage caches.

A script is named `group / title`. Each recorded turn has a label.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.gateway.golden.cases import (
    ERRORS,
    LONG_USER,
    MESSAGES,
    NEXT_USER,
    OTHER_USER,
    QUESTION,
    SURE,
    SYSTEM,
    UNSURE,
    USER,
    WAVERING,
    apply,
    confidence,
    fail,
    policy,
)
from tests.gateway.golden.world import POLL_S, World
from workers.api.schemas import Rates

Json = dict[str, Any]
Play = Callable[[World], Awaitable[None]]

ESCALATE: Json = {"kvrelay": {"policy": "always_escalate"}}
UNKNOWN_ID = "kvc-" + "0" * 32
KEYS = {"default": "key-of-default", "acme": "key-of-acme"}


@dataclass(frozen=True)
class Script:
    name: str
    play: Play
    settings: Json = field(default_factory=dict)
    tiers: str = "2"
    maps_down: bool = False


SCRIPTS: dict[str, Script] = {}


def script(name: str, *, tiers: str = "2", maps_down: bool = False, **settings: Any) -> Callable[[Play], Play]:
    def register(play: Play) -> Play:
        assert name not in SCRIPTS, name
        SCRIPTS[name] = Script(name, play, settings, tiers, maps_down)
        return play

    return register


async def chat(world: World, label: str, messages: list[Json] = MESSAGES, **fields: Any) -> list[Json]:
    """Record a chat turn; return the conversation with its answer."""
    client = {key: fields.pop(key) for key in ("hang_up_at_s", "api_key") if key in fields}
    turn = await world.turn({"model": "auto", "messages": messages} | fields, label=label, **client)
    return [*messages, {"role": "assistant", "content": turn.get("answer", {}).get("text") or ""}]


async def post(world: World, label: str, path: str, **body: Any) -> Json:
    """Record a call to another route; return its reply with full ids."""
    await world.turn(body, path=f"/v1/{path}", label=label)
    return world.last_reply


def fresh_prompt(word: str) -> list[Json]:
    """A prompt that shares no prefix with another."""
    return [{"role": "system", "content": f"{word} {SYSTEM['content']}"}, USER]


# Several turns


@script("turns / the small model answers, and goes on from its cache")
async def _(world: World) -> None:
    talk = await chat(world, "first")
    talk = await chat(world, "second", [*talk, NEXT_USER])
    await chat(world, "third, streamed", [*talk, USER], stream=True)


@script("turns / handed over, then the large model goes on from its mapped cache")
async def _(world: World) -> None:
    talk = await chat(world, "first", **ESCALATE)
    talk = await chat(world, "second", [*talk, NEXT_USER], **ESCALATE)
    await chat(world, "third, judged", [*talk, USER])


@script("turns / sure, unsure, sure")
async def _(world: World) -> None:
    talk = await chat(world, "sure")
    world.small.logprob = UNSURE
    talk = await chat(world, "unsure", [*talk, NEXT_USER])
    world.small.logprob = SURE
    talk = await chat(world, "sure again", [*talk, USER])
    world.small.logprob = UNSURE
    await chat(world, "unsure again", [*talk, NEXT_USER])


@script("turns / up to large, down to small, and up again", maps_down=True)
async def _(world: World) -> None:
    talk = await chat(world, "large by name", model="large")
    talk = await chat(world, "large by name, long", [*talk, LONG_USER], model="large")
    talk = await chat(world, "small", [*talk, NEXT_USER])
    world.small.logprob = UNSURE
    await chat(world, "unsure", [*talk, USER])


@script("turns / up to mid, then to large", tiers="3")
async def _(world: World) -> None:
    world.small.logprob = UNSURE
    talk = await chat(world, "mid answers")
    world.mid.logprob = UNSURE
    talk = await chat(world, "large answers", [*talk, NEXT_USER])
    world.mid.logprob = SURE
    await chat(world, "mid answers again", [*talk, USER])


@script("turns / asked again, word for word")
async def _(world: World) -> None:
    await chat(world, "first")
    world.small.logprob = UNSURE
    await chat(world, "now unsure")
    await chat(world, "forced", **ESCALATE)
    await chat(world, "large by name", model="large")
    await chat(world, "forced, with an exact cache above", **ESCALATE)


@script("turns / another question after the same system prompt")
async def _(world: World) -> None:
    await chat(world, "large by name", model="large")
    world.small.logprob = UNSURE
    await chat(world, "other question, unsure", [SYSTEM, OTHER_USER])
    await chat(world, "other question, by name", [SYSTEM, NEXT_USER], model="large")


@script("turns / a client's mark ends the stable part")
async def _(world: World) -> None:
    marked: list[Json] = [SYSTEM, USER | {"cache_control": {"type": "ephemeral"}}]
    await chat(world, "marked", marked)
    await chat(world, "the same and more", [*marked, {"role": "assistant", "content": "word42"}, NEXT_USER])


@script("turns / caches expire")
async def _(world: World) -> None:
    await chat(world, "first")
    await chat(world, "forced", **ESCALATE)
    await asyncio.sleep(301)
    await chat(world, "after five minutes")
    await chat(world, "forced again", **ESCALATE)


@script("turns / a restart of the small worker that is noticed")
async def _(world: World) -> None:
    await chat(world, "first")
    world.small.restart()
    await asyncio.sleep(1.5 * POLL_S)
    await chat(world, "after the restart")


@script("turns / the source restarts before a handoff")
async def _(world: World) -> None:
    await chat(world, "first")
    world.small.restart()
    await chat(world, "forced", **ESCALATE)
    await chat(world, "forced again", **ESCALATE)


@script("turns / no_cache neither reads nor stores")
async def _(world: World) -> None:
    await chat(world, "no_cache", kvrelay={"no_cache": True})
    await chat(world, "stored")
    await chat(world, "no_cache again", kvrelay={"no_cache": True})


@script("turns / exact stores for all, and takes nothing mapped")
async def _(world: World) -> None:
    world.small.logprob = UNSURE
    talk = await chat(world, "mapped")
    await chat(world, "exact", [*talk, NEXT_USER], kvrelay={"exact": True})
    await chat(world, "mapped allowed", [*talk, NEXT_USER])


@script("turns / rates are learnt")
async def _(world: World) -> None:
    for worker in world.workers.values():
        worker.rates = Rates()
    await asyncio.sleep(1.5 * POLL_S)
    await chat(world, "nothing known", **ESCALATE)
    await chat(world, "large by name", [USER | {"content": str(SYSTEM["content"])}], model="large")
    await chat(world, "known", [SYSTEM, OTHER_USER], **ESCALATE)


@script("turns / a mapped prefix is reused")
async def _(world: World) -> None:
    world.large.reused_tokens = 100
    await chat(world, "forced", **ESCALATE)


@script("turns / a text, twice")
async def _(world: World) -> None:
    body = {"model": "auto", "prompt": str(SYSTEM["content"])}
    await world.turn(body, path="/v1/completions", label="first")
    await world.turn(body, path="/v1/completions", label="second")
    await world.turn(body | ESCALATE, path="/v1/completions", label="forced")


TENANTS = {name: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}


@script("turns / a tenant's caches are its own", tenants=TENANTS)
async def _(world: World) -> None:
    await chat(world, "default", api_key=KEYS["default"])
    await chat(world, "acme", api_key=KEYS["acme"])
    await chat(world, "acme, forced", api_key=KEYS["acme"], **ESCALATE)
    await chat(world, "no key")


@script(
    "turns / a tenant may use one model only",
    tenants=TENANTS | {"acme": TENANTS["acme"] | {"models": ["small"]}},
)
async def _(world: World) -> None:
    world.small.logprob = UNSURE
    await chat(world, "auto", api_key=KEYS["acme"])
    await chat(world, "large by name", api_key=KEYS["acme"], model="large")
    await chat(world, "forced", api_key=KEYS["acme"], **ESCALATE)


# Kinds of answers

CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@script("answers / a tool call")
async def _(world: World) -> None:
    for worker in world.workers.values():
        worker.tool_call = CALL
    await chat(world, "whole", tools=TOOLS)
    await chat(world, "streamed", tools=TOOLS, stream=True)
    await chat(world, "escalated", tools=TOOLS, **ESCALATE)
    await chat(world, "no tools wanted", tools=TOOLS, tool_choice="none")


@script("answers / an empty one")
async def _(world: World) -> None:
    world.small.answer = ""
    await chat(world, "whole")
    await chat(world, "streamed", stream=True)
    await chat(world, "small by name", model="small")


@script("answers / cut to two tokens, before the verdict would be due")
async def _(world: World) -> None:
    await chat(world, "sure", max_tokens=2)
    world.small.logprob = UNSURE
    await chat(world, "unsure", max_tokens=2)


@script("answers / a form that one model lacks")
async def _(world: World) -> None:
    world.large.response_formats = ["text", "json_object"]
    await asyncio.sleep(1.5 * POLL_S)
    form: Json = {"response_format": {"type": "json_object"}}
    await chat(world, "auto", **form)
    await chat(world, "small by name", model="small", **form)
    await chat(world, "forced", **form, **ESCALATE)
    await chat(world, "up to small", **form, kvrelay={"max_tier": "small"})


@script("answers / usage is reported at the end only")
async def _(world: World) -> None:
    for worker in world.workers.values():
        worker.reports_early = False
    talk = await chat(world, "first", stream=True)
    await chat(world, "again", stream=True)
    await chat(world, "large by name", model="large", stream=True)
    await chat(world, "large by name again", model="large", stream=True)
    await chat(world, "forced", [*talk, NEXT_USER], stream=True, **ESCALATE)
    await chat(world, "forced, whole", [*talk, NEXT_USER], **ESCALATE)
    await chat(world, "large by name, whole", model="large")
    await chat(world, "a prompt that begins alike", [{"role": "system", "content": f"{SYSTEM['content']} more"}, USER])


@script("answers / every handoff is shadowed", shadow={"share": 1.0})
async def _(world: World) -> None:
    talk = await chat(world, "forced", **ESCALATE)
    await chat(world, "own mapped cache", [*talk, NEXT_USER], **ESCALATE)
    await apply(world, "large-cached unavailable")
    await chat(world, "falls back", [SYSTEM, OTHER_USER], **ESCALATE)


@script("answers / a shadowed descent whose answer fails", maps_down=True, shadow={"share": 1.0})
async def _(world: World) -> None:
    talk = await chat(world, "large by name", [SYSTEM, LONG_USER], model="large")
    world.before("small-0", "chat", 1, partial(world.small.fail, "cached_chat", ERRORS["stale"], times=1))
    await chat(world, "small", [*talk, NEXT_USER])


@script("answers / a probe is no stall")
async def _(world: World) -> None:
    probe: Json = {"kvrelay": {"policy": "always_escalate", "agreement_probe": 4}}
    world.large.stall("cached_chat", after=5)
    asyncio.get_running_loop().call_later(3.0, world.large.heal)
    await chat(world, "silent for three seconds", **probe)


@script("answers / a short prompt is not handed over")
async def _(world: World) -> None:
    await chat(world, "forced", [USER], **ESCALATE)
    world.small.logprob = UNSURE
    await chat(world, "unsure", [OTHER_USER])


@script("answers / a short prompt, and the large model fails")
async def _(world: World) -> None:
    for what in ("unavailable", "too-long", "late"):
        await world.heal()
        await apply(world, f"large {what}")
        await chat(world, f"forced, {what}", [{"role": "user", "content": f"Is it {what}?"}], **ESCALATE)


@script("answers / a short prompt, and one of two large workers fails", tiers="2+1")
async def _(world: World) -> None:
    for what in ("unavailable", "too-long"):
        await world.heal()
        await apply(world, f"large {what}")
        await chat(world, f"forced, {what}", [{"role": "user", "content": f"Is it {what}?"}], **ESCALATE)


@script("answers / a prefill would take too long to leave time for a handoff")
async def _(world: World) -> None:
    world.large.rates = Rates(prefill_tokens_per_s=32.0, map_tokens_per_s=10_000.0)
    await asyncio.sleep(1.5 * POLL_S)
    await chat(world, "forced", **ESCALATE)


@script("answers / logprobs of a text")
async def _(world: World) -> None:
    body = {"model": "auto", "prompt": "Once upon a time", "logprobs": 1}
    await world.turn(body, path="/v1/completions", label="whole")


# The verdict


@script("verdict / the verifier's question fails", **policy("verifier"))
async def _(world: World) -> None:
    world.small.canned_answers = {QUESTION: "Yes"}
    for what in ("unavailable", "late", "overloaded"):
        await world.heal()
        world.before("small-0", "chat", 2, partial(fail, world.small, "cached_chat", what))
        await chat(world, what, [SYSTEM, {"role": "user", "content": f"A question: {what}?"}])


EARLY = confidence(num_tokens=6, speculate_after=2)


async def _drop_early_handoff(world: World, transfer_s: float) -> None:
    world.small.first_logprobs, world.small.logprob = (WAVERING, WAVERING), -0.05
    world.small.token_s = 0.05
    world.large.delay("transfer", transfer_s)
    await chat(world, "whole")
    await chat(world, "streamed", [SYSTEM, OTHER_USER], stream=True)


@script("verdict / an early handoff was not needed", **EARLY)
async def _(world: World) -> None:
    await _drop_early_handoff(world, 0.0)


@script("verdict / an early handoff was not needed and is under way", **EARLY)
async def _(world: World) -> None:
    await _drop_early_handoff(world, 0.2)


@script("verdict / an early handoff to mid, which is judged too", tiers="3", **EARLY)
async def _(world: World) -> None:
    world.small.logprob = world.mid.logprob = WAVERING
    world.small.token_s = world.mid.token_s = 0.05
    await chat(world, "whole")


@script("verdict / an early handoff to mid, leapt over", tiers="3", **confidence(num_tokens=6, leap_below=-0.7))
async def _(world: World) -> None:
    world.small.logprob, world.small.token_s = WAVERING, 0.05
    await chat(world, "whole")


@script("verdict / scores", **confidence(score="margin", threshold=0.5))
async def _(world: World) -> None:
    await chat(world, "sure")
    world.small.logprob = UNSURE
    await chat(world, "unsure", [SYSTEM, OTHER_USER])


BUDGET = policy(
    "rules",
    rules=[
        {
            "name": "spent",
            "when": {"budget": {"tier": "large", "tokens": 300}},
            "then": {"name": "fixed", "tier": "small"},
        }
    ],
    otherwise={"name": "always_escalate"},
)


@script("verdict / a budget is used up", **BUDGET)
async def _(world: World) -> None:
    await chat(world, "within")
    await chat(world, "over", [SYSTEM, OTHER_USER])


# The client hangs up


def add_hang_up(title: str, at_s: float, prepare: Callable[[World], None], *, settings: Json, **fields: Any) -> None:
    @script(f"hang-ups / {title}", **settings)
    async def _(world: World) -> None:
        prepare(world)
        await chat(world, f"gone after {at_s:g} s", hang_up_at_s=at_s, **fields)


def _delays(worker: str, call: str, seconds: float = 5.0, logprob: float = SURE) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.small.logprob = logprob
        world.workers[worker].delay(call, seconds)

    return prepare


def _writes_slowly(worker: str, logprob: float = SURE) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.small.logprob = logprob
        world.workers[worker].token_s = 0.8

    return prepare


for _stream in (False, True):
    _form = {"stream": True} if _stream else {}
    _suffix = ", streamed" if _stream else ""
    add_hang_up(f"during the small prefill{_suffix}", 1.0, _delays("small-0", "prefill"), settings={}, **_form)
    add_hang_up(f"before the small answer{_suffix}", 1.0, _delays("small-0", "cached_chat"), settings={}, **_form)
    add_hang_up(f"while it is judged{_suffix}", 2.5, _writes_slowly("small-0"), settings={}, **_form)
    add_hang_up(f"during a small answer{_suffix}", 4.5, _writes_slowly("small-0"), settings={}, **_form)
    add_hang_up(f"during a handoff{_suffix}", 0.1, _delays("large-0", "transfer", 0.2, UNSURE), settings={}, **_form)
    add_hang_up(
        f"before the large answer{_suffix}", 1.0, _delays("large-0", "cached_chat", 5.0, UNSURE), settings={}, **_form
    )
    add_hang_up(f"during the large answer{_suffix}", 2.5, _writes_slowly("large-0", UNSURE), settings={}, **_form)
    add_hang_up(f"from large by name{_suffix}", 2.5, _writes_slowly("large-0"), settings={}, model="large", **_form)
add_hang_up("before large by name answers", 1.0, _delays("large-0", "chat"), settings={}, model="large")
add_hang_up("during a forced prefill", 1.0, _delays("small-0", "prefill"), settings={}, **ESCALATE)


@script("hang-ups / while a cached prompt is answered")
async def _(world: World) -> None:
    await chat(world, "first")
    world.small.delay("cached_chat", 5.0)
    await chat(world, "gone after 1 s", hang_up_at_s=1.0)


@script("hang-ups / during an early handoff", **EARLY)
async def _(world: World) -> None:
    world.small.logprob, world.small.token_s = WAVERING, 0.1
    world.large.delay("transfer", 0.24)
    await chat(world, "gone after 0.3 s", hang_up_at_s=0.3)


@script("hang-ups / during a fallback")
async def _(world: World) -> None:
    await apply(world, "prefill unavailable")
    world.large.delay("chat", 5.0)
    await chat(world, "gone after 1 s", hang_up_at_s=1.0)


# Limits


async def _chat_beside(world: World, label: str, *, after_s: float = 0.5, **fields: Any) -> None:
    """Record a turn during a long unrecorded request to the large model."""
    world.large.delay("chat", 3.0, times=1)
    body = {"model": "large", "messages": [OTHER_USER], "kvrelay": {"no_cache": True}}
    other = asyncio.create_task(world.http.post("/v1/chat/completions", json=body))
    await asyncio.sleep(after_s)
    await chat(world, label, **fields)
    await other
    await world.forget_metrics()


@script("bounds / one request at once for each tenant", limits={"max_concurrency_per_tenant": 1})
async def _(world: World) -> None:
    await _chat_beside(world, "whole")
    await _chat_beside(world, "streamed", stream=True)


FULL = {"max_concurrency_per_tier": 1, "max_queue_per_tier": 0}


@script("bounds / the large tier is full", limits=FULL)
async def _(world: World) -> None:
    await _chat_beside(world, "sure")
    await _chat_beside(world, "large by name", model="large")
    world.small.logprob = UNSURE
    await _chat_beside(world, "unsure", messages=fresh_prompt("unsure"))
    await _chat_beside(world, "forced", messages=fresh_prompt("forced"), **ESCALATE)


@script("bounds / the large tier has a queue", limits=FULL | {"max_queue_per_tier": 1})
async def _(world: World) -> None:
    await _chat_beside(world, "large by name", model="large")
    world.small.logprob = UNSURE
    await _chat_beside(world, "unsure", messages=fresh_prompt("unsure"))


@script("bounds / requests of a minute are used up", tenants={"default": {"requests_per_minute": 1}})
async def _(world: World) -> None:
    await chat(world, "first")
    await chat(world, "second")
    await asyncio.sleep(61)
    await chat(world, "a minute later")


@script("bounds / tokens of a minute are used up", tenants={"default": {"tokens_per_minute": 100}})
async def _(world: World) -> None:
    await chat(world, "first")
    await chat(world, "second")


@script("bounds / requests that are wrong", limits={"max_messages": 4})
async def _(world: World) -> None:
    await chat(world, "unknown policy", kvrelay={"policy": "guess"})
    await chat(world, "unknown max_tier", kvrelay={"max_tier": "huge"})
    await chat(world, "above max_tier", model="large", kvrelay={"max_tier": "small"})
    await chat(world, "policy for a named model", model="large", kvrelay={"policy": "fixed"})
    await chat(world, "a cache and no_cache", kv_transfer_params={"cache_id": UNKNOWN_ID}, kvrelay={"no_cache": True})
    await chat(world, "unknown field", temperatur=1.0)
    await chat(world, "no messages", [])
    await chat(world, "too many messages", [USER] * 5)


# Circuits


async def _repeat(world: World, count: int, **fields: Any) -> None:
    for number in range(count):
        body = {"model": "auto", "messages": fresh_prompt(f"again{number}")} | fields
        await world.http.post("/v1/chat/completions", json=body)
    await world.forget_metrics()


@script("circuits / of the small worker")
async def _(world: World) -> None:
    await apply(world, "small unavailable")
    await _repeat(world, 4)
    await chat(world, "open")
    await asyncio.sleep(2.5)
    await chat(world, "half open, and still failing", fresh_prompt("b"))
    await world.heal()
    await chat(world, "waits for it by name", fresh_prompt("c"), model="small")
    await chat(world, "half open, and well", fresh_prompt("d"))
    await chat(world, "closed", fresh_prompt("e"))


@script("circuits / of the large worker")
async def _(world: World) -> None:
    await apply(world, "large unavailable")
    await _repeat(world, 4, model="large")
    world.small.logprob = UNSURE
    await chat(world, "open, unsure")
    await asyncio.sleep(2.5)
    await chat(world, "half open, and still failing", fresh_prompt("b"), **ESCALATE)
    await chat(world, "open, forced", fresh_prompt("c"), **ESCALATE)
    await world.heal()
    await chat(world, "waits for it by name", fresh_prompt("d"), model="large")


@script("circuits / of handoffs")
async def _(world: World) -> None:
    await apply(world, "transfer failed")
    await _repeat(world, 4, **ESCALATE)
    await chat(world, "open", **ESCALATE)
    world.small.logprob = UNSURE
    await chat(world, "open, judged", fresh_prompt("b"))
    await asyncio.sleep(2.5)
    await world.heal()
    await chat(world, "half open", fresh_prompt("c"), **ESCALATE)


@script("circuits / of both tiers")
async def _(world: World) -> None:
    await apply(world, "small unavailable + large unavailable")
    await _repeat(world, 4)
    await chat(world, "open, and waited for in vain")
    await _repeat(world, 4)
    await world.heal()
    await chat(world, "open, and well again", fresh_prompt("b"))


@script("circuits / of one of two large workers", tiers="2+1")
async def _(world: World) -> None:
    await apply(world, "large unavailable")
    for number in range(1, 7):
        await chat(world, f"by name, {number}", fresh_prompt(f"b{number}"), model="large")
    await chat(world, "forced", **ESCALATE)


@script("circuits / a drained worker")
async def _(world: World) -> None:
    await chat(world, "first", **ESCALATE)
    await world.drain("large-0")
    await chat(world, "large drained, forced", **ESCALATE)
    await chat(world, "large drained, by name", model="large")
    await world.drain("small-0")
    await chat(world, "both drained")


# Clients that manage caches


@script("cache-calls / read, mapped, and answered from")
async def _(world: World) -> None:
    small = await post(world, "prefill", "prefix/prefill", messages=MESSAGES)
    large = await post(world, "transfer", "cache/transfer", cache_id=small["cache_id"], target_model="large")
    for label, cache in (("from small's", small), ("from large's", large)):
        await chat(world, label, kv_transfer_params={"cache_id": cache["cache_id"]})
    await post(world, "transfer again", "cache/transfer", cache_id=large["cache_id"], target_model="large")
    await post(world, "to its own model", "cache/transfer", cache_id=small["cache_id"], target_model="small")
    options = {"num_tokens": 200, "native_head": 8, "mapper": "fake-bundle", "deadline_ms": 500.0, "ttl_s": 60}
    await post(world, "with options", "cache/transfer", cache_id=small["cache_id"], target_model="large", **options)


@script("cache-calls / prefills")
async def _(world: World) -> None:
    await post(world, "a text", "prefix/prefill", prefix="Once upon a time")
    await post(world, "for large", "prefix/prefill", messages=MESSAGES, target_model="large")
    await post(world, "its stable part", "prefix/prefill", messages=MESSAGES, stable_messages=1)
    await post(world, "for nobody", "prefix/prefill", messages=MESSAGES, target_model="huge")
    await post(world, "nothing", "prefix/prefill")
    world.small.max_model_len = 100
    await post(world, "too long", "prefix/prefill", messages=MESSAGES)


@script("cache-calls / faults")
async def _(world: World) -> None:
    cache = await post(world, "prefill", "prefix/prefill", messages=MESSAGES)
    body = {"cache_id": cache["cache_id"], "target_model": "large"}
    for what in ("failed", "no-bundle", "overloaded", "late"):
        await world.heal()
        await apply(world, f"transfer {what} + prefill {'unavailable' if what == 'failed' else what}")
        await post(world, f"transfer {what}", "cache/transfer", **body, deadline_ms=1000.0)
        await post(world, f"prefill {what}", "prefix/prefill", messages=[SYSTEM, OTHER_USER])
    await world.heal()
    await post(world, "unknown", "cache/transfer", **body | {"cache_id": UNKNOWN_ID})
    world.small.caches.clear()
    await post(world, "lost", "cache/transfer", **body)
    await post(world, "and forgotten", "cache/transfer", **body)


@script("cache-calls / workers down")
async def _(world: World) -> None:
    cache = await post(world, "prefill", "prefix/prefill", messages=MESSAGES)
    await apply(world, "large down")
    await post(world, "transfer", "cache/transfer", cache_id=cache["cache_id"], target_model="large")
    await apply(world, "small down")
    await post(world, "prefill again", "prefix/prefill", messages=MESSAGES)


@script("cache-calls / of another tenant", tenants=TENANTS)
async def _(world: World) -> None:
    acme: dict[str, Any] = {"api_key": KEYS["acme"]}
    await world.turn({"messages": MESSAGES}, path="/v1/prefix/prefill", label="acme's", **acme)
    cache = {"cache_id": world.last_reply["cache_id"]}
    body = cache | {"target_model": "large"}
    await world.turn(body, path="/v1/cache/transfer", label="transfer by default", api_key=KEYS["default"])
    await chat(world, "answer for default", kv_transfer_params=cache, api_key=KEYS["default"])
    await chat(world, "answer for acme", kv_transfer_params=cache, **acme)


@script("cache-calls / the client hangs up")
async def _(world: World) -> None:
    world.small.delay("prefill", 5.0)
    await world.turn({"messages": MESSAGES}, path="/v1/prefix/prefill", label="prefill", hang_up_at_s=1.0)
    await world.heal()
    cache = await post(world, "prefill again", "prefix/prefill", messages=MESSAGES)
    world.large.delay("transfer", 5.0)
    body = {"cache_id": cache["cache_id"], "target_model": "large"}
    await world.turn(body, path="/v1/cache/transfer", label="transfer", hang_up_at_s=1.0)


# Explanations


async def _explain(world: World, label: str, messages: list[Json] = MESSAGES, **fields: Any) -> None:
    await post(world, label, "cascade/explain", model="auto", messages=messages, **fields)


@script("explain / as caches come up")
async def _(world: World) -> None:
    await _explain(world, "nothing known")
    await _explain(world, "forced", **ESCALATE)
    await _explain(world, "exact", kvrelay={"exact": True})
    await _explain(world, "no_cache", kvrelay={"no_cache": True})
    talk = await chat(world, "answered by small")
    await _explain(world, "small has it", talk[:2])
    talk = await chat(world, "handed over", [*talk, NEXT_USER], **ESCALATE)
    await _explain(world, "large has it mapped", [*talk, USER])
    talk = await chat(world, "large by name", [*talk, USER], model="large")
    await _explain(world, "large has it exact", [*talk, NEXT_USER])
    await post(world, "large by name, explained", "cascade/explain", model="large", messages=MESSAGES)


@script("explain / faults")
async def _(world: World) -> None:
    world.large.bundle_off = "below the gate"
    await asyncio.sleep(1.5 * POLL_S)
    await _explain(world, "no bundle")
    world.small.fail("tokenize", ERRORS["unavailable"])
    await _explain(world, "no count")
    world.small.heal()
    await apply(world, "large down")
    await _explain(world, "large down")
    await apply(world, "small down")
    await _explain(world, "both down")
    await _explain(world, "a short one", [USER])
