"""What the configurations of gateway and worker share: durations, the YAML file, secrets in files, the Redis section.

Error messages never repeat a line of the file: it may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import MultiHostHost, MultiHostUrl

from workers.api.addresses import parse_url
from workers.api.errors import KvrelayError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MERGE_KEY = "<<"
MIN_SECRET_CHARS = 16
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
REDIS_SCHEMES = ("redis", "rediss", *SENTINEL_SCHEMES)
SENTINEL_FORM = "redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT].../MASTER[/DATABASE]"
SENTINEL_PATH = re.compile(r"/(?P<master>[^/]+)(/(?P<database>\d*))?")


class SettingsError(KvrelayError):
    """A setting or a file that cannot be used. The message names it and what is allowed, and repeats no secret."""

    type, code = "settings_error", "invalid_settings"


class _Loader(yaml.SafeLoader):
    """Rejects a duplicate key in a mapping, except `<<`. PyYAML silently keeps the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            scalar = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if scalar in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            if scalar is not None and key.value != MERGE_KEY:
                seen.add(scalar)
        return node


def read_yaml(path: Path) -> Any:
    """Load a YAML file as plain values. Raises `SettingsError`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the configuration {path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{path} is not valid YAML{where}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is not valid YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, KeyError) as error:  # the last two: `!!int x`, `!!bool x`, 2020-99-99
        raise SettingsError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error


def read_secret(path: Path, key: str = "secret_file") -> str:
    """Return the single line of a file with mode 0600. Raises `SettingsError` naming the setting `key`."""
    try:
        mode, secret = path.stat().st_mode & 0o777, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{key}: cannot read {path}: {type(error).__name__}") from error
    if mode & 0o077:
        raise SettingsError(f"{key}: {path} has mode {mode:04o}; it must be 0600, readable by its owner only")
    if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        raise SettingsError(
            f"{key}: {path} must hold one line of at least {MIN_SECRET_CHARS} printable ASCII characters, "
            f"but has {len(secret)} characters"
        )
    return secret


def check_redis_url(url: str, schemes: Sequence[str] = REDIS_SCHEMES) -> str:
    """Return the URL in normal form. Raises `ValueError`, which never repeats the URL: it may hold a password."""
    if url.partition("://")[0] not in schemes:
        raise ValueError(f"must be a URL that begins with {', '.join(f'{scheme}://' for scheme in schemes)}")
    parsed = parse_url(MultiHostUrl, url)
    if parsed.scheme in SENTINEL_SCHEMES and (not parsed.hosts() or not SENTINEL_PATH.fullmatch(parsed.path or "")):
        raise ValueError(f"must have the form {SENTINEL_FORM}")
    return str(parsed)


def sentinel_target(url: str) -> tuple[str, int] | None:
    """Return the master's name and the database of a sentinel URL; None for the URL of a Redis itself."""
    parsed = MultiHostUrl(url)
    found = SENTINEL_PATH.fullmatch(parsed.path or "")
    if parsed.scheme not in SENTINEL_SCHEMES or found is None:
        return None
    return found["master"], int(found["database"] or 0)


def with_password(url: str, password: str) -> str:
    """Insert the password into a URL that has none."""
    hosts = MultiHostUrl(url).hosts() or [MultiHostHost(username=None, password=None, host="localhost", port=None)]
    return _with_hosts(url, [hosts[0] | {"password": quote(password, safe="")}, *hosts[1:]])


def without_credentials(url: str) -> str:
    """Return the URL as it may be printed."""
    return _with_hosts(url, [host | {"username": None, "password": None} for host in MultiHostUrl(url).hosts()])


def _with_hosts(url: str, hosts: list[MultiHostHost]) -> str:
    parsed = MultiHostUrl(url)
    path = parsed.path.removeprefix("/") if parsed.path else None
    return str(MultiHostUrl.build(scheme=parsed.scheme, hosts=hosts, path=path, query=parsed.query))


class RedisAccess(BaseModel):
    """A section that names a Redis. `password_file` holds its password, which then is not part of the URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    password_file: Path | None = None

    @field_validator("password_file")
    @classmethod
    def _url_without_password(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")  # absent if it is invalid
        if path is not None and url is not None and not _takes_password(url):
            raise ValueError("requires a redis:// or rediss:// URL that holds no password itself")
        return path

    def located(self, folder: Path) -> Self:
        """Return a copy with a relative path resolved against `folder`."""
        if self.password_file is None:
            return self
        return self.model_copy(update={"password_file": folder / self.password_file})

    def url_with_password(self, section: str) -> str:
        """Return the URL including the password. Raises `SettingsError` naming the section's `password_file`."""
        if self.password_file is None:
            return self.url
        return with_password(self.url, read_secret(self.password_file, f"{section}.password_file"))


def _takes_password(url: str) -> bool:
    parsed = MultiHostUrl(url)
    return parsed.scheme in REDIS_SCHEMES and not any(host["password"] for host in parsed.hosts())


class DiscoverySettings(RedisAccess):
    """`discovery:` in kvrelay.yaml: the Redis, the interval between heartbeats, and how long a worker may be silent
    before it is dropped."""

    url: Annotated[str, AfterValidator(check_redis_url)]
    beat_s: Seconds = 1.0
    lost_after_s: Seconds = 5.0
