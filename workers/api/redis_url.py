"""The URLs of a Redis; among them those that name its sentinels, where its master changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import quote, unquote

from workers.api.addresses import address_of, parts_of, scheme_of

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
REDIS_SCHEMES = ("redis", "rediss", *SENTINEL_SCHEMES)
PORT, SENTINEL_PORT = 6379, 26_379
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
