"""The `workers:` part of kvrelay.yaml, and the cluster secret.

    workers:
      small-0: {tier: small, model: models/smol-small, url: "http://127.0.0.1:8101"}
      large-0: {tier: large, model: models/smol-large, url: "http://127.0.0.1:8102", bundles: [bundles/smol]}

Relative paths are relative to the file's folder. Reading settings loads no model and does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from workers.api import config
from workers.api.addresses import ANY_HOST, HttpUrl, http_address
from workers.api.config import DiscoverySettings, Seconds, SecondsOrZero, SettingsError, read_yaml
from workers.api.tracing import TracingSettings

# Engines by name: the function that loads one. Its module is imported when the engine is loaded.
ENGINES = {
    "transformers": "workers.engines.transformers.engine:load",
    "vllm": "workers.engines.vllm.loading:load",
}
SECRET_FILE_VARIABLE = "KVRELAY_SECRET_FILE"
CREDENTIALS = re.compile(r"//.*@")  # in a URL

M = TypeVar("M", bound=BaseModel)
WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class GateSettings(BaseModel):
    """What a bundle's evaluation must reach, and the protocol it must follow. The default of each bound is the bundle's
    own, or else that of `mappers.manifest.QualityGate`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_ppl_ratio: float | None = Field(default=None, ge=1)
    min_top1: float | None = Field(default=None, ge=0, le=1)
    min_documents: int | None = Field(default=None, ge=1)
    lengths: tuple[int, ...] | None = Field(default=None, min_length=1)


class TcpSettings(BaseModel):
    """Where a worker lends its blocks to workers on other hosts. They connect to `address`, by default `host`. `port` 0
    picks a free port."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65_535)
    address: str | None = None

    @model_validator(mode="after")
    def _needs_reachable_address(self) -> TcpSettings:
        if self.address is None and self.host in ANY_HOST:
            raise ValueError(
                f"host {self.host!r} means every address of this machine; set address to the one that other hosts use"
            )
        return self


class WorkerSettings(BaseModel):
    """One worker. `model` is a folder or a hub name, `name` the model's name in requests. `engine_options` are vLLM's
    own arguments, for engine vllm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: WorkerId
    tier: str = "small"
    model: str
    name: str | None = None
    engine: str = "transformers"
    engine_options: dict[str, Any] = {}
    url: HttpUrl | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65_535)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_threads: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    pool_bytes: ByteSize = Field(default=ByteSize(512 * 2**20), gt=0)
    host_tier_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    release_source: bool = False
    block_tokens: int = Field(default=32, ge=1, le=1024)
    max_running: int = Field(default=16, ge=1)
    max_queue: int = Field(default=64, ge=0)
    max_model_len: int | None = Field(default=None, ge=2)
    max_body_bytes: ByteSize = Field(default=ByteSize(8 * 2**20), gt=0)
    body_timeout_s: Seconds = 10.0
    bundles: list[str] = []
    upgrade_idle_s: Seconds | None = 15.0
    shadow_idle_s: Seconds = 5.0
    shadow_window: int = Field(default=20, ge=1)
    shadow_rest_s: SecondsOrZero = 600.0
    native_share: float = Field(default=0.125, ge=0, le=1)
    gate: GateSettings = GateSettings()
    peers: dict[WorkerId, HttpUrl] = {}
    tracing: TracingSettings = TracingSettings()  # from the file's own section
    discovery: DiscoverySettings | None = None  # this one, too
    tcp: TcpSettings | None = None
    grace_s: SecondsOrZero = 0.5
    drain_s: SecondsOrZero = 30.0

    @model_validator(mode="before")
    @classmethod
    def _bind_to_url(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("url"), str):
            with suppress(ValueError):  # reported by the field's own check
                host, port = http_address(values["url"])
                return {"host": host, "port": port} | values
        return values

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: str) -> str:
        if engine not in ENGINES:
            raise ValueError(f"unknown engine; known: {', '.join(sorted(ENGINES))}")
        return engine

    @model_validator(mode="after")
    def _options_need_vllm(self) -> WorkerSettings:
        if self.engine_options and self.engine != "vllm":
            raise ValueError(f"engine_options are for engine vllm; engine {self.engine} has none")
        return self

    @property
    def model_name(self) -> str:
        """The model's name in replies and tickets."""
        return self.name or (Path(self.model).name if Path(self.model).is_dir() else self.model)

    @property
    def board_url(self) -> str | None:
        """The URL of the heartbeats' Redis, password included; None without discovery. Raises `SettingsError` if the
        password's file cannot be used."""
        return None if self.discovery is None else self.discovery.url_with_password("discovery")


class _ConfigFile(BaseModel):
    """The part of kvrelay.yaml that a worker reads; the rest is the gateway's."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    workers: dict[WorkerId, WorkerSettings] = Field(min_length=1)
    bundles: list[str] = []
    tracing: TracingSettings = TracingSettings()
    discovery: DiscoverySettings | None = None

    @field_validator("workers", mode="before")
    @classmethod
    def _take_ids_from_keys(cls, workers: Any) -> Any:
        if not isinstance(workers, dict):
            return workers
        return {key: {"id": key} | values if isinstance(values, dict) else values for key, values in workers.items()}


def read_settings(path: Path, worker_id: str, *, peers: Mapping[str, str] | None = None) -> WorkerSettings:
    """Read the settings of one worker. Its peers are the other workers that have a `url`, and `peers`.

    Raises `SettingsError` for a missing or invalid file, and for an unknown id.
    """
    config = _validated(path, _ConfigFile, read_yaml(path))
    worker = config.workers.get(worker_id)
    if worker is None:
        raise SettingsError(f"unknown worker {worker_id!r}; {path} has: {', '.join(sorted(config.workers))}")
    known = {other.id: other.url for other in config.workers.values() if other.url and other.id != worker_id}
    folder = path.resolve().parent
    changes = {
        "peers": known | worker.peers | dict(peers or {}),
        "bundles": [_locate(folder, bundle) for bundle in worker.bundles or config.bundles],
        "model": _locate(folder, worker.model),
        "tracing": config.tracing,
        "discovery": config.discovery and config.discovery.located(folder),
    }
    return _validated(path, WorkerSettings, worker.model_dump(exclude_unset=True) | changes)


def read_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Read the cluster secret from the file that KVRELAY_SECRET_FILE names."""
    name = environ.get(SECRET_FILE_VARIABLE)
    if not name:
        raise SettingsError(f"set {SECRET_FILE_VARIABLE} to the file that holds the cluster secret")
    return config.read_secret(Path(name), SECRET_FILE_VARIABLE)


def _validated(path: Path, kind: type[M], data: Any) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise SettingsError(f"{path}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Describe the first error: its place, the message and the value.

    The value of a whole section is left out, since it may hold secrets; so are the credentials of a URL.
    """
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the file"
    value = "" if isinstance(first["input"], dict) else ", got " + CREDENTIALS.sub("//***@", repr(first["input"]))
    return f"{where}: {first['msg']}{value}"


def _locate(folder: Path, name: str) -> str:
    """Return the path relative to `folder` if it exists, else the name unchanged."""
    return str(folder / name) if (folder / name).exists() else name
