"""The gateway's settings: the file `kvrelay.yaml`, validated as a whole, immutable.

Workers read the same file; their own keys under `workers:` are ignored here. Environment variables override the file:
`KVRELAY_REGISTRY__URL=redis://...`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as SourceError

from gateway import policies
from gateway.policies import Policy
from gateway.shown import shown
from workers.api.addresses import HttpUrl
from workers.api.config import (
    REDIS_SCHEMES,
    DiscoverySettings,
    RedisAccess,
    Seconds,
    SecondsOrZero,
    SettingsError,
    check_redis_url,
    read_yaml,
)
from workers.api.schemas import DEFAULT_NATIVE_HEAD, DEFAULT_NATIVE_TAIL, DEFAULT_TTL_S
from workers.api.tracing import TracingSettings

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

KEY_HASH = re.compile(r"[0-9a-f]{64}")
AUTO = "auto"
DEFAULT_TENANT = "default"
MEMORY = "memory"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TierSettings(Section):
    """A tier of interchangeable workers. `model` is the public name of its model, and is sent in headers."""

    name: Name
    model: str = Field(pattern=r"^[!-~]{1,128}$")


class WorkerLocation(BaseModel):
    """The tier and address of one worker. All other keys are the worker's own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    tier: str
    url: HttpUrl


