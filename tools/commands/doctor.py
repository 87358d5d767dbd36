"""`kvrelay doctor`: check everything that a stack needs, and say how to fix what is wrong.

    kvrelay doctor --config kvrelay.yaml

It changes nothing, and may run beside a stack or before one. Status 0: nothing is wrong (warnings are allowed); 1:
something is wrong; 2: the command failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import ByteSize, TypeAdapter, ValidationError

from gateway.settings import Settings
from tools import family
from tools.client import worker_infos
from tools.output import add_json_option, render, run_command, write_results
from tools.stack import port_is_free
from workers.api.addresses import ANY_HOST, http_address, http_url
from workers.api.config import RedisAccess, SettingsError, read_secret, without_credentials
from workers.api.errors import KvrelayError, Unauthorized
from workers.api.schemas import WorkerInfo

Probe = Callable[[], Mapping[str, Any] | None]  # of the GPUs: the output of GPU_PROBE, None without torch

SHM = Path("/dev/shm")
DEFAULT_POOL_BYTES = 512 * 2**20  # a test compares it with the worker's default
REDIS_TIMEOUT_S = 2.0
LOOPBACK = ("127.0.0.1", "localhost", "::1", *ANY_HOST)
FIT_PAIR = "fit one for this pair (kvrelay fit), or serve the models that it was fitted for"
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
    """The result of one check. `advice` says how to fix it."""

    check: str
    status: Literal["ok", "warning", "wrong", "skipped"]
    found: str
    advice: str = ""


def main(argv: Sequence[str] | None = None, *, probe: Probe | None = None) -> int:
    """`probe` reports the GPUs; by default torch does."""
    parser = argparse.ArgumentParser(
        prog="kvrelay doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="default: ./kvrelay.yaml, else that of the last `kvrelay up`")
    parser.add_argument("--constraints", type=Path, help="default: constraints.txt beside the source, if it exists")
    add_json_option(parser, "the findings")
    options = parser.parse_args(argv)
    return run_command("kvrelay doctor", lambda: _doctor(options, probe or probe_gpus))


def _doctor(options: argparse.Namespace, probe: Probe) -> int:
    started = sorted((family.home() / "run").glob("*/kvrelay.yaml"), key=lambda path: -path.stat().st_mtime)
    configs = (path for path in (Path("kvrelay.yaml"), *started) if path.is_file())
    constraints = options.constraints or Path(__file__).parents[2] / "constraints.txt"
    findings = list(_examine(options.config or next(configs, None), constraints, probe))
    is_wrong = any(one.status == "wrong" for one in findings)
    table = render(["", "check", "found"], [[one.status, one.check, one.found] for one in findings])
    advice = [f"  {one.check}: {one.advice}" for one in findings if one.advice and one.status != "skipped"]
    report = "\n".join([table, *(["", "what to do:", *advice] if advice else [])])
    write_results(report, options.json, {"ok": not is_wrong, "findings": [asdict(one) for one in findings]})
    return int(is_wrong)


def _examine(config: Path | None, constraints: Path, probe: Probe) -> Iterator[Finding]:
    """Yield the findings, in the order in which to fix them."""
    yield versions(constraints)
    if config is None:
        yield Finding("configuration", "skipped", "no kvrelay.yaml here", "name one with --config, or run `kvrelay up`")
    else:
        try:
            settings = family.load_usable(config)
        except SettingsError as error:
            yield Finding("configuration", "wrong", error.message, "fix that line; the message says what is allowed")
        else:
            counts = f"{len(settings.tiers)} tiers, {len(settings.workers)} workers"
            yield Finding("configuration", "ok", f"{config}: {counts}, policy {settings.policy['name']}")
            yield from _examine_stack(settings)
    yield gpus(probe)


def _examine_stack(settings: Settings) -> Iterator[Finding]:
    infos: Mapping[str, WorkerInfo | KvrelayError] = {}
    path = family.secret_file(settings)
    try:
        secret = read_secret(path)
    except SettingsError as error:
        advice = "workers are not checked without it; make the file, or name it in KVRELAY_SECRET_FILE"
        yield Finding("cluster secret", "wrong", error.message, advice)
    else:
        yield Finding("cluster secret", "ok", str(path))
        infos = asyncio.run(worker_infos(settings, secret))
    yield registry(settings)
    if settings.discovery is not None:
        yield redis("discovery", settings.discovery, "without it no new worker is found")
    running = {name: info for name, info in infos.items() if isinstance(info, WorkerInfo)}
    yield from workers(settings, infos)
    yield ports(settings, running)
    yield shared_memory(SHM, _bytes_of_pending_pools(settings, running))


def versions(constraints: Path) -> Finding:
    """Compare installed packages with the tested versions."""
    if not constraints.is_file():
        return Finding("versions", "skipped", "no constraints.txt here", "name one with --constraints")
    lines = constraints.read_text(encoding="utf-8", errors="replace")
    num_same, different = 0, []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)$", lines, re.MULTILINE):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed.split("+")[0] == pinned:  # a build for other hardware has a local part (2.13.0+cu130)
            num_same += 1
        else:
            different.append(f"{name} {installed}, not {pinned}")
    if not different:
        return Finding("versions", "ok", f"{num_same} packages as in {constraints.name}")
    found = f"{len(different)} of {num_same + len(different)} differ: {'; '.join(sorted(different)[:5])}"
    return Finding("versions", "warning", found, f"pip install -c {constraints} them; other versions are not tested")


# Redis


def registry(settings: Settings) -> Finding:
    if not settings.registry.is_shared:
        return Finding("registry", "ok", "in the gateway's memory; several gateways need Redis to share it")
    return redis("registry", settings.registry, "without it every prompt counts as new; nothing else is lost")


def redis(check: str, access: RedisAccess, cost: str) -> Finding:
    """Ping the Redis of section `check`. `cost` says what is lost without it."""
    from redis.exceptions import AuthenticationError, RedisError, TimeoutError

    try:
        url = access.url_with_password(check)
    except SettingsError as error:
        return Finding(check, "wrong", error.message, "Redis is not checked without its password; make the file")
    shown = without_credentials(url)
    try:
        asyncio.run(_ping(url))
    except AuthenticationError as error:
        return Finding(check, "wrong", f"{shown}: {error}", f"put the right user and password into {check}.url")
    except TimeoutError:
        advice = f"it is stuck, overloaded or unreachable: check its machine, or restart it; {cost}"
        return Finding(check, "wrong", f"{shown}: no answer within {REDIS_TIMEOUT_S:g} s", advice)
    except (RedisError, OSError, ValueError) as error:
        return Finding(check, "wrong", f"{shown}: {error}", f"start it, or correct {check}.url; {cost}")
    return Finding(check, "ok", f"{shown} answers")


async def _ping(url: str) -> None:
    from redis.asyncio import Redis

    from workers.api.redis import connection_pool

    async with Redis.from_pool(connection_pool(url, REDIS_TIMEOUT_S)) as client:
        await client.ping()


# Workers


def workers(settings: Settings, infos: Mapping[str, WorkerInfo | KvrelayError]) -> Iterator[Finding]:
    first = settings.tiers[0].name
    sources = {
        info.fingerprint
        for name, info in infos.items()
        if isinstance(info, WorkerInfo) and settings.workers[name].tier == first
    }
    for name, info in infos.items():
        check, worker = f"worker {name}", settings.workers[name]
        if isinstance(info, WorkerInfo):
            yield Finding(check, "ok", f"{info.model} on {info.device}, {info.free_blocks} blocks free")
            if worker.tier != first:
                yield bundles(name, info, sources)
        elif isinstance(info, Unauthorized):
            advice = "give it the gateway's secret: KVRELAY_SECRET_FILE must name a file with the same line"
            yield Finding(check, "wrong", f"{worker.url}: {info.message}", advice)
        else:
            advice = f"start it (kvrelay worker --config FILE --worker {name}), or correct workers.{name}.url"
            yield Finding(check, "warning", f"{worker.url} does not answer: {info.message}", advice)


def bundles(name: str, info: WorkerInfo, sources: Collection[str]) -> Finding:
    """Check that a worker has a usable bundle for the small model in use (`sources` are its fingerprints)."""
    check = f"bundles of {name}"
    usable = [one for one in info.bundles if one.usable]
    if not info.bundles:
        advice = f"fit one (kvrelay fit) and name it in workers.{name}.bundles; until then it prefills every prompt"
        return Finding(check, "warning", "it has none", advice)
    if not usable:
        reasons = "; ".join(f"{one.bundle_id}: {one.reason}" for one in info.bundles)
        if all(one.target_fingerprint != info.fingerprint for one in info.bundles):
            return Finding(check, "wrong", reasons, FIT_PAIR)
        return Finding(check, "wrong", reasons, "fit a better one, or set workers.*.gate to what is good enough")
    if sources and not {one.source_fingerprint for one in usable} & set(sources):
        found = ", ".join(f"{one.bundle_id} (from {one.source_model})" for one in usable)
        return Finding(check, "wrong", f"none is for the small model's weights: {found}", FIT_PAIR)
    return Finding(check, "ok", ", ".join(f"{one.bundle_id} ({one.method})" for one in usable))


def ports(settings: Settings, running: Collection[str]) -> Finding:
    """Check that no other program listens on this machine's ports."""
    server = settings.server
    stopped = {name: http_address(one.url) for name, one in settings.workers.items() if name not in running}
    wanted = stopped if _is_gateway(server.host, server.port) else {"gateway": (server.host, server.port)} | stopped
    taken = [
        f"{name}: {host} port {port}"
        for name, (host, port) in wanted.items()
        if host in LOOPBACK and not port_is_free(port, host)
    ]
    if taken:
        advice = "stop the program that listens there (it is not kvrelay), or choose another port"
        return Finding("ports", "wrong", f"taken: {', '.join(taken)}", advice)
    return Finding("ports", "ok", "free or ours")


