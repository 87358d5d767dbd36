"""The URLs of a Redis; among them those that name its sentinels, where its master changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
REDIS_SCHEMES = ("redis", "rediss", *SENTINEL_SCHEMES)
SENTINEL_PORT = 26_379
FORM = "redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT].../MASTER[/DATABASE]"


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
        scheme, _, rest = url.partition("://")  # urlsplit takes one host only
        location, _, path = rest.partition("/")
        credentials, _, hosts = location.rpartition("@")
        user, _, password = credentials.partition(":")
        name, _, database = path.strip("/").partition("/")
        if not hosts or not name or not (database or "0").isdecimal():
            raise ValueError(f"needs the form {FORM}")
        return cls(
            sentinels=tuple(_address(host) for host in hosts.split(",")),
            name=name,
            database=int(database or 0),
            username=unquote(user) or None,
            password=unquote(password) or None,
            tls=scheme.startswith("rediss"),
        )


def checked(url: str) -> str:
    """The URL as it is. Raises `ValueError` for one that names no Redis."""
    if _scheme(url) not in REDIS_SCHEMES:
        raise ValueError(f"needs a URL that begins with one of {', '.join(f'{one}://' for one in REDIS_SCHEMES)}")
    if is_sentinel(url):
        SentinelUrl.parse(url)
    return url


def is_sentinel(url: str) -> bool:
    return _scheme(url) in SENTINEL_SCHEMES


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"has an empty host; it needs the form {FORM}")
    return parts.hostname, parts.port or SENTINEL_PORT