class ServerSettings(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    docs: bool = True

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class RegistrySettings(RedisAccess):
    """Where prefixes are looked up. `timeout_ms` bounds what one operation may cost a request."""

    url: str = "memory://"
    max_entries: int = Field(default=10_000, ge=1)
    timeout_ms: int = Field(default=100, ge=10, le=100)

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        return url if _is_memory(url) else check_redis_url(url, schemes=(MEMORY, *REDIS_SCHEMES))

    @property
    def is_shared(self) -> bool:
        """Whether other gateways can use the same registry."""
        return not _is_memory(self.url)

    @property
    def full_url(self) -> str:
        """The URL including the password. Raises `SettingsError` if the password file is unusable."""
        return self.url_with_password("registry")


def _is_memory(url: str) -> bool:
    return url.partition("://")[0] == MEMORY


def _hash_of_key(value: str) -> str:
    if not KEY_HASH.fullmatch(value):
        raise ValueError("must be the SHA-256 of a key, as 64 hexadecimal digits; never the key itself")
    return value


KeyHash = Annotated[str, AfterValidator(_hash_of_key)]


class TenantSettings(Section):
    """`api_keys` are SHA-256 hashes in hex. Rules match `tier` as `tenant_tier`. `models` lists the allowed tiers or
    models; empty means all. A rate of None is unlimited."""

    api_keys: tuple[KeyHash, ...] = ()
    tier: Name | None = None
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class AdminSettings(Section):
    """`key_file` holds the key of `/admin`, with mode 0600. Without it `/admin` is off."""

    key_file: Path | None = None


class Limits(Section):
    """Bounds on what is accepted. Full queues answer 503, a tenant over its share 429, both with `Retry-After`."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    max_header_bytes: int = Field(default=16_384, ge=1024)
    max_messages: int = Field(default=2048, ge=1)
    max_concurrency_per_tier: int = Field(default=64, ge=1)
    max_queue_per_tier: int = Field(default=256, ge=0)
    max_concurrency_per_tenant: int = Field(default=512, ge=1)


class Deadlines(Section):
    """Time limits. All waits of a request end within `request_s`.

    small_share: share of the request's time for the small model, before the large one is called instead.
    decode_reserve_s: time that a handoff leaves for decoding, in addition to a full prefill.
    transfer_floor_s: minimum time for a handoff; otherwise it may take as long as a prefill. For models so small that
        the calls around a handoff take longer than a prefill.
    token_gap_s: maximum gap between tokens before an answer that can still be replaced is given up.
    assumed_prefill_tokens_per_s: prefill rate until one is measured.
    """

    request_s: Seconds = 120.0
    body_s: Seconds = 30.0
    small_share: float = Field(default=0.4, gt=0, lt=1)
    decode_reserve_s: SecondsOrZero = 5.0
    token_gap_s: Seconds = 10.0
    assumed_prefill_tokens_per_s: float = Field(default=200.0, gt=0, allow_inf_nan=False)
    transfer_floor_s: SecondsOrZero = 0.0
    worker_poll_s: Seconds = 1.0
    keep_alive_s: Seconds = 15.0
    client_stall_s: Seconds = 30.0
    shutdown_grace_s: SecondsOrZero = 1.0
    drain_s: SecondsOrZero = 30.0


class HandoffSettings(Section):
    """When and how much to hand over. Prompts below `min_tokens` are not handed over. A large model's own cache is used
    without a policy decision if it leaves at most `max_unread_bytes` of text to prefill."""

    min_tokens: int = Field(default=128, ge=1)
    native_head: int = Field(default=DEFAULT_NATIVE_HEAD, ge=0)
    native_tail: int = Field(default=DEFAULT_NATIVE_TAIL, ge=1)
    max_unread_bytes: int = Field(default=2048, ge=0)
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=86_400)


class BreakerSettings(Section):
    """The circuit opens when a share of `failure_rate` of at least `min_outcomes` calls within `window_s` failed."""

    window: int = Field(default=20, ge=1)
    window_s: Seconds = 30.0
    min_outcomes: int = Field(default=4, ge=1)
    failure_rate: float = Field(default=0.5, gt=0, le=1)
    open_s: Seconds = 2.0
    jitter: float = Field(default=0.2, ge=0, lt=1)
    num_probes: int = Field(default=1, ge=1)
    num_successes: int = Field(default=2, ge=1)


class ShadowSettings(Section):
    """Share of handoffs for which the idle target worker compares next-token distributions over the mapped cache with
    those after a full prefill."""

    share: float = Field(default=0.01, ge=0, le=1)


class Settings(BaseSettings):
    """The whole file. Build it with `load`, which raises `SettingsError` naming the key and what is allowed."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="KVRELAY_", env_nested_delimiter="__", arbitrary_types_allowed=True
    )

    tiers: tuple[TierSettings, ...]
    workers: dict[Name, WorkerLocation] = {}
    server: ServerSettings = ServerSettings()
    registry: RegistrySettings = RegistrySettings()
    policy: dict[str, Any] = {"name": "confidence"}
    tenants: dict[Name, TenantSettings] = {DEFAULT_TENANT: TenantSettings()}
    limits: Limits = Limits()
    admin: AdminSettings = AdminSettings()
    tracing: TracingSettings = TracingSettings()
    deadlines: Deadlines = Deadlines()
    handoff: HandoffSettings = HandoffSettings()
    shadow: ShadowSettings = ShadowSettings()
    discovery: DiscoverySettings | None = None
    breaker: BreakerSettings = BreakerSettings()
    bundles: tuple[str, ...] = ()
    secret_file: Path = Path(".kvrelay/secret")

    _policy: Policy = PrivateAttr()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names = [tier.name for tier in self.tiers]
        if not names:
            raise ValueError("tiers: at least one tier is required, as {name: small, model: NAME}")
        _unique("tiers", [AUTO, *names, *(tier.model for tier in self.tiers if tier.model != tier.name)])
        for worker_id, worker in self.workers.items():
            if worker.tier not in names:
                raise ValueError(f"workers.{worker_id}.tier: unknown tier {worker.tier!r}; known: {', '.join(names)}")
        idle = [name for name in names if name not in {worker.tier for worker in self.workers.values()}]
        if idle and self.discovery is None:
            raise ValueError(f"tiers: tier {idle[0]!r} has no worker; set it as the `tier` of one under workers")
        if DEFAULT_TENANT not in self.tenants:
            raise ValueError(f"tenants: {DEFAULT_TENANT!r} is missing; known: {', '.join(self.tenants)}")
        models = {name for tier in self.tiers for name in (tier.name, tier.model)}
        for tenant_name, tenant in self.tenants.items():
            unknown = [model for model in tenant.models if model not in models]
            if unknown:
                known = ", ".join(sorted(models))
                raise ValueError(f"tenants.{tenant_name}.models: unknown model {unknown[0]!r}; known: {known}")
        _unique("tenants: API key", [key for tenant in self.tenants.values() for key in tenant.api_keys])
        self._policy = policies.build(self.policy)
        self._policy.check(names)
        return self

    @property
    def chosen_policy(self) -> Policy:
        return self._policy

    @property
    def requires_keys(self) -> bool:
        return any(tenant.api_keys for tenant in self.tenants.values())

    @property
    def board_url(self) -> str | None:
        """The URL of the heartbeats' Redis, including the password; None without discovery.

        Raises `SettingsError` if the password file is unusable.
        """
        return None if self.discovery is None else self.discovery.url_with_password("discovery")

    def check_bind(self) -> None:
        """Raise `SettingsError` if other machines can reach the address and no tenant has an API key."""
        if not self.server.is_loopback and not self.requires_keys:
            raise SettingsError(
                f"server.host: {self.server.host} is reachable from other machines, and no tenant has api_keys; "
                "bind to 127.0.0.1, or list SHA-256 hashes of keys under tenants.default.api_keys"
            )