def _is_gateway(host: str, port: int) -> bool:
    try:
        return "tiers" in httpx.get(f"{http_url(host, port)}/readyz", trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False


# Shared memory and GPUs


def _bytes_of_pending_pools(settings: Settings, running: Collection[str]) -> int:
    """Return the pool sizes of stopped CPU workers. A worker itself reports an invalid size."""
    stopped = (one.model_extra or {} for name, one in settings.workers.items() if name not in running)
    num_bytes = 0
    for extra in stopped:
        if not str(extra.get("device", "cpu")).startswith("cuda"):
            try:
                num_bytes += TypeAdapter(ByteSize).validate_python(extra.get("pool_bytes", DEFAULT_POOL_BYTES))
            except ValidationError:
                num_bytes += DEFAULT_POOL_BYTES
    return num_bytes


def shared_memory(folder: Path, needed: int) -> Finding:
    if not folder.is_dir():
        advice = "CPU workers hand over through it; run them on Linux (docker: ipc, shm_size)"
        return Finding("shared memory", "wrong", f"there is no {folder}", advice)
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    found = f"{folder}: {free // 2**20} MiB free, stopped workers need {needed // 2**20} MiB"
    if free < needed:
        advice = f"mount -o remount,size=... {folder} (docker: shm_size), or lower workers.*.pool_bytes"
        return Finding("shared memory", "wrong", found, advice)
    return Finding("shared memory", "ok", found)


def probe_gpus() -> dict[str, Any] | None:
    """Ask torch for the GPUs, in a process of its own. None without torch. Raises `OSError` if torch fails."""
    if find_spec("torch") is None:
        return None
    try:
        ran = subprocess.run([sys.executable, "-c", GPU_PROBE], capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"torch took more than {GPU_TIMEOUT_S:.0f} s") from error
    if ran.returncode:
        raise OSError((ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1])
    probed: dict[str, Any] = json.loads(ran.stdout)
    return probed


def gpus(probe: Probe) -> Finding:
    try:
        probed = probe()
    except OSError as error:
        return Finding("GPUs", "wrong", str(error), "try again when the machine is less busy, or reinstall torch")
    if probed is None:
        return Finding("GPUs", "skipped", "torch is not installed here; a gateway does not need it")
    if not probed["devices"]:
        return Finding("GPUs", "ok", f"torch {probed['torch']} finds none: workers run on CPUs, over shared memory")
    if probed["apart"]:
        pairs = ", ".join(f"{a} and {b}" for a, b in probed["apart"])
        advice = "put small and large on one device, or on two with peer access (nvidia-smi topo -p2p r)"
        return Finding("GPUs", "warning", f"no peer access between {pairs}", advice)
    return Finding("GPUs", "ok", f"{', '.join(probed['devices'])}: all have peer access to each other")
