"""Where a Redis is whose master changes: the URL that names its sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
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
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, _, password = credentials.partition(":")
        name, _, database = parts.path.strip("/").partition("/")
        if not hosts or not name or not (database or "0").isdecimal():
            raise ValueError(f"needs the form {FORM}")
        return cls(
            sentinels=tuple(_address(host) for host in hosts.split(",")),
            name=name,
            database=int(database or 0),
            username=unquote(user) or None,
            password=unquote(password) or None,
            tls=parts.scheme.startswith("rediss"),
        )


def is_sentinel(url: str) -> bool:
    return urlsplit(url).scheme in SENTINEL_SCHEMES


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"has an empty host; it needs the form {FORM}")
    return parts.hostname, parts.port or SENTINEL_PORT
