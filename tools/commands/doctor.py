"""`kvrelay doctor`: look at everything that a stack needs, and say of each thing that is wrong what to do about it.

    kvrelay doctor --config kvrelay.yaml

It changes nothing, and may be run beside a stack or before one. Status 0: nothing is wrong (a warning is not); 1:
something is; 2: the command itself was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError

from gateway.errors import SettingsError
from gateway.settings import Settings, read_secret
from tools import family
from tools.family import load_usable, secret_file
from tools.output import add_json_option, render, run_command, write_results
from tools.stack import port_is_free
from workers.api.addresses import ANY_HOST, http_address, http_url
from workers.api.client import WorkerClient
from workers.api.config import RedisAccess, without_credentials
from workers.api.errors import KvrelayError, Unauthorized
from workers.api.schemas import WorkerInfo

Status = Literal["ok", "warning", "wrong", "skipped"]
Probe = Callable[[], Mapping[str, Any] | None]  # of the GPUs: what GPU_PROBE tells, None without torch

SHM = Path("/dev/shm")
MANIFEST = "manifest.json"  # of a bundle
DEFAULT_POOL_BYTES = 512 * 2**20  # a worker's own default, which a test compares
REDIS_TIMEOUT_S = 2.0
LOOPBACK = ("127.0.0.1", "localhost", "::1", *ANY_HOST)
OTHER_WEIGHTS = "fit one for this pair (kvrelay fit), or serve the very models that it was fitted for"
GPU_TIMEOUT_S = 120.0
GPU_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
print(json.dumps({
    "torch": torch.__version__, "devices": [torch.cuda.get_device_name(index) for index in range(count)],
    "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}))
"""


@dataclass(frozen=True)
class Finding:
    """What was looked at, and found; `advice` says what to do where it is not well."""

    check: str
    status: Status
    found: str
    advice: str = ""