def load(path: Path) -> Settings:
    """Read and validate the file. Relative paths of secrets are resolved against its folder. Raises `SettingsError`."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must be a mapping with the keys {', '.join(Settings.model_fields)}")
    settings, folder = from_values(content), path.parent
    changes: dict[str, Any] = {"secret_file": folder / settings.secret_file}
    if settings.admin.key_file is not None:
        changes["admin"] = AdminSettings(key_file=folder / settings.admin.key_file)
    changes["registry"] = settings.registry.located(folder)
    if settings.discovery is not None:
        changes["discovery"] = settings.discovery.located(folder)
    return settings.model_copy(update=changes)


def from_values(values: dict[str, Any]) -> Settings:
    """Validate the content of a file, overridden by the environment. Raises `SettingsError`."""
    try:
        return Settings(**{str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise SettingsError("; ".join(_message(dict(one)) for one in error.errors(include_url=False))) from error
    except SourceError as error:
        raise SettingsError(f"environment: {error}; the variable must hold JSON") from error
    except RecursionError as error:
        raise SettingsError("the configuration is nested too deep, or contains itself") from error


def _unique(what: str, names: list[str]) -> None:
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"{what}: {min(duplicates)!r} is a duplicate or reserved; names must be unique")


def _message(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; known: {', '.join(_known_keys(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where}: this key is required"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}: {message}{_got(error)}" if where else message


def _got(error: dict[str, Any]) -> str:
    """The rejected value, unless it may be an API key."""
    section, *inner = error["loc"]
    if section == "tenants" and inner[1:2] in ([], ["api_keys"]):
        return ""
    return f", got {shown(error['input'])}"


def _known_keys(loc: tuple[str | int, ...]) -> list[str]:
    """The keys allowed in the section at `loc`, which may go through an index or a free name."""
    return list(SECTIONS[str(loc[0])].model_fields if loc else Settings.model_fields)


SECTIONS: dict[str, type[BaseModel]] = {
    "tiers": TierSettings,
    "server": ServerSettings,
    "registry": RegistrySettings,
    "tenants": TenantSettings,
    "admin": AdminSettings,
    "tracing": TracingSettings,
    "limits": Limits,
    "deadlines": Deadlines,
    "handoff": HandoffSettings,
    "shadow": ShadowSettings,
    "discovery": DiscoverySettings,
    "breaker": BreakerSettings,
}
