"""What the configurations of gateway and worker share: durations, the YAML file, secrets in files, the Redis section.

Error messages never repeat a line of the file: it may hold a password.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote, unquote

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from workers.api.addresses import address_of, parts_of, scheme_of

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MERGED = "<<"
MIN_CHARS = 16

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
REDIS_SCHEMES = ("redis", "rediss", *SENTINEL_SCHEMES)
PORT, SENTINEL_PORT = 6379, 26_379
FORM = "redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT].../MASTER[/DATABASE]"


class ConfigFileError(ValueError):
    """A file that cannot be used. The message names the file and never repeats what it holds."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which PyYAML drops the first without a word; but for `<<`."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            named = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if named in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            if named is not None and key.value != MERGED:
                seen.add(named)
        return node


def read_yaml(path: Path) -> Any:
    """Raises `ConfigFileError`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"cannot read the configuration {path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigFileError(f"{path} is not valid YAML{where}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigFileError(f"{path} is not valid YAML: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, KeyError) as error:  # the last two: `!!int x`, `!!bool x`, 2020-99-99
        raise ConfigFileError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error


def read_secret_file(path: Path) -> str:
    """The one line of the file. Raises `ConfigFileError`, naming the file and never what it holds."""
    try:
        mode, secret = path.stat().st_mode & 0o777, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"cannot read {path}: {type(error).__name__}") from error
    if mode & 0o077:
        raise ConfigFileError(f"{path} has mode {mode:04o}; it must be 0600, readable by its owner only")
    if len(secret) < MIN_CHARS or not secret.isascii() or not secret.isprintable():
        raise ConfigFileError(
            f"{path} must hold one line of {MIN_CHARS} or more printable ASCII characters; it holds {len(secret)} "
            "characters"
        )
    return secret


@dataclass(frozen=True)
class SentinelUrl:
    """`name` is the master's with the sentinels. The credentials are those of the data servers, not the sentinels'."""

    sentinels: tuple[tuple[str, int], ...]
    name: str
    database: int
    username: str | None
    password: str | None
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises `ValueError` for one of another form."""
        parts = parts_of(url)
        user, _, password = (parts.credentials or "").partition(":")
        name, _, database = parts.rest.strip("/").partition("/")
        if not parts.hosts or not name or not (database or "0").isdecimal():
            raise ValueError(f"needs the form {FORM}")
        return cls(
            sentinels=tuple(address_of(host, SENTINEL_PORT) for host in parts.hosts.split(",")),
            name=name,
            database=int(database or 0),
            username=unquote(user) or None,
            password=unquote(password) or None,
            tls=parts.scheme.startswith("rediss"),
        )


def checked(url: str) -> str:
    """The URL as it is. Raises `ValueError` for one that names no Redis."""
    if scheme_of(url) not in REDIS_SCHEMES:
        raise ValueError(f"needs a URL that begins with one of {', '.join(f'{one}://' for one in REDIS_SCHEMES)}")
    if is_sentinel(url):
        SentinelUrl.parse(url)
    elif hosts := parts_of(url).hosts:
        address_of(hosts, PORT)
    return url


def is_sentinel(url: str) -> bool:
    return scheme_of(url) in SENTINEL_SCHEMES


def has_password(url: str) -> bool:
    return ":" in (parts_of(url).credentials or "")


def with_password(url: str, password: str) -> str:
    """For one that has none."""
    parts = parts_of(url)
    return replace(parts, credentials=f"{parts.credentials or ''}:{quote(password, safe='')}").url


def without_credentials(url: str) -> str:
    """As it may be shown."""
    return replace(parts_of(url), credentials=None).url


class RedisAccess(BaseModel):
    """`password_file` holds the password, under the rules of a secret, so that it stands in no URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    password_file: Path | None = None

    @field_validator("password_file")
    @classmethod
    def _for_a_url_without(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")  # none where it cannot be used
        if path is not None and url is not None and (scheme_of(url) not in REDIS_SCHEMES or has_password(url)):
            raise ValueError("goes with a redis:// or rediss:// URL that holds no password itself")
        return path

    def located(self, folder: Path) -> Self:
        """With a relative path taken from `folder`."""
        if self.password_file is None:
            return self
        return self.model_copy(update={"password_file": folder / self.password_file})

    def url_with_password(self, read: Callable[[Path], str]) -> str:
        """`read` takes the password out of its file, and raises what it likes for one that cannot be used."""
        return self.url if self.password_file is None else with_password(self.url, read(self.password_file))


class DiscoverySettings(RedisAccess):
    """`discovery:` in kvrelay.yaml: the Redis, how often a beat comes, and after how long without one a worker is
    given up."""

    beat_s: Seconds = 1.0
    lost_after_s: Seconds = 5.0

    @field_validator("url")
    @classmethod
    def _of_a_redis(cls, url: str) -> str:
        return checked(url)