def main(argv: Sequence[str] | None = None, *, probe: Probe | None = None) -> int:
    """`probe` tells of the GPUs; by default torch does."""
    parser = argparse.ArgumentParser(
        prog="kvrelay doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="default: ./kvrelay.yaml, else that of the last `kvrelay up`")
    parser.add_argument("--constraints", type=Path, help="default: constraints.txt beside the source, if there is one")
    add_json_option(parser, "the findings")
    options = parser.parse_args(argv)
    return run_command("kvrelay doctor", lambda: _doctor(options, probe or probe_gpus))


def _doctor(options: argparse.Namespace, probe: Probe) -> int:
    config, constraints = options.config or _nearest_config(), options.constraints or _nearest_constraints()
    findings = list(examine(config, constraints, probe))
    wrong = any(finding.status == "wrong" for finding in findings)
    content = {"ok": not wrong, "findings": [asdict(finding) for finding in findings]}
    write_results(_told(findings), options.json, content)
    return int(wrong)


def examine(config: Path | None, constraints: Path | None, probe: Probe) -> Iterator[Finding]:
    """All findings, in the order in which they are best mended."""
    yield from versions(constraints)
    settings = None
    if config is None:
        yield Finding("configuration", "skipped", "no kvrelay.yaml here", "name one with --config, or run `kvrelay up`")
    else:
        settings, finding = configuration(config)
        yield finding
    if config is not None and settings is not None:
        secret, finding = cluster_secret(settings)
        yield finding
        yield registry(settings)
        if settings.discovery is not None:
            yield redis("discovery", settings.discovery, "while it is gone, nobody new is found")
        infos = asyncio.run(ask_workers(settings, secret)) if secret else {}
        yield from workers(settings, infos)
        yield from missing_bundles(settings, infos, config.resolve().parent)
        yield ports(settings, infos)
        yield shared_memory(SHM, pools_to_come(settings, infos))
    yield leftovers(SHM)
    yield gpus(probe)


# Versions and configuration


def versions(constraints: Path | None) -> Iterator[Finding]:
    if constraints is None:
        yield Finding("versions", "skipped", "no constraints.txt here", "name one with --constraints")
        return
    lines = constraints.read_text(encoding="utf-8", errors="replace")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", lines, re.MULTILINE))
    have = {name: found for name in pinned if (found := _installed(name)) is not None}
    # A build for other hardware has a local part (2.13.0+cu130): the version before it counts.
    other = [f"{name} {have[name]}, not {pinned[name]}" for name in have if have[name].split("+")[0] != pinned[name]]
    if other:
        told = f"{len(other)} of {len(have)} differ: {'; '.join(sorted(other)[:5])}"
        yield Finding("versions", "warning", told, f"pip install -c {constraints} of these; others are not tested")
    else:
        yield Finding("versions", "ok", f"{len(have)} packages as in {constraints.name}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def configuration(path: Path) -> tuple[Settings | None, Finding]:
    try:
        settings = load_usable(path)
    except SettingsError as error:
        return None, Finding("configuration", "wrong", error.message, "mend that line; the message says what it allows")
    told = f"{path}: {len(settings.tiers)} tiers, {len(settings.workers)} workers, policy {settings.policy['name']}"
    return settings, Finding("configuration", "ok", told)


def cluster_secret(settings: Settings) -> tuple[str | None, Finding]:
    path = secret_file(settings)
    try:
        return read_secret(path), Finding("cluster secret", "ok", str(path))
    except SettingsError as error:
        advice = "workers are not asked without it; make the file, or name it in KVRELAY_SECRET_FILE"
        return None, Finding("cluster secret", "wrong", error.message, advice)


# Redis


def registry(settings: Settings) -> Finding:
    if not settings.registry.is_shared:
        return Finding("registry", "ok", "in the gateway's memory; several gateways need Redis to share it")
    return redis("registry", settings.registry, "without it every prompt counts as new, and nothing else is lost")


def redis(check: str, access: RedisAccess, cost: str) -> Finding:
    """Whether the Redis that section `check` names answers; `cost` is what it means if not."""
    try:
        url = access.url_with_password(partial(read_secret, key=f"{check}.password_file"))
    except SettingsError as error:
        return Finding(check, "wrong", error.message, "without its password Redis is not asked; make the file")
    return _answer_of(check, url, cost)


def _answer_of(check: str, url: str, cost: str) -> Finding:
    from redis.exceptions import AuthenticationError, RedisError
    from redis.exceptions import TimeoutError as NoAnswer

    shown = without_credentials(url)
    try:
        asyncio.run(_ping(url))
    except AuthenticationError as error:
        return Finding(check, "wrong", f"{shown}: {error}", f"put the right user and password into {check}.url")
    except NoAnswer:
        advice = "it is stuck or overloaded, or its machine cannot be reached: look at both, or start it again"
        return Finding(check, "wrong", f"{shown}: no answer, {REDIS_TIMEOUT_S:g} s a try", f"{advice}; {cost}")
    except (RedisError, OSError, ValueError) as error:
        return Finding(check, "wrong", f"{shown}: {error}", f"start it, or mend {check}.url; {cost}")
    return Finding(check, "ok", f"{shown} answers")


async def _ping(url: str) -> None:
    """Raises what redis-py raises."""
    from redis.asyncio import Redis

    from workers.api.redis import pool_of

    async with Redis.from_pool(pool_of(url, REDIS_TIMEOUT_S)) as client:
        await client.ping()


# Workers


async def ask_workers(settings: Settings, secret: str) -> dict[str, WorkerInfo | KvrelayError]:
    """What each worker says of itself, or why it says nothing."""
    answers = await asyncio.gather(*(_ask(worker.url, secret) for worker in settings.workers.values()))
    return dict(zip(settings.workers, answers, strict=True))


async def _ask(url: str, secret: str) -> WorkerInfo | KvrelayError:
    async with WorkerClient(url, secret) as client:
        try:
            return await client.info()
        except KvrelayError as error:
            return error


def workers(settings: Settings, infos: Mapping[str, WorkerInfo | KvrelayError]) -> Iterator[Finding]:
    known = {name: info for name, info in infos.items() if isinstance(info, WorkerInfo)}
    first = settings.tiers[0].name
    sources = {info.fingerprint for name, info in known.items() if settings.workers[name].tier == first}
    for name, info in infos.items():
        worker = settings.workers[name]
        if isinstance(info, WorkerInfo):
            yield Finding(f"worker {name}", "ok", f"{info.model} on {info.device}, {info.free_blocks} blocks free")
            if worker.tier != first:
                yield bundles(name, info, sources)
        elif isinstance(info, Unauthorized):
            advice = "give it the gateway's secret: the file that KVRELAY_SECRET_FILE names must hold the same line"
            yield Finding(f"worker {name}", "wrong", f"{worker.url}: {info.message}", advice)
        else:
            advice = f"start it (kvrelay worker --config FILE --worker {name}), or mend workers.{name}.url"
            yield Finding(f"worker {name}", "warning", f"{worker.url} does not answer: {info.message}", advice)


def bundles(name: str, info: WorkerInfo, sources: Iterable[str]) -> Finding:
    """Whether the worker has a mapper that passes its gate, for the small model that is in use."""
    check = f"bundles of {name}"
    usable = [one for one in info.bundles if one.usable]
    if not info.bundles:
        advice = f"fit one (kvrelay fit) and name it under workers.{name}.bundles; until then it reads every prompt"
        return Finding(check, "warning", "it has none", advice)
    if not usable:
        reasons = "; ".join(f"{one.bundle_id}: {one.reason}" for one in info.bundles)
        if all(one.target_fingerprint != info.fingerprint for one in info.bundles):
            return Finding(check, "wrong", reasons, OTHER_WEIGHTS)
        return Finding(check, "wrong", reasons, "fit a better one, or set workers.*.gate to what is good enough")
    if sources and not {one.source_fingerprint for one in usable} & set(sources):
        found = ", ".join(f"{one.bundle_id} (from {one.source_model})" for one in usable)
        return Finding(check, "wrong", f"none is for the small model's weights: {found}", OTHER_WEIGHTS)
    return Finding(check, "ok", ", ".join(f"{one.bundle_id} ({one.method})" for one in usable))


def missing_bundles(
    settings: Settings, infos: Mapping[str, WorkerInfo | KvrelayError], folder: Path
) -> Iterator[Finding]:
    """Of workers on this machine that do not run yet: with such a bundle they do not start. Paths are looked up
    in `folder`, the configuration's own, and else from where we stand, as the worker does."""
    for name, worker in settings.workers.items():
        if isinstance(infos.get(name), WorkerInfo) or http_address(worker.url)[0] not in LOOPBACK:
            continue
        named = _names((worker.model_extra or {}).get("bundles") or settings.bundles)
        missing = [one for one in named if not _is_bundle(folder / one) and not _is_bundle(Path(one))]
        if missing:
            advice = f"mend workers.{name}.bundles, or fit it: kvrelay fit ... --out {missing[0]}"
            yield Finding(f"bundles of {name}", "wrong", f"no {MANIFEST} in {', '.join(missing)}", advice)


def _is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _names(value: Any) -> list[str]:
    try:
        return TypeAdapter(list[str]).validate_python(value)
    except ValidationError:
        return []  # what is wrong with it, the worker says


def ports(settings: Settings, infos: Mapping[str, WorkerInfo | KvrelayError]) -> Finding:
    """Whether whoever listens on this machine, on a port of the configuration, is ours."""
    server = settings.server
    wanted = {"gateway": (server.host, server.port)} | {
        name: http_address(worker.url)
        for name, worker in settings.workers.items()
        if not isinstance(infos.get(name), WorkerInfo)
    }
    here = {name: at for name, at in wanted.items() if at[0] in LOOPBACK}
    taken = [f"{name}: {host} port {port}" for name, (host, port) in here.items() if not port_is_free(port, host)]
    if "gateway" in {one.partition(":")[0] for one in taken} and _is_gateway(server.host, server.port):
        taken = [one for one in taken if not one.startswith("gateway:")]
    if taken:
        advice = "stop what listens there (it is no kvrelay that answers), or choose another port"
        return Finding("ports", "wrong", f"taken: {', '.join(taken)}", advice)
    return Finding("ports", "ok", f"free or ours: {', '.join(str(port) for _, port in wanted.values())}")


def _is_gateway(host: str, port: int) -> bool:
    import httpx

    try:
        reply = httpx.get(f"{http_url(host, port)}/readyz", trust_env=False)
        return "tiers" in reply.json()
    except (httpx.HTTPError, ValueError):
        return False


# Shared memory


def pools_to_come(settings: Settings, infos: Mapping[str, WorkerInfo | KvrelayError]) -> int:
    """Bytes that the pools of those workers on this machine's CPUs take that do not run yet."""
    waiting = [one for name, one in settings.workers.items() if not isinstance(infos.get(name), WorkerInfo)]
    extras: list[Mapping[str, Any]] = [one.model_extra or {} for one in waiting]
    on_cpu = [extra for extra in extras if not str(extra.get("device", "cpu")).startswith("cuda")]
    return sum(_num_bytes(extra.get("pool_bytes", DEFAULT_POOL_BYTES)) for extra in on_cpu)


def _num_bytes(value: Any) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        return DEFAULT_POOL_BYTES  # what is wrong with it, the worker says


def shared_memory(folder: Path, needed: int) -> Finding:
    if not folder.is_dir():
        advice = "workers on CPUs hand over through it; run them on Linux (docker: ipc, shm_size)"
        return Finding("shared memory", "wrong", f"there is no {folder}", advice)
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    told = f"{folder}: {free // 2**20} MiB free, pools to come take {needed // 2**20} MiB"
    if free < needed:
        advice = f"mount -o remount,size=... {folder} (docker: shm_size), or lower workers.*.pool_bytes"
        return Finding("shared memory", "wrong", told, advice)
    return Finding("shared memory", "ok", told)


def leftovers(folder: Path) -> Finding:
    """Pools of this user whose worker is dead: it held a lock for as long as it lived."""
    dead = [path for path in sorted(folder.glob(f"kvrelay-{os.getuid()}-*")) if _is_unlocked(path)]
    if not dead:
        return Finding("left by killed workers", "ok", f"nothing in {folder}")
    size = sum(path.stat().st_size for path in dead)
    advice = f"the next worker of this user removes them, or you: rm {' '.join(map(str, dead))}"
    return Finding("left by killed workers", "warning", f"{len(dead)} pools of {size // 2**20} MiB", advice)


def _is_unlocked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


# GPUs


def probe_gpus() -> dict[str, Any] | None:
    """What torch says of the GPUs, in a process of its own: None without torch. Raises `OSError` with its last line."""
    if find_spec("torch") is None:
        return None
    command = [sys.executable, "-c", GPU_PROBE]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"torch took more than {GPU_TIMEOUT_S:.0f} s to look") from error
    if ran.returncode:
        raise OSError((ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1])
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def gpus(probe: Probe) -> Finding:
    try:
        told = probe()
    except OSError as error:
        advice = "run it again on a machine that is less busy; if that does not help, install torch again"
        return Finding("GPUs", "wrong", str(error), advice)
    if told is None:
        return Finding("GPUs", "skipped", "torch is not installed here; a gateway needs none")
    if not told["devices"]:
        return Finding("GPUs", "ok", f"torch {told['torch']} finds none: workers run on CPUs, over shared memory")
    apart = ", ".join(f"{a} and {b}" for a, b in told["apart"])
    if apart:
        advice = "put small and large on one device, or on two that reach each other (nvidia-smi topo -p2p r)"
        return Finding("GPUs", "warning", f"no peer access between {apart}", advice)
    return Finding("GPUs", "ok", f"{', '.join(told['devices'])}: every one reaches every other")


# Which files, and how it is told


def _nearest_config() -> Path | None:
    runs = family.home() / "run"
    made = sorted(runs.glob("*/kvrelay.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (Path("kvrelay.yaml"), *made) if path.is_file()), None)


def _nearest_constraints() -> Path | None:
    path = Path(__file__).parents[2] / "constraints.txt"
    return path if path.is_file() else None


def _told(findings: Sequence[Finding]) -> str:
    table = render(["", "looked at", "found"], [[one.status, one.check, one.found] for one in findings])
    advice = [f"{one.check}: {one.advice}" for one in findings if one.advice and one.status != "skipped"]
    return "\n".join([table, *(["", "what to do:", *(f"  {line}" for line in advice)] if advice else [])])
